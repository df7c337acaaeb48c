"""DG_FALLBACK: ways that are tried in order where there is no kernel, each reason said once."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import UnsupportedError, settings
from deep_gemm.errors import InvalidInputError, SettingError
from deep_gemm.ops import cublaslt
from deep_gemm.ops.reference import b16_gemm_reference
from deep_gemm.parts import Parts
from deep_gemm.runtime import fallback
from deep_gemm.testing import assert_close_to_exact, calc_diff, random_operands

M, N, K = 24, 136, 272
REASON = "This GPU has compute capability 8.0, and there are kernels for 9.0 only."


@pytest.fixture
def other_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU without kernels, on which cuBLAS is played by the reference."""

    def gemm(a: Any, b: Any, d: Any, c: Any, form: str) -> None:
        used.append((a.dtype, form))
        b16_gemm_reference(a, b, d, c)

    used: list[Any] = []
    gpu.unsupported = REASON
    monkeypatch.setattr(cublaslt, "gemm", gemm)
    monkeypatch.setattr(gpu, "cublas", used, raising=False)
    return gpu


def fp8(way: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    a, b, x, y = random_operands(M, N, K, "cpu")
    d = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    with settings.override(fallback=way):
        deep_gemm.fp8_gemm_nt(a, b, d)
    return d, (*a, *b, x, y)


@pytest.mark.parametrize("way", ["", "error", ()])
def test_without_a_way_the_reason_is_raised(other_gpu: FakeGpu, way: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"capability 8\.0"):
        fp8(way)


def test_torch_computes_it_and_says_so_once_a_reason(other_gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="deep_gemm"):
        for _ in range(3):
            d, operands = fp8("torch")
            assert_close_to_exact(d, *operands[:4])
        other_gpu.unsupported = "Another reason, with M=3."
        fp8("torch")
        other_gpu.unsupported = "Another reason, with M=4."
        fp8("torch")
    first, second = (record.message for record in caplog.records)
    assert first.startswith("DG_FALLBACK=torch: fp8_gemm_nt is computed by the reference implementation, which is slow")
    assert REASON in first
    assert "Another reason, with M=3." in second  # and not for each M
    assert not other_gpu.launched


def test_cublas_computes_fp8_in_bfloat16(other_gpu: FakeGpu) -> None:
    d, (*_, x, y) = fp8("cublaslt,torch")
    assert calc_diff(d, x.float() @ y.float().t()) < 1e-3
    assert other_gpu.cublas == [(torch.bfloat16, "nt")]  # type: ignore[attr-defined]


def test_cublas_computes_weight_gradients(other_gpu: FakeGpu) -> None:
    _, _, x, y = random_operands(M, N, K, "cpu")
    d = torch.ones(M, N)
    a, b = deep_gemm.per_token_cast_to_fp8(x, False), deep_gemm.per_token_cast_to_fp8(y, False)
    with settings.override(fallback="cublaslt"):
        deep_gemm.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1, 128))
    assert calc_diff(d, 1 + x.float() @ y.float().t()) < 1e-3


@pytest.mark.parametrize(
    ("special", "words"),
    [("1d1d", "scales of 1x128 and 1x128"), ("f32", "a d of torch.float32"), ("n", "K is not cont")],
)
def test_others_are_not_given_what_they_would_misread(
    other_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, special: str, words: str
) -> None:
    """A backend's kernel of the same name takes scales of blocks, and writes bfloat16."""
    module = SimpleNamespace(get_kernel=lambda way, op: lambda *operands: pytest.fail("was called"))
    monkeypatch.setitem(sys.modules, fallback.BACKENDS, module)
    a, b, _, y = random_operands(M, N, K, "cpu")
    d = torch.empty(M, N, dtype=torch.float32 if special == "f32" else torch.bfloat16)
    if special == "1d1d":
        b = deep_gemm.per_token_cast_to_fp8(y, False)
    if special == "n":
        b = (b[0].t().contiguous().t(), b[1])
    recipe = (1, 1, 128) if special == "1d1d" else None
    with settings.override(fallback="triton"), pytest.raises(UnsupportedError, match=f"triton does not take .*{words}"):
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=recipe)


@pytest.mark.parametrize("accumulates", [False, True])
def test_cublas_computes_16_bit_products(other_gpu: FakeGpu, accumulates: bool) -> None:
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    c = torch.randn(M, N) if accumulates else None
    d = torch.full((M, N), float("nan"))
    with settings.override(fallback=["cublaslt"]):
        deep_gemm.bf16_gemm_nn(a, b, d, c)
    wanted = a.float() @ b.float() + (0 if c is None else c)
    torch.testing.assert_close(d, wanted, rtol=1e-4, atol=1e-4)
    assert other_gpu.cublas == [(torch.bfloat16, "nt")]  # type: ignore[attr-defined]


def test_the_next_way_is_tried_and_the_warning_says_why(
    other_gpu: FakeGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedError("torch has no such product.")

    monkeypatch.setattr(cublaslt, "gemm", refuse)
    monkeypatch.setitem(sys.modules, fallback.BACKENDS, None)
    with caplog.at_level(logging.WARNING, logger="deep_gemm"):
        d, operands = fp8("cublaslt,triton,torch")
    assert_close_to_exact(d, *operands[:4])
    (record,) = caplog.records
    for part in (REASON, "cublaslt cannot either: torch has no such product.", "triton cannot either: there is no tri"):
        assert part in record.message
    with pytest.raises(UnsupportedError, match=r"capability 8\.0.*cublaslt cannot either: torch has no such product"):
        fp8("cublaslt")


def test_a_backend_is_given_the_operands_as_the_public_function_takes_them(
    other_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deep_gemm.backends.get_kernel("triton", operation)`."""
    asked = []

    def get_kernel(backend: str, operation: str) -> Any:
        asked.append((backend, operation))
        return lambda *operands: compute(*operands)

    def compute(a: Any, b: Any, d: torch.Tensor) -> None:
        d.fill_(a[0].shape[0] + b[1].shape[0])

    monkeypatch.setitem(sys.modules, fallback.BACKENDS, SimpleNamespace(get_kernel=get_kernel))
    d, _ = fp8("triton")
    assert bool((d == M + 2).all())
    assert asked == [("triton", "fp8_gemm_nt")]
    a, b, c = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16(), torch.ones(2, 3)
    with settings.override(fallback="triton"), pytest.raises(UnsupportedError, match="triton does not add to c"):
        deep_gemm.bf16_gemm_nt(a, b, torch.empty(2, 3), c)


def test_a_mistake_of_the_caller_is_no_reason(other_gpu: FakeGpu) -> None:
    with settings.override(fallback="torch"), pytest.raises(InvalidInputError, match="agree in K"):
        deep_gemm.bf16_gemm_nt(torch.ones(2, 16).bfloat16(), torch.ones(2, 8).bfloat16(), torch.ones(2, 2).bfloat16())


@pytest.mark.parametrize("value", ["numpy", "torch,numpy", "torch,", "error,torch"])
def test_an_unknown_way_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_FALLBACK", value)
    with pytest.raises(SettingError, match="DG_FALLBACK must be"):
        _ = settings.fallback


def test_fp8_by_cublas_is_within_the_stated_error() -> None:
    """Of each dequantised value: 2^-8."""
    a = random_operands(M, N, K, "cpu")[0]
    eye = torch.eye(K).to(torch.float8_e4m3fn)
    ones = torch.ones(-(-K // 128), -(-K // 128))
    d = torch.empty(M, K, dtype=torch.bfloat16)
    names = ("a", "sfa", "b", "sfb", "d")
    cublaslt.fp8_by_cublaslt(
        SimpleNamespace(
            tensors=dict(zip(names, (*a, eye, ones, d), strict=True)), scaling=("1x128", "128x128"), epilogue=Parts()
        )
    )
    exact = deep_gemm.dequantise(*a, dtype=torch.float64)
    assert bool(((d.double() - exact).abs() <= exact.abs() * 2**-8).all())
