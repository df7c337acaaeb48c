"""`deep_gemm.fused` on a GPU: beside float64, and bit for bit beside themselves and beside casts."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from built import built, kernels_of
from gpu_cases import DEVICE
from rows_cases import CASES, Inputs, assert_right, same
from rows_runs import RowsRun

import deep_gemm
from deep_gemm import fused, quantize
from deep_gemm.testing import guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16, FP16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

SIZES = {(1, 1): 1, (1, 128): 0, (3, 8): 1, (5, 130): 1, (37, 250): 0, (9, 256): 0, (9, 500): 0, (300, 1000): 1}
SIZES |= {(7, 2048): 0, (5, 4001): 0, (150, 7168): 0, (3, 8200): 0, (2, 20001): 1, (3, 40000): 0, (1000, 72): 0}
"""Rows and columns; and whether rows begin at odd elements. Each tile, rows that are wider, and many rows."""
CAST = [(1, 128), (5, 130), (9, 500), (300, 1000), (150, 7168), (3, 40000)]
"""Those whose results are also FP8 and float32. FP8 has scales for each number of lanes and of chunks."""
HALVES = [(5, 130), (1000, 72)]
"""Those of float16."""


def runs() -> Iterator[RowsRun]:
    """The tests' runs, of which other tests repeat some tiles with other numbers of rows."""
    for name, (size, odd) in itertools.product(CASES, SIZES.items()):
        whole = size[1] % 8 == 0
        for aligned in dict.fromkeys((whole, whole and not odd)):
            yield RowsRun(name, *size, "bf16", aligned)
        if size in CAST:
            yield RowsRun(name, *size, "f32", whole)
            yield RowsRun(name, *size, "e4m3", whole)
        if size in HALVES:
            yield RowsRun(name, *size, "f16", whole, "f16")
            if size in CAST:
                yield RowsRun(name, *size, "f32", whole, "f16")


def other_calls() -> Iterator[Callable[[], object]]:
    """Casts of the results, and a product."""
    for rows, columns in CAST:
        yield partial(quantize.rows, torch.empty(rows, columns, device=DEVICE))
        yield partial(quantize.rows, torch.empty(rows, 2 * columns, device=DEVICE, dtype=BF16), gated=True)
    yield product


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    with built({run.params for run in runs()} | kernels_of(other_calls())):
        yield


def copied(inputs: Inputs) -> Inputs:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def placed(inputs: Inputs, odd: int) -> Inputs:
    """Copies with NaN around them and between their rows, which begin at multiples of 16 bytes unless ``odd``."""
    found = {}
    for name, x in inputs.items():
        if name in ("factors", "groups"):
            found[name] = x
            continue
        stride = -(-x.shape[-1] // 8) * 8 + 8 + odd
        found[name] = guarded_copy(x, (stride, 1) if x.dim() == 2 else None, offset=odd * x.element_size()).tensor
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_results_and_sums_are_right_and_nothing_else_is_written(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for (rows, columns), odd in SIZES.items():
        if dtype == FP16 and (rows, columns) not in HALVES:
            continue
        given = case.make(rows, columns, dtype, DEVICE)
        for output, shift in ((dtype, odd), (F32, 0))[: 1 + ((rows, columns) in CAST)]:
            inputs = placed(given, shift)
            out = guarded((rows, columns), output, DEVICE, (-(-columns // 8) * 8 + 16 + shift, 1))
            case(inputs, out.tensor)
            out.check(f"{rows} x {columns}")
            assert_right(case, out.tensor, given)
            again = copied(given)
            assert same(case(again, output), out.tensor), f"{rows} x {columns}: rows elsewhere, or the second time"
            if "residual" in given:
                total = (given["x"].float() + given["residual"].float()).to(dtype)
                assert same(inputs["residual"], total)
                assert same(again["residual"], total)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_fp8_is_the_cast_of_the_float32_result(name: str, use_ue8m0: bool) -> None:
    case = CASES[name]
    for index, (rows, columns) in enumerate(CAST):
        given = case.make(rows, columns, BF16, DEVICE)
        expected = quantize.rows(case(copied(given), F32), use_ue8m0=use_ue8m0)
        stride = columns + 16 + index % 3 if columns % 8 else -(-columns // 16) * 16 + 16
        values = guarded((rows, columns), E4M3, DEVICE, (stride, 1))
        scales = guarded((rows, -(-columns // 128)), F32, DEVICE, (1, rows + 4))
        case(copied(given), (values.tensor, scales.tensor), use_ue8m0=use_ue8m0)
        values.check(f"values of {rows} x {columns}")
        scales.check(f"scales of {rows} x {columns}")
        assert same((values.tensor, scales.tensor), expected), f"{rows} x {columns}"
        assert same(case(placed(given, 0), E4M3, use_ue8m0=use_ue8m0), expected), f"{rows} x {columns}"


@pytest.mark.parametrize("output", [BF16, E4M3])
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(name: str, output: torch.dtype) -> None:
    case = CASES[name]
    for columns in (128, 1000, 7168):
        given = case.make(300, columns, BF16, DEVICE)
        whole = case(copied(given), output)
        for first, last in ((0, 1), (150, 151), (7, 64), (299, 300)):
            part = {key: x[first:last] if x.shape[0] == 300 else x for key, x in copied(given).items()}
            found = case(part, output)
            expected = tuple(x[first:last] for x in whole) if isinstance(whole, tuple) else whole[first:last]
            assert same(found, expected), (columns, first)


@cuda_only  # references of the two round in different places
def test_silu_and_mul_is_the_gated_cast() -> None:
    for rows, columns in CAST:
        x = CASES["silu and mul"].make(rows, columns, BF16, DEVICE)["x"]
        ones = torch.ones(rows, device=DEVICE)
        for use_ue8m0 in (False, True):
            expected = quantize.rows(x, gated=True, use_ue8m0=use_ue8m0)
            assert same(fused.silu_and_mul(x, E4M3, use_ue8m0=use_ue8m0), expected)
            halves = torch.stack(x.chunk(2, 1), 2).flatten(1)
            found = fused.silu_and_mul(halves, E4M3, interleaved=True, factors=ones, use_ue8m0=use_ue8m0)
            assert same(found, expected)


def test_a_limit_that_nothing_reaches_changes_nothing() -> None:
    for rows, columns in CAST:
        x = CASES["silu and mul"].make(rows, columns, BF16, DEVICE, special=False)["x"]
        found = fused.silu_and_mul(x, limit=3e38, factors=torch.ones(rows, device=DEVICE))
        assert same(found, fused.silu_and_mul(x))


def product() -> tuple[torch.Tensor, torch.Tensor]:
    """A product of a pair as it is, and of the cast of the float32 result."""
    m, n, k = 200, 256, 1024
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w, b = (torch.randn(s, device=DEVICE, generator=generator).bfloat16() for s in ((m, k), (k,), (n, k)))
    a, blocks = fused.rms_norm(x, w, E4M3), quantize.blocks(b)
    assert a[1].stride() == (1, m)
    d, expected = (torch.empty(m, n, device=DEVICE, dtype=BF16) for _ in range(2))
    deep_gemm.fp8_gemm_nt(a, blocks, d)
    deep_gemm.fp8_gemm_nt(quantize.rows(fused.rms_norm(x, w, F32)), blocks, expected)
    return d, expected


def test_a_gemm_takes_the_pair_as_it_is() -> None:
    assert torch.equal(*product())


IN_PLACE = {"add and gelu": "x", "mul and add": "z", "rms norm": "x", "rms norm of a sum": "x", "layer norm": "x"}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_may_replace_an_input(name: str) -> None:
    case = CASES[name]
    for rows, columns in ((9, 130), (300, 7168), (3, 40000)):
        given = case.make(rows, columns, BF16, DEVICE)
        expected, inputs = case(copied(given)), copied(given)
        assert case(inputs, inputs[IN_PLACE[name]]) is inputs[IN_PLACE[name]]
        assert same(inputs[IN_PLACE[name]], expected)


def test_expanded_rows_are_read_as_they_are() -> None:
    x, y = torch.randn(300, 1000, device=DEVICE).bfloat16(), torch.randn(1000, device=DEVICE).bfloat16()
    one = x[:1].expand(300, 1000)
    assert same(fused.rms_norm(one, y), fused.rms_norm(one.contiguous(), y))
    assert same(fused.mul_add(x, y.expand(300, 1000), one), fused.mul_add(x, y, x[0]))


@cuda_only
@pytest.mark.parametrize("name", CASES)
def test_operands_that_another_kernel_has_just_written(name: str) -> None:
    """Everything is read after the kernel before has finished, also in a graph with dependent launches."""
    case = CASES[name]
    given = case.make(300, 7168, BF16, DEVICE)
    inputs = {key: torch.zeros_like(x) for key, x in given.items()}
    out = case(inputs, E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for key, x in given.items():
            inputs[key].copy_(x)
        case(inputs, out)
    for _ in range(20):
        graph.replay()
    assert same(out, case(copied(given), E4M3))


@cuda_only
@pytest.mark.parametrize("output", [BF16, E4M3])
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_runs_have_the_same_bits(name: str, output: torch.dtype) -> None:
    case = CASES[name]
    given = case.make(500, 7168, BF16, DEVICE)
    first = case(copied(given), output)
    for _ in range(100):
        assert same(case(copied(given), output), first)
