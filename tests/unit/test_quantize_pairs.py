"""Casts to FP8 with two outputs, a matrix and its transpose, from one pass."""

from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

from deep_gemm import quantize
from deep_gemm.ops.reference import ACTIVATIONS
from deep_gemm.spec import Blocks

M, K = 130, 272
PAIRS: dict[str, tuple[Blocks, Blocks]] = {
    "rows_and_columns": ("row", "column"),
    "blocks_and_transpose": ("tile", "tile"),
    "rows_and_blocks_transposed": ("row", "tile"),
}
"""The casts, and the blocks of each output."""
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "powers of two": {"use_ue8m0": True, "epsilon": 0.0},
    "gated": {"gated": True},
}


def x(rows: int = M, columns: int = K) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def bits(out: Any) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8) for pair in out for tensor in pair]


@pytest.mark.parametrize("cast", PAIRS)
def test_one_launch_writes_all_outputs(gpu: FakeGpu, cast: str) -> None:
    source = x()
    first, second = getattr(quantize, cast)(source)
    (launched,) = gpu.launched
    assert launched.kernel == "quantize"
    assert launched.at == {
        "x": source.data_ptr(),
        "values": first[0].data_ptr(),
        "scales": first[1].data_ptr(),
        "t_values": second[0].data_ptr(),
        "t_scales": second[1].data_ptr(),
    }
    assert launched.strides["t_scales"] == second[1].stride()
    assert (launched.spec.plain, launched.spec.transposed) == PAIRS[cast]


NOT_GATED = [(cast, options) for cast in PAIRS for options in OPTIONS if options != "gated"]
GATED = [("rows_and_columns", "gated"), ("rows_and_blocks_transposed", "gated")]


@pytest.mark.parametrize(("cast", "options"), NOT_GATED + GATED)
def test_both_from_one_pass_are_what_each_is_alone(cast: str, options: str) -> None:
    """Into fresh outputs, and into given ones."""
    source, named = x(columns=2 * K), dict(OPTIONS[options])
    found = getattr(quantize, cast)(source, **named)
    given = tuple(tuple(map(torch.zeros_like, pair)) for pair in found)
    assert getattr(quantize, cast)(source, out=given, **named) == given
    if named.pop("gated", False):
        left, right = source.float().chunk(2, dim=1)
        source = ACTIVATIONS["silu"](left) * right
    plain = {"row": quantize.rows, "tile": quantize.blocks}[PAIRS[cast][0]](source, **named)
    turned = {"column": quantize.columns, "tile": quantize.blocks_transposed}[PAIRS[cast][1]](source, **named)
    for pairs in (found, given):
        assert all(map(torch.equal, bits(pairs), bits((plain, turned))))


@pytest.mark.parametrize("cast", ["rows_and_columns", "rows_and_blocks_transposed"])
def test_scales_of_rows_may_be_row_major(cast: str) -> None:
    usual, asked = (getattr(quantize, cast)(x(), row_major=row_major) for row_major in (False, True))
    assert usual[0][1].stride() == (1, 132)
    assert asked[0][1].stride() == (3, 1)
    assert asked[1][1].is_contiguous()
    assert all(map(torch.equal, bits(usual), bits(asked)))
