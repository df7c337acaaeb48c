"""Casts to FP8 with outputs that the caller gives: what is launched, what torch computes, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import InvalidInputError, quantize
from deep_gemm.arch import SM90
from deep_gemm.kernels.quantize_kernels import (
    FEW_ROWS,
    QUANTIZE,
    ROWS_OF_FLOATS,
    SOME_ROWS,
    TILES,
    TILES_OF_FLOATS,
)
from deep_gemm.ops import cast_reference
from deep_gemm.ops.reference import ACTIVATIONS
from deep_gemm.params import TileConfig
from deep_gemm.spec import Blocks, Dtype, QuantizeSpec
from deep_gemm.testing import guarded

E4M3 = torch.float8_e4m3fn
M, K = 130, 272


def x(rows: int = M, columns: int = K) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["rows", "columns", "blocks", "blocks_transposed"]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_a_value_times_its_scale_is_the_input_again(
    cast: str, rows: int, columns: int, use_ue8m0: bool, epsilon: float
) -> None:
    given = x(rows, columns)
    values, scales = getattr(quantize, cast)(given, use_ue8m0=use_ue8m0, epsilon=epsilon)
    block = (1, 128) if cast in ("rows", "columns") else (128, 128)
    source = given.t() if cast in ("columns", "blocks_transposed") else given
    error = (cast_reference.dequantise(values, scales, block) - source.float()).abs()
    step = scales.repeat_interleave(block[0], 0)[: rows if source is given else columns]
    step = step.repeat_interleave(block[1], 1)[:, : source.shape[1]]
    assert bool((error <= source.float().abs() / 15 + step * 2.0**-9).all())
    if use_ue8m0:
        assert torch.equal(torch.frexp(scales)[0][scales > 0], torch.full_like(scales, 0.5)[scales > 0])


def test_blocks_of_zeros() -> None:
    zeros = torch.zeros(4, 256, dtype=torch.bfloat16)
    values, scales = quantize.rows(zeros, epsilon=0.0)
    assert not values.float().any()
    assert not scales.any()
    _, scales = quantize.rows(zeros)
    assert torch.equal(scales, torch.full((4, 2), 1e-4) / torch.full((), 448.0))
    _, negative = quantize.rows(zeros, epsilon=-0.0)
    assert torch.equal(negative, torch.zeros(4, 2))


@pytest.mark.parametrize(
    "cast", ["rows", "columns", "rows_and_columns", "blocks", "blocks_transposed", "rows_and_blocks_transposed"]
)
@pytest.mark.parametrize("expanded", [(1, 1), (M, 1), (1, K)], ids=["all", "along rows", "along columns"])
def test_an_expanded_gradient_is_cast(cast: str, expanded: tuple[int, int]) -> None:
    """As `sum().backward()` gives it: a copy where the kernel needs one."""
    source = x(*expanded).expand(M, K)
    for found, wanted in zip(
        flat(getattr(quantize, cast)(source)), flat(getattr(quantize, cast)(source.contiguous())), strict=True
    ):
        assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def flat(out: Any) -> list[torch.Tensor]:
    return [each.contiguous() for pair in out for each in (pair if isinstance(pair, tuple) else (pair,))]


def test_a_copied_gradient_is_copied_by_each_call(gpu: FakeGpu) -> None:
    source, kept = x(M, 1).expand(M, K), x(1, K).expand(M, K)
    out = quantize.rows(x())
    gpu.launched.clear()
    for _ in range(3):
        quantize.rows(source, out=out)
        quantize.rows(kept, out=out)
    copies, others = gpu.launched[::2], gpu.launched[1::2]
    assert all(launched.at["x"] != source.data_ptr() for launched in copies)
    assert {launched.strides["x"] for launched in copies} == {(K, 1)}
    assert {(launched.at["x"], launched.strides["x"]) for launched in others} == {(kept.data_ptr(), (0, 1))}


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "odd and gated": (lambda: quantize.rows(x(4, 255), gated=True), "even number of columns"),
    "epsilon below zero": (lambda: quantize.rows(x(), epsilon=-1.0), "epsilon must be a number from 0"),
    "epsilon too large": (lambda: quantize.rows(x(), epsilon=3.5e38), "that float32 can hold"),
    "epsilon is NaN": (lambda: quantize.rows(x(), epsilon=float("nan")), "epsilon must be a number"),
    "out is no pair": (lambda: quantize.rows(x(), out=x()), "out must be a pair"),
    "one output for two": (lambda: quantize.rows_and_columns(x(), out=quantize.rows(x())), r"out\[0\] must be a pair"),
    "a number for two outputs": (lambda: quantize.blocks_and_transpose(x(), out=3),
        "out must be two pairs .* type int"),
    "three outputs for two": (lambda: quantize.rows_and_columns(x(), out=[1, 2, 3]), "two pairs .* it has 3 elements"),
    "no second scales": (lambda: quantize.rows_and_columns(x(), out=(quantize.rows(x()), (x(), None))),
        r"the scales of out\[1\] must be a torch.Tensor"),
    "an epsilon of numpy": (lambda: quantize.rows(x(), epsilon=Number()), "but it is 1.5 of type numpy.Number"),
    "values of another shape": (lambda: quantize.columns(x(), out=quantize.rows(x())),
        r"the values of out must be torch.float8_e4m3fn \(272, 130\)"),
    "scales of another dtype": (
        lambda: quantize.rows(x(), out=(torch.empty(M, K).to(E4M3), torch.empty(M, 3).double())),
        r"the scales of out must be torch.float32 \(130, 3\)"),
    "an index of int64": (lambda: quantize.rows(x(), rows=index().long()), "rows must be torch.int32"),
    "an index that is a list": (lambda: quantize.rows(x(), rows=[0]), "rows must be a torch.Tensor"),
    "an index of two dimensions": (lambda: quantize.rows(x(), rows=index()[None]), "rows must have 1 dimension, but"),
    "an index with gaps": (lambda: quantize.rows(x(), rows=index()[::2]), "rows must be contiguous, .* stride 2"),
    "an index that was freed": (lambda: quantize.rows(x(), rows=freed(index())), "rows has no memory"),
    "an index without data": (lambda: quantize.rows(x(), rows=index().to("meta")), "rows is a meta tensor"),
    "out for all rows of x": (lambda: quantize.rows(x(), rows=index(), out=quantize.rows(x())),
        r"the values of out must be torch.float8_e4m3fn \(5, 272\)"),
    "values on the index": (lambda: onto_the_index(), "the values of out and rows share memory"),
    "freed": (lambda: quantize.rows(freed()), "x has no memory"),
    "factors of double": (lambda: quantize.rows(x(), factors=factors().double()), "factors must be torch.float32"),
    "factors that are a list": (lambda: quantize.rows(x(), factors=[1.0]), "factors must be a torch.Tensor"),
    "factors with gaps": (lambda: quantize.rows(x(), factors=factors(2 * M)[::2]), "factors must be contiguous, .* 2"),
    "factors that were freed": (lambda: quantize.rows(x(), factors=freed(factors())), "factors has no memory"),
    "too few factors": (lambda: quantize.rows(x(), factors=factors(5)), "one for each of the 130 rows .* it has 5"),
    "a factor for each row of x": (lambda: quantize.rows(x(), rows=index(), factors=factors()),
        "one for each of the 5 rows of the result, but it has 130"),
    "factors and powers of two": (lambda: quantize.rows(x(), factors=factors(), use_ue8m0=True),
        "factors must be None if use_ue8m0 is True"),
    "scales on the factors": (
        lambda: quantize.rows(x(), factors=(s := factors(M * 3))[:M], out=(torch.empty(M, K).to(E4M3), s.view(M, 3))),
        "the scales of out and factors share memory"),
}  # fmt: skip


class Number:
    """As one of numpy, which need not be installed."""

    def __str__(self) -> str:
        return "1.5"


Number.__module__ = "numpy"


def index() -> torch.Tensor:
    return torch.tensor([3, 0, -1, M - 1, 3], dtype=torch.int32)


def factors(rows: int = M) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(1))


def onto_the_index() -> Any:
    memory = torch.zeros(5 * K, dtype=torch.uint8)
    rows = memory[-32:].view(torch.int32)[:5]
    _, scales = quantize.rows(x(), rows=index())
    return quantize.rows(x(), rows=rows, out=(memory.view(E4M3).view(5, K), scales))


def freed(tensor: torch.Tensor | None = None) -> torch.Tensor:
    found = x() if tensor is None else tensor
    found.untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str) -> None:
    call, words = MISTAKES[case]
    with pytest.raises(InvalidInputError, match=words):
        call()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 12) | st.integers(-(2**31), 2**31 - 1), max_size=20), st.integers(0, 9), st.booleans())
def test_gathered_rows(chosen: list[int], rows: int, gated: bool) -> None:
    source = x(rows, 272)
    columns = 136 if gated else 272
    values, scales = quantize.rows(source, rows=torch.tensor(chosen, dtype=torch.int32), gated=gated)
    assert values.shape == (len(chosen), columns)
    zeros = quantize.rows(torch.zeros(1, 272, dtype=torch.bfloat16), gated=gated)
    alone = quantize.rows(source, gated=gated)
    for at, row in enumerate(chosen):
        (expected, sf), place = (alone, row) if 0 <= row < rows else (zeros, 0)
        assert torch.equal(values[at].view(torch.uint8), expected[place].view(torch.uint8))
        assert torch.equal(scales[at], sf[place])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), max_size=20), st.booleans(), st.booleans())
def test_factors_multiply_the_scales(given: list[float], gathered: bool, gated: bool) -> None:
    factors, source = torch.tensor(given, dtype=torch.float32), x(30, 272)
    chosen = torch.arange(28, 28 - len(given), -1, dtype=torch.int32) if gathered else None
    source = source if gathered else source[: len(given)]
    values, scales = quantize.rows(source, rows=chosen, factors=factors, gated=gated)
    expected, sf = quantize.rows(source, rows=chosen, gated=gated)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    # Products of two float32 are exact in float64, and are rounded once.
    exact = (sf.double() * factors.double()[:, None]).float()
    torch.testing.assert_close(scales, exact, rtol=0, atol=0, equal_nan=True)


def test_columns_and_tiles_are_separate_launches() -> None:
    """Their factors would share a place in the kernel."""
    for blocks in (("column", "tile"), ("tile", "column")):
        assert "separate launches" in str(QUANTIZE.refuses(QuantizeSpec(8, 8, "bf16", *blocks)))


CHOSEN = [
    ((1, 7168), "bf16", ("row", "none"), False, FEW_ROWS),
    ((36, 7168), "f16", ("row", "none"), False, FEW_ROWS),
    ((64, 7168), "f32", ("row", "none"), True, SOME_ROWS),
    ((8192, 7168), "f16", ("row", "none"), False, TILES),
    ((8192, 7168), "bf16", ("row", "none"), True, ROWS_OF_FLOATS),
    ((1, 7168), "bf16", ("row", "column"), False, TILES),
    ((8192, 7168), "f32", ("tile", "none"), False, TILES_OF_FLOATS),
]


@pytest.mark.parametrize(("size", "dtype", "blocks", "gated", "config"), CHOSEN)
def test_the_config_of_a_cast(
    size: tuple[int, int], dtype: Dtype, blocks: tuple[Blocks, Blocks], gated: bool, config: TileConfig
) -> None:
    spec = QuantizeSpec(*size, dtype, *blocks, gated)
    assert QUANTIZE.config_of(spec, SM90) == config


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.sampled_from(QUANTIZE.configs(SM90)))
def test_grids_are_legal_and_cover_the_matrix(rows: int, columns: int, config: TileConfig) -> None:
    spec = QuantizeSpec(rows, columns, "bf16", "row", "none")
    strides = {"x": (columns, 1), "values": (columns, 1), "scales": (1, rows)}
    shape, values = QUANTIZE.values(QUANTIZE.params(spec, config, SM90), spec, strides, {}, True, False)
    width, height, depth = shape.grid
    assert depth == 1
    assert height <= 65535
    if rows * columns < 2**40:  # more than a GPU's memory
        assert width < 2**31
    across, band = -(-columns // config.tile_columns), 1 << values["band"]
    assert width == across * band
    assert (height - 1) * band < -(-rows // config.tile_rows) <= height * band


@pytest.mark.parametrize(("rows", "columns"), [(0, K), (M, 0), (0, 0)])
def test_nothing_to_cast(gpu: FakeGpu, rows: int, columns: int) -> None:
    (values, scales), (turned, _) = quantize.rows_and_columns(torch.empty(rows, columns, dtype=torch.bfloat16))
    assert values.shape == (rows, columns)
    assert turned.shape == (columns, rows)
    assert scales.shape == (rows, -(-columns // 128))
    assert gpu.launched == []


def test_nothing_outside_of_out_is_written() -> None:
    source = x()
    values = guarded((M, K), E4M3, "cpu", (K + 16, 1))
    scales = guarded((M, 3), torch.float32, "cpu", (1, M + 2))
    out = values.tensor, scales.tensor
    assert quantize.rows(source, out=out) is out
    values.check("values")
    scales.check("scales")
    expected = cast_reference.per_token_cast_to_fp8(source, False)
    assert torch.equal(out[0].float(), expected[0].float())
    assert torch.equal(out[1], expected[1])


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


@pytest.mark.parametrize("gap", [0, 16])
def test_several_matrices_are_cast_as_each_alone(gap: int) -> None:
    source = torch.stack([x(M + gap) * size for size in (1.0, 3.0, 100.0)])[:, :M]
    both = quantize.blocks_and_transpose(source)
    assert all(map(torch.equal, bits(both), bits((quantize.blocks(source), quantize.blocks_transposed(source)))))
    for matrix, *found in zip(source, *(part for pair in both for part in pair), strict=True):
        wanted = [part for pair in quantize.blocks_and_transpose(matrix) for part in pair]
        assert all(map(torch.equal, bits([found]), bits([wanted])))


def test_several_matrices_are_one_launch(gpu: FakeGpu) -> None:
    quantize.blocks_and_transpose(torch.ones(5, M, K).bfloat16())
    (launched,) = gpu.launched
    assert (launched.spec.groups, launched.spec.rows, launched.spec.columns) == (5, M, K)


@pytest.mark.parametrize("cast", ["rows_and_columns", "rows_and_blocks_transposed"])
def test_scales_of_rows_may_be_row_major(cast: str) -> None:
    usual, asked = (getattr(quantize, cast)(x(), row_major=row_major) for row_major in (False, True))
    assert usual[0][1].stride() == (1, 132)
    assert asked[0][1].stride() == (3, 1)
    assert asked[1][1].is_contiguous()
    assert all(map(torch.equal, bits(usual), bits(asked)))
