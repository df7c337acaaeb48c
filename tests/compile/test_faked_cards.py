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

REAL_PLAN, REAL_LAUNCH = engine.plan, engine.launch
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

HOPPER: dict[str, Callable[[], Any]] = {
    "fp8_mqa_logits": lambda: deep_gemm.fp8_mqa_logits(*rows_of_logits()),
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
        patch.setattr(engine, "launch", REAL_LAUNCH)
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


def test_it_builds_and_launches_a_kernel_of_each_function(card: Card) -> None:
    for name, call in EVERYWHERE.items():
        before = len(card.attributes)
        call()
        assert len(card.attributes) > before, name
    # Dependent launch is an attribute. GPUs before Hopper do not have it.
    early = card.target.capability >= (9, 0)
    assert set(card.attributes) == {int(early)}
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
