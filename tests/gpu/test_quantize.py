"""Casts to FP8 on a GPU give the bytes that torch computes on the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import step_cases
import torch
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import InvalidInputError, quantize
from deep_gemm.arch import SM90
from deep_gemm.kernels.quantize_kernels import QUANTIZE, QuantizeFamily
from deep_gemm.nn import casts
from deep_gemm.ops import cast_reference, moe_rows
from deep_gemm.ops.table import DTYPES
from deep_gemm.params import TileConfig
from deep_gemm.runtime import calls, engine
from deep_gemm.spec import QuantizeSpec
from deep_gemm.testing import guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 128), (1, 7168), (64, 512), (128, 128), (129, 136), (127, 250), (200, 1), (300, 1000), (16, 16)]


def awkward(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal data, with difficult values in some blocks."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x *= 10.0 ** torch.randint(-6, 4, (rows, 1), generator=torch.Generator().manual_seed(seed + 1))
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 65504.0, -1e-5]
    for index, value in enumerate(special):
        x[(index * 37) % rows, (index * 53) % columns] = value
    x[rows // 2] = 0.0
    return x.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are the same; all NaN count as equal."""
    a, b = found.cpu(), expected.cpu()
    bits = torch.uint8 if a.dtype == E4M3 else torch.int32
    nan = a.float().isnan() & b.float().isnan()
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | nan).all())


def reference(x: torch.Tensor, block: tuple[int, int], use_ue8m0: bool, epsilon: float) -> tuple[Any, Any]:
    return cast_reference.cast_blocks(x.cpu(), *block, use_ue8m0, epsilon)


@contextlib.contextmanager
def fresh_choices() -> Iterator[None]:
    """Configs are chosen anew inside, and again afterwards."""
    engine.forget_plans()
    calls.forget_all()
    try:
        yield
    finally:
        engine.forget_plans()
        calls.forget_all()


CASTS: dict[str, tuple[Callable[..., Any], tuple[int, int], bool]] = {
    "rows": (quantize.rows, (1, 128), False),
    "columns": (quantize.columns, (128, 1), True),
    "blocks": (quantize.blocks, (128, 128), False),
    "blocks_transposed": (quantize.blocks_transposed, (128, 128), True),
}


@pytest.mark.parametrize("epsilon", [1e-4, 0.0])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cast", CASTS)
def test_bytes(cast: str, dtype: torch.dtype, use_ue8m0: bool, epsilon: float) -> None:
    function, block, flip = CASTS[cast]
    for index, (rows, columns) in enumerate(SHAPES):
        x = awkward(rows, columns, dtype, index)
        # Aligned rows, and rows without alignment for reads of eight elements.
        strides = (columns + 8 - columns % 8, 1) if index % 2 else (columns, 1)
        source = guarded_copy(x.to(DEVICE), strides, offset=0 if index % 3 else x.element_size()).tensor
        values, scales = function(source, use_ue8m0=use_ue8m0, epsilon=epsilon)
        expected, sf = reference(x, block, use_ue8m0, epsilon)
        what = f"{rows} x {columns}"
        assert same(scales.t() if flip else scales, sf), f"scales of {what}"
        assert same(values.t() if flip else values, expected), f"values of {what}"


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_bytes_of_tiny_blocks(cast: str, use_ue8m0: bool) -> None:
    """Around 448 * 2^-128, below which 1 / scale is more than a float32 can hold, and down to nothing."""
    function, block, flip = CASTS[cast]
    sizes = torch.exp2(torch.arange(-149.0, -105.0).double()).float()
    edge = torch.full((), 448 * 2.0**-128).view(torch.int32)
    sizes = torch.cat([sizes, (edge + torch.arange(-9, 10, dtype=torch.int32)).view(torch.float32), torch.zeros(1)])
    for size in sizes.tolist():
        x = size * torch.linspace(-1, 1, 129 * 136).view(129, 136)
        values, scales = function(x.to(DEVICE), use_ue8m0=use_ue8m0, epsilon=0.0)
        expected, sf = reference(x, block, use_ue8m0, 0.0)
        assert same(scales.t() if flip else scales, sf), f"scales of {size}"
        assert same(values.t() if flip else values, expected), f"values of {size}"


@pytest.mark.parametrize("cast", ["rows", "columns", "blocks"])
def test_expanded_gradients(cast: str) -> None:
    for shape in ((1, 1), (300, 1), (1, 272)):
        x = torch.randn(shape, device=DEVICE).bfloat16().expand(300, 272)
        found, expected = getattr(quantize, cast)(x), getattr(quantize, cast)(x.contiguous())
        assert all(same(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    token = deep_gemm.per_token_cast_to_fp8(x, False)
    assert all(same(mine, theirs) for mine, theirs in zip(token, quantize.rows(x), strict=True))


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8"])
def test_options_are_refused_as_on_the_cpu(name: str) -> None:
    x = torch.ones(128, 128, device=DEVICE)
    with pytest.raises(InvalidInputError, match="use_ue8m0 must be True or False, but it is 1"):
        getattr(deep_gemm, name)(x, 1)
    with pytest.raises(InvalidInputError, match=r"gran_k must be a whole number from 1, but it is 128\.0"):
        getattr(deep_gemm, name)(x, False, 128.0)


_config_of = QuantizeFamily.config_of  # tests replace it


def serves(spec: QuantizeSpec, config: TileConfig) -> bool:
    """Whether calls use this config for casts of this kind, of whatever size."""
    sizes = (replace(spec, rows=rows, columns=1024) for rows in (1, 512, 1 << 20))
    return any(_config_of(QUANTIZE, each, SM90) == config for each in sizes)


@pytest.mark.parametrize("config", QUANTIZE.configs(SM90), ids=QUANTIZE.describe)
@pytest.mark.parametrize("cast", [*CASTS, "gathered rows"])
def test_bytes_of_each_config(cast: str, config: TileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the matrix: by size, calls of tests would all choose the same."""
    monkeypatch.setattr(QuantizeFamily, "config_of", lambda self, spec, arch: config)
    function, block, flip = CASTS[cast.split()[-1]]
    blocks = {"rows": "row", "columns": "column"}.get(cast.split()[-1], "tile")
    for index, (rows, columns) in enumerate([*SHAPES, (1100, 2100)]):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            spec = QuantizeSpec(rows, columns, DTYPES[dtype], *(("none", blocks) if flip else (blocks, "none")))
            if not serves(spec, config):
                continue
            with fresh_choices():
                x = awkward(rows, columns, dtype, index)
                chosen = torch.arange(rows, dtype=torch.int32).flip(0) if "gathered" in cast else None
                given = {"rows": chosen.to(DEVICE)} if chosen is not None else {}
                values, scales = function(x.to(DEVICE), **given)
                expected, sf = reference(x if chosen is None else x[chosen], block, False, cast_reference.AMAX_MIN)
            assert same(scales.t() if flip else scales, sf), f"scales of {rows} x {columns} {dtype}"
            assert same(values.t() if flip else values, expected), f"values of {rows} x {columns} {dtype}"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (40, 7168), (129, 250), (3, 1000)])
def test_gathered_rows_are_the_cast_of_those_rows(rows: int, columns: int, gated: bool) -> None:
    """Any order, repeated rows, and rows of zeros for numbers that are no row."""
    x = awkward(rows, columns * (1 + gated), torch.bfloat16).to(DEVICE)
    generator = torch.Generator().manual_seed(rows)
    for count in (1, 7, 200):
        index = torch.randint(-1, rows, (count,), generator=generator, dtype=torch.int32)
        index[count // 2] = -1
        if count > 6:
            index[:4] = torch.tensor([rows, 2**31 - 1, -(2**31), rows - 1])
        known = (index >= 0) & (index < rows)
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        alone = quantize.rows(padded[torch.where(known, index, rows).long()], gated=gated)
        found = quantize.rows(x, rows=index.to(DEVICE), gated=gated)
        assert all(same(mine, theirs) for mine, theirs in zip(found, alone, strict=True))


def test_gathering_from_a_matrix_without_rows() -> None:
    x = torch.empty(0, 256, device=DEVICE, dtype=torch.bfloat16)
    values, scales = quantize.rows(x, rows=torch.full((5,), -1, dtype=torch.int32, device=DEVICE))
    expected, sf = reference(torch.zeros(5, 256), (1, 128), False, cast_reference.AMAX_MIN)
    assert same(values, expected)
    assert same(scales, sf)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_multiply_the_scales_and_leave_the_values(dtype: torch.dtype, gated: bool, gathered: bool) -> None:
    for index, (rows, columns) in enumerate([*SHAPES, (1100, 2100)]):  # the last has other tiles
        x = awkward(rows, columns * (1 + gated), dtype, index).to(DEVICE)
        chosen = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE).flip(0) if gathered else None  # one is no row
        factors = torch.randn(rows + gathered, generator=torch.Generator().manual_seed(rows))
        for place, special in enumerate((0.0, float("nan"), 1e-38, 3e38, -float("inf"))[: len(factors) // 2]):
            factors[place] = special
        values, scales = quantize.rows(x, rows=chosen, factors=factors.to(DEVICE), gated=gated)
        expected, sf = quantize.rows(x, rows=chosen, gated=gated)
        assert same(values, expected), f"values of {rows} x {columns}"
        assert same(scales, sf.cpu() * factors[:, None]), f"scales of {rows} x {columns}"


@pytest.mark.parametrize("exact", [True, False])
def test_factors_of_rows_are_those_of_the_result(exact: bool) -> None:
    """Of experts, with SwiGLU in the cast. Powers of two leave the same bits; other factors round once more."""
    m, n, k, experts = 512, 256, 768, 3
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(m, 2 * k, device=DEVICE, generator=generator).bfloat16()
    weights = [
        quantize.blocks(torch.randn(n, k, device=DEVICE, generator=generator).bfloat16()) for _ in range(experts)
    ]
    b = torch.stack([values for values, _ in weights]), torch.stack([scales for _, scales in weights])
    labels = (torch.arange(m, device=DEVICE) // 256).int()
    factors = torch.rand(m, device=DEVICE, generator=generator) - 0.5
    if exact:
        factors = torch.exp2(torch.round(8 * factors))
    d, weighted = (torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(quantize.rows(hidden, gated=True), b, d, labels)
    a = quantize.rows(hidden, gated=True, factors=factors)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, weighted, labels)
    expected = d.float() * factors[:, None]
    if exact:
        assert torch.equal(weighted.float(), expected)
    else:
        # Both results were rounded to bfloat16, by 1 / 256 at most. Sums of float32 that nearly cancel differ by more.
        limit = expected.abs() * (2.02 / 256) + 1e-5 * d.float().abs().max() * factors.abs()[:, None]
        assert bool(((weighted.float() - expected).abs() <= limit).all())


@cuda_only
def test_operands_that_another_kernel_has_just_written() -> None:
    """The index and the factors are read after the kernels before have finished, in a graph too."""
    x = torch.randn(64, 512, device=DEVICE).bfloat16()
    index = torch.zeros(300, dtype=torch.int32, device=DEVICE)
    factors = torch.zeros(300, device=DEVICE)
    out = quantize.rows(x, rows=index, factors=factors)
    graph = torch.cuda.CUDAGraph()
    steps = torch.arange(300, dtype=torch.int32, device=DEVICE)
    with torch.cuda.graph(graph):
        torch.remainder(steps, 65, out=index)
        torch.add(steps, 0.5, out=factors)
        quantize.rows(x, rows=index, factors=factors, out=out)
    graph.replay()
    torch.cuda.synchronize()
    values, scales = quantize.rows(torch.cat([x, torch.zeros_like(x[:1])])[index.long()])
    assert same(out[0], values)
    assert same(out[1], scales * (steps + 0.5)[:, None])


PAIRS = {
    "rows_and_columns": ("rows", "columns"),
    "blocks_and_transpose": ("blocks", "blocks_transposed"),
    "rows_and_blocks_transposed": ("rows", "blocks_transposed"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_both_from_one_pass_are_what_each_is_alone(pair: str) -> None:
    for index, (rows, columns) in enumerate(SHAPES):
        x = awkward(rows, columns, torch.bfloat16, index).to(DEVICE)
        found = getattr(quantize, pair)(x)
        for got, name in zip(found, PAIRS[pair], strict=True):
            alone = getattr(quantize, name)(x)
            assert all(same(mine, theirs) for mine, theirs in zip(got, alone, strict=True)), name


@pytest.mark.parametrize("row_major", [False, True])
def test_nothing_outside_of_out_is_written(row_major: bool) -> None:
    for rows, columns in SHAPES:
        x = awkward(rows, columns, torch.bfloat16).to(DEVICE)
        values = guarded((rows, columns), E4M3, DEVICE, (columns + 24, 1), 8)
        turned = guarded((columns, rows), E4M3, DEVICE, (rows + 3, 1), 1)
        blocks = -(-columns // 128), -(-rows // 128)
        scales = guarded((rows, blocks[0]), torch.float32, DEVICE, (blocks[0] + 1, 1) if row_major else (1, rows + 4))
        turned_scales = guarded((columns, blocks[1]), torch.float32, DEVICE, (1, columns + 4))
        out = (values.tensor, scales.tensor), (turned.tensor, turned_scales.tensor)
        assert quantize.rows_and_columns(x, out=out) == out
        for buffer in (values, turned, scales, turned_scales):
            buffer.check(f"{rows} x {columns}")
        for got, wanted in zip(out, quantize.rows_and_columns(x), strict=True):
            assert all(same(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_gated() -> None:
    """silu(left) * right in float32. The kernel approximates the exponential, so the last bit may differ."""
    for rows, columns in ((1, 128), (130, 264), (64, 2048)):
        x = torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
        x[0, :4] = torch.tensor([-0.0, 88.0, -88.0, -8.0])
        exact = torch.nn.functional.silu(x[:, :columns].double()) * x[:, columns:].double()
        (values, scales), (turned, turned_scales) = quantize.rows_and_columns(x.to(DEVICE), gated=True)
        expected, sf = cast_reference.cast_blocks(exact.float(), 1, 128, False)
        assert torch.allclose(scales.cpu(), sf, rtol=1e-5)
        plain = cast_reference.dequantise(values, scales).double().cpu()
        # Half a step of E4M3, relative and, below its normal range, in units of the scale.
        allowed = exact.abs() / 15 + sf.double().repeat_interleave(128, 1)[:, :columns] * 2.0**-9
        assert bool(((plain - exact).abs() <= allowed).all())
        back = cast_reference.dequantise(turned, turned_scales).double().cpu().t()
        limit = turned_scales.double().cpu().repeat_interleave(128, 1)[:, :rows].t()
        assert bool(((back - exact).abs() <= exact.abs() / 15 + limit * 2.0**-9).all())
        assert float((values.cpu().float() != expected.float()).float().mean()) < 1e-3


@pytest.mark.parametrize("size", step_cases.SENT, ids=str)
def test_tokens_of_experts(size: tuple[int, int, int, Any]) -> None:
    given = step_cases.sent(*size[:3], DEVICE)
    for chosen in (("x", "rows"), ("x", "rows", "factors")):
        named = {name: given[name] for name in chosen}
        step_cases.check_sent(casts.tokens(**named, blocks=size[3], epsilon=0.0), size[3], **named)


@pytest.mark.parametrize("size", step_cases.GATED, ids=str)
def test_gradients_of_gate_and_up(size: tuple[int, int]) -> None:
    both, d = step_cases.gate_and_up(*size, DEVICE)
    step_cases.check_gradient(step_cases.gradients(both, d), both, d)


@pytest.mark.parametrize("sizes", [*step_cases.ROUTED, (4096, 128, 8)], ids=str)
def test_choices_of_experts_get_rows(sizes: tuple[int, int, int]) -> None:
    given = step_cases.routed(*sizes, DEVICE)
    moe_rows.route(*given.values())
    step_cases.check_routed(given)


@pytest.mark.parametrize("sizes", [*step_cases.DOTS, (300, 8, 2048)], ids=str)
def test_dot_products_of_rows(sizes: tuple[int, int, int]) -> None:
    given, again = (step_cases.dots(*sizes, DEVICE) for _ in range(2))
    for each in (given, again):
        step_cases.compute_dots(each)
    step_cases.check_dots(**given)
    assert torch.equal(given["out"], again["out"])


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_the_casts_of_the_interface_have_torchs_bytes(use_ue8m0: bool) -> None:
    for rows, columns in SHAPES:
        x = awkward(rows, columns, torch.bfloat16)
        for name in ("per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8"):
            found = getattr(deep_gemm, name)(x.to(DEVICE), use_ue8m0)
            expected = getattr(cast_reference, name)(x, use_ue8m0)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.is_contiguous()
                assert same(mine, theirs), f"{name} of {rows} x {columns}"


@cuda_only
def test_capture_and_replay_without_synchronising() -> None:
    x = torch.randn(300, 512, device=DEVICE).bfloat16()
    out = quantize.rows_and_columns(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize.rows_and_columns(x, out=out)
    other = torch.randn(300, 512, device=DEVICE).bfloat16()
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(out, quantize.rows_and_columns(other), strict=True):
        assert all(same(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_a_linear_layers_three_products() -> None:
    """Forward, input gradient and weight gradient, all with our kernels and casts."""
    tokens, n, k = 384, 512, 640
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w, g = (
        torch.randn(*size, device=DEVICE, generator=generator).bfloat16() for size in ((tokens, k), (n, k), (tokens, n))
    )
    (a, a_turned), (b, b_turned), (dy, dy_turned) = (
        quantize.rows_and_columns(x),
        quantize.blocks_and_transpose(w),
        quantize.rows_and_columns(g),
    )
    y, dx = (torch.empty(tokens, size, device=DEVICE, dtype=torch.bfloat16) for size in (n, k))
    dw = torch.zeros(n, k, device=DEVICE)
    deep_gemm.fp8_gemm_nt(a, b, y)
    deep_gemm.fp8_gemm_nt(dy, b_turned, dx)
    deep_gemm.fp8_gemm_nt(dy_turned, a_turned, dw, dw, recipe=(1, 1, 128))
    for found, exact in (
        (y, x.double() @ w.double().t()),
        (dx, g.double() @ w.double()),
        (dw, g.double().t() @ x.double()),
    ):
        assert deep_gemm.testing.calc_diff(found, exact) < 2e-3
