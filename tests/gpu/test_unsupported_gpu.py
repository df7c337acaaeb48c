"""A GPU without kernels, simulated on the GPU of this machine."""

import logging
from collections.abc import Iterator

import pytest
import torch
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import UnsupportedError, arch, options
from deep_gemm.log import reset_warnings
from deep_gemm.runtime import engine
from deep_gemm.testing import assert_close_to_exact, calc_diff, random_operands

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

M, N, K = 37, 328, 720


@pytest.fixture
def another_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def for_device(index: int) -> arch.ArchSpec:
        return arch.for_capability((7, 5), "Some other GPU")

    def forget() -> None:
        for listener in options.changed.all:
            listener()

    reset_warnings()
    forget()
    monkeypatch.setattr(engine.archs, "for_device", for_device)
    yield
    forget()


@pytest.mark.usefixtures("another_gpu")
def test_it_is_refused_in_words() -> None:
    a, b, *_ = random_operands(M, N, K, "cuda")
    d = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UnsupportedError, match=r"Some other GPU has compute capability 7\.5.*DG_FALLBACK=torch"):
        deep_gemm.fp8_gemm_nt(a, b, d)


@pytest.mark.usefixtures("another_gpu")
def test_cublas_is_asked_first_where_it_is_named_first(caplog: pytest.LogCaptureFixture) -> None:
    a, b, x, y = random_operands(M, N, K, "cuda")
    d = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    half = torch.full((M, N), float("nan"), device="cuda")
    with deep_gemm.settings.override(fallback="cublaslt,torch"), caplog.at_level(logging.WARNING, logger="deep_gemm"):
        deep_gemm.fp8_gemm_nt(a, b, d)
        deep_gemm.bf16_gemm_nt(x.bfloat16(), y.bfloat16(), half, torch.ones_like(half))
    assert calc_diff(d, x.float() @ y.float().t()) < 1e-3
    assert calc_diff(half, x.float() @ y.float().t() + 1) < 1e-3
    assert all("by cuBLAS" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("another_gpu")
def test_the_fallback_is_right_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    a, b, *_ = random_operands(M, N, K, "cuda")
    with deep_gemm.settings.override(fallback="torch"), caplog.at_level(logging.WARNING, logger="deep_gemm"):
        for _ in range(3):
            d = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt(a, b, d)
            assert_close_to_exact(d, *a, *b)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "DG_FALLBACK=torch" in caplog.records[0].message
