"""Where gradients end, which is told once a process, and how exact weight gradients are."""

import logging
from collections.abc import Callable

import pytest
import torch
from call_kinds import BF16, KINDS
from gpu_fakes import FakeGpu
from nn_cases import relative
from public_calls import CALLS

import deep_gemm
from deep_gemm import InvalidInputError, log, quantize
from deep_gemm.quantize import Quantized

OURS = [
    name
    for name, made in CALLS.items()
    if not (made.by_torch or name.startswith(("testing.", "tensor_map", "get_paged")))
]


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log.reset_warnings()
    caplog.set_level(logging.WARNING, "deep_gemm")
    return caplog


@pytest.mark.parametrize("name", OURS)
def test_an_operand_that_was_computed_with_gradients_is_told_of_once(name: str, told: pytest.LogCaptureFixture) -> None:
    made, seen = CALLS[name], 0
    for operand in made.tensors():
        tensors = made.tensors()
        if not tensors[operand].is_floating_point():
            continue
        log.reset_warnings()
        told.clear()
        leaf = tensors[operand].detach().requires_grad_()
        try:
            made.call(tensors | {operand: leaf})
        except InvalidInputError as error:
            assert "requires grad" in str(error)  # noqa: PT017 an output
            continue
        with torch.no_grad():
            made.call(tensors | {operand: leaf.view_as(leaf)})
        assert not told.records
        computed = tensors | {operand: leaf.view_as(leaf)}
        for _ in range(2):
            made.call(computed)
        (record,) = told.records
        assert "was computed with gradients" in record.getMessage()
        assert "torch.autograd.Function" in record.getMessage()
        seen += 1
    assert seen


def test_the_lost_part_of_a_sum_is_told_of(told: pytest.LogCaptureFixture) -> None:
    x, p = torch.ones(16, 64, dtype=BF16, requires_grad=True), torch.ones(64, 64, dtype=BF16)
    w, d = torch.ones(32, 64, dtype=BF16, requires_grad=True), torch.zeros(16, 32, dtype=BF16)
    deep_gemm.bf16_gemm_nt(x, w, d)
    assert not told.records
    deep_gemm.bf16_gemm_nt(x @ p, w, d)
    (record,) = told.records
    assert "bf16_gemm_nt: a was computed with gradients (MmBackward0)" in record.getMessage()
    (x.sum() + d.sum()).backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all()), "the product has no part in it"


@pytest.mark.parametrize("name", ["bf16", "fp8", "index bf16", "k bf16", "rows"])
def test_a_call_that_was_warmed_without_gradients_is_told_of(
    gpu: FakeGpu, name: str, told: pytest.LogCaptureFixture
) -> None:
    """An evaluation comes before training, with the same sizes and addresses."""
    kind = KINDS[name]
    tensors = kind.tensors()
    inputs = [each for each in tensors if each not in kind.written]
    operand = next(each for each in inputs if tensors[each].dtype in (BF16, torch.float32))
    source = tensors[operand].requires_grad_()
    tensors[operand] = source.view_as(source)
    with torch.no_grad():
        for _ in range(3):
            kind(tensors)
    assert not told.records
    kind(tensors)
    assert len(told.records) == 1
    kind(tensors)
    before = gpu.prepared
    for _ in range(2):  # both are remembered
        kind(tensors)
        with torch.no_grad():
            kind(tensors)
    assert gpu.prepared == before


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
