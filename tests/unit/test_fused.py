"""Functions of rows: what the reference computes, what is launched, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_cases import CASES, assert_right, same

from deep_gemm import InvalidInputError, UnsupportedError, fused, kernels, quantize
from deep_gemm.arch import SM90
from deep_gemm.kernels.row_kernels import FUNCTIONS, ROWS, WHOLE_ROWS
from deep_gemm.spec import CopySpec, RowsSpec
from deep_gemm.testing import guarded

BF16, FP16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
M, N = 12, 272


def x(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*(shape or (M, N)), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for rows, columns in ((1, 1), (M, 130), (40, 7)):
        inputs = case.make(rows, columns, dtype)
        total = inputs["x"].float() + inputs["residual"].float() if "residual" in inputs else None
        for out in (F32, dtype, E4M3):
            given = {each: tensor.clone() for each, tensor in inputs.items()}
            assert_right(case, case(given, out), inputs)
            if total is not None:
                assert same(given["residual"], total.to(dtype))


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_fp8_is_the_cast_of_the_float32_result(name: str, use_ue8m0: bool) -> None:
    case = CASES[name]
    first, second = (case.make(M, 300, BF16) for _ in range(2))
    found = case(first, E4M3, use_ue8m0=use_ue8m0)
    assert found[1].stride() == (1, M)  # what TMA reads
    assert same(found, quantize.rows(case(second, F32), use_ue8m0=use_ue8m0))


def test_torch_agrees() -> None:
    a, w, b = x(), x(N), x(N) / 2
    close = {"rtol": 1e-2, "atol": 1e-2}
    nn = torch.nn.functional
    torch.testing.assert_close(fused.rms_norm(a, w, eps=1e-5), nn.rms_norm(a, (N,), w, 1e-5), **close)
    torch.testing.assert_close(fused.layer_norm(a, w, b), nn.layer_norm(a, (N,), w, b), **close)
    for kind in ("none", "tanh"):
        found = fused.add_gelu(a, b, approximate=kind)
        torch.testing.assert_close(found, nn.gelu(a + b, approximate=kind), **close)


def test_where_one_plus_erf_cancels() -> None:
    """torch's own is wrong by half there."""
    far = torch.tensor([[-5.5]])
    found = fused.add_gelu(far.bfloat16(), torch.zeros(1, 1, dtype=BF16), F32)
    assert found.item() == pytest.approx(-1.0444e-7, rel=1e-4)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_gelu": lambda a: fused.add_gelu(a, x(N), a),
    "mul_add": lambda a: fused.mul_add(x(), x(N), a, a),
    "rms_norm": lambda a: fused.rms_norm(a, x(N), a),
    "layer_norm": lambda a: fused.layer_norm(a, x(N), None, a, residual=x()),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_may_replace_an_input(gpu: FakeGpu, name: str) -> None:
    for a in (x(), x(M, N + 8)[:, :N]):
        for _ in range(3):
            assert IN_PLACE[name](a) is a
            assert gpu.launched[-1].at["out"] == a.data_ptr()
    assert len(gpu.launched) == 6


def test_one_launch_has_all_operands(gpu: FakeGpu) -> None:
    a, w, r, out = x(M, N + 16)[:, :N], x(N), x(), (x(M, N).to(E4M3), torch.empty(3, M).t())
    assert fused.rms_norm(a, w, out, residual=r, eps=0.5, use_ue8m0=True) is out
    (launched,) = gpu.launched
    wanted = {"x": a, "weight": w, "residual": r, "values": out[0], "scales": out[1]}
    assert launched.at == {name: tensor.data_ptr() for name, tensor in wanted.items()}
    assert launched.strides == {name: tensor.stride() for name, tensor in wanted.items()}
    assert launched.spec == RowsSpec(
        "rms_norm", M, N, "bf16", "e4m3", "", ("residual",), number=0.5, amax_min=1e-4, power_of_two=True
    )


def strided(offset: int, stride: int) -> torch.Tensor:
    return x(M * stride + N + offset)[offset:].as_strided((M, N), (stride, 1))


@pytest.mark.parametrize(
    ("changed", "aligned"),
    [
        ({}, True), ({"x": strided(8, N + 8)}, True), ({"x": strided(0, 0)}, True), ({"x": strided(4, N)}, False),
        ({"x": strided(0, N + 4)}, False), ({"y": x(N + 1)[1:]}, False), ({"out": x(M, N + 8)[:, 4 : N + 4]}, False),
        ({"x": x(M, N - 4), "y": x(N - 4), "out": x(M, N - 4)}, False),
        ({"x": x(M, 8 * N)[::8][:1], "y": x(N * 8), "out": x(1, N * 8)}, True),
    ],
)  # fmt: skip
def test_rows_that_can_be_read_by_sixteen_bytes(gpu: FakeGpu, changed: Any, aligned: bool) -> None:
    given = {"x": x(), "y": x(N), "out": x()} | changed
    fused.add_gelu(**given)
    assert gpu.launched[-1].spec.aligned == aligned


@pytest.mark.parametrize(("rows", "columns"), [(0, N), (M, 0), (0, 0)])
def test_nothing_to_compute(gpu: FakeGpu, rows: int, columns: int) -> None:
    a = torch.empty(rows, columns, dtype=BF16)
    assert fused.rms_norm(a, x(columns)).shape == (rows, columns)
    values, scales = fused.layer_norm(a, x(columns), None, E4M3)
    assert (values.shape, scales.shape) == ((rows, columns), (rows, -(-columns // 128)))
    assert fused.silu_and_mul(torch.empty(rows, 2 * columns, dtype=BF16)).shape == (rows, columns)
    assert gpu.launched == []


def test_nothing_outside_of_out_is_written() -> None:
    for name, case in CASES.items():
        inputs = case.make(M, N, BF16)
        out = guarded((M, N), BF16, "cpu", (N + 5, 1))
        values, scales = guarded((M, N), E4M3, "cpu", (N + 16, 1)), guarded((M, 3), F32, "cpu", (1, M + 2))
        case({each: tensor.clone() for each, tensor in inputs.items()}, out.tensor)
        case(inputs, (values.tensor, scales.tensor))
        for buffer in (out, values, scales):
            buffer.check(name)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a weight with gaps": (lambda: fused.rms_norm(x(), x(2 * N)[::2]), "weight must be contiguous along its last"),
    "out on another input": (lambda: fused.add_gelu(x(), a := x(), a), "out and y share memory"),
    "out on a part of x": (lambda: fused.rms_norm((m := x(M + 1, N))[1:], x(N), m[:-1]), "out and x share memory"),
    "residual on x": (lambda: fused.rms_norm(a := x(), x(N), residual=a), "residual and x share memory"),
    "out on the residual": (lambda: fused.rms_norm(x(), x(N), a := x(), residual=a), "residual and out share memory"),
    "eps below zero": (lambda: fused.rms_norm(x(), x(N), eps=-1.0), "eps must be a finite number from 0 on"),
    "eps that is NaN": (lambda: fused.rms_norm(x(), x(N), eps=float("nan")), "eps must be a finite number"),
    "eps that is infinite": (lambda: fused.layer_norm(x(), x(N), None, eps=float("inf")),
        "eps must be a finite number"),
    "another gelu": (lambda: fused.add_gelu(x(), x(N), approximate="sigmoid"),
        "must be 'none' or 'tanh', .* 'sigmoid'"),
    "a gelu that is a list": (lambda: fused.add_gelu(x(), x(N), approximate=[1]), "approximate must be 'none' or"),
    "a limit below zero": (lambda: fused.silu_and_mul(x(), limit=-1.0), "limit must be None or a number from 0 on"),
    "a limit that is a text": (lambda: fused.silu_and_mul(x(), limit="7"), "limit must be None or a number from 0 on"),
    "factors with gaps": (lambda: fused.silu_and_mul(x(), factors=torch.ones(2 * M)[::2]),
        "factors must be contiguous"),
    "a bias without groups": (lambda: fused.silu_and_mul(x(), bias=x(3, N)),
        "groups must be a torch.Tensor, but it is"),
    "groups without a bias": (lambda: fused.swigluoai_and_mul(x(), groups=torch.zeros(M).int()),
        "bias must be a torch.Tensor, but it is"),
    "a bias of half of the columns": (lambda: fused.silu_and_mul(x(), bias=x(3, N // 2), groups=torch.zeros(M).int()),
        r"bias must be torch.bfloat16 \(3, 272\) for x \(12, 272\), but it is torch.bfloat16 \(3, 136\)"),
    "groups of 64 bits": (lambda: fused.silu_and_mul(x(), bias=x(3, N), groups=torch.zeros(M).long()),
        r"groups must be torch.int32 \(12,\)"),
    "out with gradients": (lambda: fused.rms_norm(x(), x(N), x().requires_grad_()),
        "out requires grad, but this function writes into it"),
    "a residual with gradients": (lambda: fused.rms_norm(x(), x(N), residual=x().requires_grad_()),
        "residual requires grad, but this function writes into it"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str) -> None:
    call, words = MISTAKES[case]
    with pytest.raises(InvalidInputError, match=words):
        call()


def test_kernels_refuse_in_words() -> None:
    assert "functions of rows" in str(ROWS.refuses(CopySpec(1, 1)))
    for spec, words in (
        (RowsSpec("softmax", 1, 1, "bf16", "bf16"), "it knows add_gelu, mul_add, silu_and_mul, swigluoai_and_mul"),
        (RowsSpec("rms_norm", 1, 1, "f32", "f32"), "not f32 into f32"),
        (RowsSpec("rms_norm", 1, 1, "bf16", "f16"), "not bf16 into f16"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            kernels.for_helper(spec, SM90)


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.integers(1, 2**20), st.sampled_from(sorted(FUNCTIONS)))
@settings(deadline=None)
def test_tiles_cover_the_matrix_and_norms_do_not_depend_on_rows(m: int, other: int, n: int, function: str) -> None:
    spec, more = (RowsSpec(function, rows, n, "bf16", "bf16", FUNCTIONS[function].forms[0]) for rows in (m, other))
    config = ROWS.config_of(spec, SM90)
    assert config in ROWS.configs(SM90)
    strides = dict.fromkeys((*FUNCTIONS[function].inputs, "out"), (n, 1))
    shape, _ = ROWS.values(ROWS.params(spec, config, SM90), spec, strides, {}, True, False)
    across = 1 if FUNCTIONS[function].reduces else -(-n // config.tile_columns)
    assert shape.grid == (-(-m // config.tile_rows) * across, 1, 1)
    if FUNCTIONS[function].reduces:
        assert config == ROWS.config_of(more, SM90)
        assert config is WHOLE_ROWS[-1] or n <= config.tile_columns
    if m * n < 2**40:  # more than a GPU's memory
        assert shape.grid[0] < 2**31
