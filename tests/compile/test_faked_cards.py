"""Calls on a card of each target with a faked driver: they find, build and launch a kernel, or say what they need."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_fakes import FakeDriver, driver  # noqa: F401
from gpu_fakes import CPU, FakeGpu, gpu  # noqa: F401

import deep_gemm
from deep_gemm import arch, fused, options, quantize
from deep_gemm.errors import UnsupportedError
from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import choose
from deep_gemm.runtime import calls, engine
from deep_gemm.select import calibration, sheets
from deep_gemm.settings import settings

REAL_PLAN, REAL_LAUNCH = engine.plan, engine.launch_record
CARDS = [
    pytest.param(sheet := sheets.of_arch(target)[0], id=sheet.name, marks=[pytest.mark.long] * (target != "sm_80"))
    for target in arch.names()
]
"""One of each target."""

M, N, K, G = 24, 256, 256, 2


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def rows_of_logits() -> tuple[Any, ...]:
    q, keys = x(4, 64, 128, dtype=torch.float8_e4m3fn), x(64, 128, dtype=torch.float8_e4m3fn)
    bounds = torch.zeros(4, dtype=torch.int32), torch.full((4,), 64, dtype=torch.int32)
    return q, (keys, torch.ones(64)), torch.ones(4, 64), *bounds


EVERYWHERE: dict[str, Callable[[], Any]] = {
    "rows": lambda: quantize.rows(x(M, K)),
    "rows of few": lambda: quantize.rows(x(1, K, dtype=torch.float16)),
    "columns": lambda: quantize.columns(x(M, K, dtype=torch.float32)),
    "blocks": lambda: quantize.blocks(x(M, K)),
    "rms_norm": lambda: fused.rms_norm(x(M, K), x(K)),
    "silu_and_mul": lambda: fused.silu_and_mul(x(M, 2 * K), out=torch.float8_e4m3fn),
    "add_gelu": lambda: fused.add_gelu(x(M, K), x(M, K)),
}
"""Functions that every card computes by a kernel, each in one launch or more."""


def fp8(rows: int, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x(rows, k, dtype=torch.float8_e4m3fn), torch.ones(-(-rows // block), k // 128)


def experts(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x(G, n, k, dtype=torch.float8_e4m3fn), torch.ones(G, n // 128, k // 128)


def fp8_rows(rows: int, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return x(rows, K, dtype=torch.float8_e4m3fn), torch.ones(blocks, rows).t()


LABELS = torch.zeros(128, dtype=torch.int32)
SIZES = torch.full((G,), M, dtype=torch.int32)
BIAS, GATE, SILU = (deep_gemm.Epilogue(b, a) for b, a in ((torch.ones(N), "gelu"), (None, "swiglu"), (None, "silu")))
PRODUCTS: dict[str, Callable[[], Any]] = {
    "fp8_gemm_nt": lambda: deep_gemm.fp8_gemm_nt(fp8(M, K, 1), fp8(N, K, 128), x(M, N)),
    "fp8, many rows": lambda: deep_gemm.fp8_gemm_nt(fp8(4096, K, 1), fp8(N, K, 128), x(4096, N)),
    "fp8, float32 d and c": lambda: deep_gemm.fp8_gemm_nt(
        fp8(M, K, 1), fp8(N, K, 128), torch.ones(M, N), torch.ones(M, N)
    ),
    "bf16_gemm_nt": lambda: deep_gemm.bf16_gemm_nt(x(M, K), x(N, K), x(M, N)),
    "bf16, epilogue": lambda: deep_gemm.bf16_gemm_nt(x(M, K), x(N, K), x(M, N), epilogue=BIAS),
    "bf16, parts of K": lambda: deep_gemm.bf16_gemm_nt(x(1, 4096), x(N, 4096), x(1, N)),
    "bf16, odd K": lambda: deep_gemm.bf16_gemm_nt(x(M, 77), x(N, 77), x(M, N)),
    "bf16_gemm_nn": lambda: deep_gemm.bf16_gemm_nn(x(M, K), x(K, N), x(M, N)),
    "bf16_gemm_tn": lambda: deep_gemm.bf16_gemm_tn(x(K, M), x(K, N), torch.ones(M, N)),
    "bf16_gemm_tt": lambda: deep_gemm.bf16_gemm_tt(x(K, M), x(N, K), x(M, N)),
    "fp16_gemm_nt": lambda: deep_gemm.fp16_gemm_nt(*(x(y, K, dtype=torch.float16) for y in (4096, N)), HALF),
    "m_grouped_fp8_contiguous": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        fp8(128, K, 1), experts(N, K), x(128, N), LABELS
    ),
    "m_grouped_bf16_contiguous": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
        x(128, K), x(G, N, K), x(128, N), LABELS
    ),
    "m_grouped_fp8_masked": lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(
        (x(G, 128, K, dtype=torch.float8_e4m3fn), torch.ones(G, 128, K // 128)), experts(N, K), x(G, 128, N), SIZES, M
    ),
    "m_grouped_bf16_masked": lambda: deep_gemm.m_grouped_bf16_gemm_nt_masked(
        x(G, 128, K), x(G, N, K), x(G, 128, N), SIZES, M
    ),
}
"""Products that every card computes."""
HALF = x(4096, N, dtype=torch.float16)


def packed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With scales of UE8M0, four to an int32."""
    scales = torch.ones(*values.shape[:-1], K // 128)
    return values, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)


def e4m3(*shape: int) -> torch.Tensor:
    return x(*shape, K, dtype=torch.float8_e4m3fn)


OTHERS: dict[str, Callable[[], Any]] = {
    "few rows": lambda: deep_gemm.fp8_gemm_nt(packed(e4m3(M)), packed(e4m3(N)), x(M, N)),
    "many rows": lambda: deep_gemm.fp8_gemm_nt(packed(e4m3(4096)), packed(e4m3(N)), x(4096, N)),
    "contiguous": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        packed(e4m3(128)), packed(e4m3(G, N)), x(128, N), LABELS
    ),
    "masked": lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(
        packed(e4m3(G, 128)), packed(e4m3(G, N)), x(G, 128, N), SIZES, M
    ),
}
"""Products with scales of UE8M0, which all cards but Hopper compute."""

HOPPER: dict[str, Callable[[], Any]] = {
    "fp8_mqa_logits": lambda: deep_gemm.fp8_mqa_logits(*rows_of_logits()),
    "fp8, 1d1d": lambda: deep_gemm.fp8_gemm_nt(fp8(M, K, 1), fp8(N, K, 1), torch.ones(M, N), recipe=(1, 1, 128)),
    "fp8, rowwise": lambda: deep_gemm.fp8_gemm_nt(fp8_rows(M), fp8_rows(N), x(M, N)),
    "swiglu": lambda: deep_gemm.bf16_gemm_nt(x(M, K), x(2 * N, K), x(M, N), epilogue=GATE),
    "d of FP8": lambda: deep_gemm.bf16_gemm_nt(x(M, K), x(N, K), fp8_rows(M, 2), epilogue=SILU),
    "batched": lambda: deep_gemm.einsum("bhr,hdr->bhd", x(M, G, K), x(G, N, K), x(M, G, N)),
    "k_grouped": lambda: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(
        x(256, M), x(256, N), torch.ones(G, M, N), [128, 128], SIZES + 104, torch.ones(G, M, N)
    ),
}
"""Functions that need Hopper."""


class Card:
    """A GPU of a target. Tensors on the CPU stand for its own."""

    def __init__(self, sheet: sheets.Sheet, fake: FakeDriver, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.driver, self.target = fake, arch.get(sheet.arch)
        self.attributes: list[int] = []
        with settings.override(use_nvrtc=True):
            builder = Builder(root, choose())
        known = calibration.for_device(sheet.device, sheet.sms, arch=sheet.arch)
        patch.setattr(engine, "plan", lambda spec, device: replace(REAL_PLAN(spec, 0), device=CPU))
        patch.setattr(engine, "launch_record", REAL_LAUNCH)
        patch.setattr(engine, "default_builder", lambda: builder)
        patch.setattr(engine, "calibration_of", lambda device: known)
        patch.setattr(engine, "primary_context", lambda device: nullcontext())
        for name in ("_functions", "_plans", "_castings"):
            patch.setattr(engine, name, {})
        patch.setattr(arch, "for_device", lambda device: self.target)
        patch.setattr(options, "num_sms_for", lambda device: sheet.sms)
        shared = self.target.shared_per_cta
        fake.answers["cuDeviceGetAttribute"] = lambda attribute, device: (fake.CUresult.CUDA_SUCCESS, shared)
        fake.answers["cuLaunchKernelEx"] = self.launch

    def launch(self, config: Any, *_: Any) -> tuple[Any, ...]:
        self.attributes.append(config.numAttrs)
        assert config.sharedMemBytes <= self.target.shared_per_cta
        return (self.driver.CUresult.CUDA_SUCCESS,)


@pytest.fixture(params=CARDS)
def card(
    request: pytest.FixtureRequest,
    gpu: FakeGpu,  # noqa: F811
    driver: FakeDriver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Card]:
    yield Card(request.param, driver, monkeypatch, tmp_path)
    calls.forget_all()


@pytest.mark.long
def test_it_builds_and_launches_a_kernel_of_each_function(card: Card) -> None:
    for name, call in {**EVERYWHERE, **PRODUCTS}.items():
        before = len(card.attributes)
        call()
        assert len(card.attributes) > before, name
        # Dependent launch is an attribute. GPUs before Hopper do not have it, and not all products use it.
        if card.target.capability < (9, 0) or name in EVERYWHERE:
            assert set(card.attributes[before:]) == {int(card.target.capability >= (9, 0))}, name
    for call in OTHERS.values() if card.target is not arch.SM90 else ():
        before = len(card.attributes)
        call()
        assert len(card.attributes) == before + 1, "the scales are read as they are"
    targets = {params.arch for (params, _) in engine._functions}
    assert targets == {card.target.name}


def test_what_needs_hopper_says_so(card: Card) -> None:
    for call in HOPPER.values():
        if card.target is arch.SM90:
            call()
            continue
        with pytest.raises(UnsupportedError, match=rf"another GPU than {card.target.name}: sm90_.* DG_FALLBACK=torch"):
            call()
        assert not card.attributes


def test_hopper_takes_float32_scales(card: Card) -> None:
    for call in OTHERS.values() if card.target is arch.SM90 else ():
        with pytest.raises(UnsupportedError, match=r"another GPU than sm_90a: mma_fp8.* Pass float32 scales"):
            call()
