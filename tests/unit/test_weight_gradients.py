"""How exact weight gradients are, by how x is scaled, and one cast of x for two products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nn_cases import relative

import deep_gemm
from deep_gemm import quantize
from deep_gemm.quantize import Quantized

TOKENS, OUT, IN, GROUPS = 512, 256, 512, 2
ONE_BY_128, MIXED = (1, 1, 128), (1, 128, 128)


def of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(dy: Quantized, x: Quantized, recipe: tuple[int, int, int]) -> torch.Tensor:
    d = torch.zeros(OUT, IN)
    deep_gemm.fp8_gemm_nt(dy, x, d, c=d, recipe=recipe)
    return d


def experts(dy: Quantized, x: Quantized, recipe: tuple[int, int, int]) -> torch.Tensor:
    d, sizes = torch.zeros(GROUPS, OUT, IN), torch.full((GROUPS,), TOKENS // GROUPS, dtype=torch.int32)
    deep_gemm.k_grouped_fp8_gemm_nt_padded(dy, x, d, sizes, d, recipe=recipe)
    return d.sum(0)


INPUTS: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
    "normal": (lambda: of(TOKENS, IN), 1.02),
    "SwiGLU": (lambda: torch.nn.functional.silu(of(TOKENS, IN)) * of(TOKENS, IN, seed=2), 1.09),
}
"""Inputs of a layer, and how much larger the error of the mixed recipe may be than that of 1x128 scales."""


@pytest.mark.parametrize("product", [dense, experts])
@pytest.mark.parametrize("kind", INPUTS)
def test_the_mixed_recipe_is_nearly_as_exact_as_1x128_and_better_than_casting_rows_again(
    product: Callable[..., torch.Tensor], kind: str
) -> None:
    """Who keeps only the FP8 rows of the forward pass casts them again for the weight gradient, and rounds twice."""
    make, bound = INPUTS[kind]
    x, dy = make().bfloat16(), of(TOKENS, OUT, seed=1).bfloat16()
    exact = dy.double().t() @ x.double()
    rows, blocks = quantize.rows_and_blocks_transposed(x)
    again = quantize.columns(deep_gemm.dequantise(*rows))
    columns_of_dy = quantize.columns(dy)
    usual, mixed, twice = (
        relative(product(columns_of_dy, columns, recipe), exact)
        for columns, recipe in ((quantize.columns(x), ONE_BY_128), (blocks, MIXED), (again, ONE_BY_128))
    )
    assert 0.02 < usual < 0.04
    assert mixed < bound * usual
    assert bound * usual < twice < 1.3 * usual


def test_a_small_channel_of_a_block_is_lost_by_the_mixed_recipe_only() -> None:
    """At 2^13 a little, at 2^16 a quarter: the sizes that `quantize.spread` tells of."""
    dy = of(TOKENS, OUT, seed=1).bfloat16()
    errors = {}
    for exponent in (10, 13, 16):
        x = of(TOKENS, IN)
        x[:, 7] *= 2.0**-exponent
        exact = dy.double().t() @ x.bfloat16().double()
        columns = quantize.columns(x.bfloat16(), epsilon=0), quantize.blocks_transposed(x.bfloat16(), epsilon=0)
        for recipe, each in zip((ONE_BY_128, MIXED), columns, strict=True):
            found = dense(quantize.columns(dy), each, recipe)
            errors[recipe, exponent] = relative(found[:, 7], exact[:, 7])
    assert all(errors[ONE_BY_128, exponent] < 0.04 for exponent in (10, 13, 16)), errors
    assert errors[MIXED, 10] < 0.04 < errors[MIXED, 13] < 0.06
    assert errors[MIXED, 16] > 0.2


def test_one_cast_in_blocks_serves_the_forward_product_too() -> None:
    """The scale of a block is that of each of its rows."""
    tokens = 144
    x, w = of(tokens, IN).bfloat16(), of(OUT, IN, seed=1).bfloat16()
    (values, scales), (turned, turned_scales) = quantize.blocks_and_transpose(x)
    assert torch.equal(values.t().contiguous().view(torch.uint8), turned.contiguous().view(torch.uint8))
    assert torch.equal(scales.t(), turned_scales)
    rows = values, scales.repeat_interleave(128, 0)[:tokens]
    blocks = quantize.blocks(w)
    y, usual = torch.empty(2, tokens, OUT)
    deep_gemm.fp8_gemm_nt(rows, blocks, y)
    deep_gemm.fp8_gemm_nt(quantize.rows(x), blocks, usual)
    meant = deep_gemm.dequantise(values, scales, (128, 128), torch.float64)
    assert relative(y, meant @ deep_gemm.dequantise(*blocks, (128, 128), torch.float64).t()) < 1e-5
    exact = x.double() @ w.double().t()
    assert relative(y, exact) < 1.05 * relative(usual, exact)
