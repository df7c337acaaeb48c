"""For tests of the benchmark of grouped GEMMs: a small shape, a fake DeepGEMM, operands on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm.backends import deepgemm
from deep_gemm.benchmarks import grouped, k_grouped
from deep_gemm.benchmarks.grouped_shapes import KINDS, Shape

COUNTS = (100, 1, 130)
N, K = 256, 384


def small(kind: str, form: str = "contiguous", counts: tuple[int, ...] = COUNTS) -> Shape:
    """A shape with these rows in its groups."""
    shape = Shape(kind, form, len(counts), 70, N, K, max_m=140)
    vars(shape)["counts"] = counts  # the cache of the property
    return shape


class Library:
    """DeepGEMM's functions, by ours. ``off`` is added to the last row of the last group."""

    __version__ = "2.6.1"

    def __init__(self, old_names: bool = False, off: float = 0.0) -> None:
        self.off, self.called = off, 0
        for kind in KINDS:
            masked = f"{kind}_m_grouped_gemm_nt_masked" if old_names else f"m_grouped_{kind}_gemm_nt_masked"
            for name, form in ((f"m_grouped_{kind}_gemm_nt_contiguous", "contiguous"), (masked, "masked")):
                setattr(self, name, self.function(getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_{form}"), form))

    def function(self, ours: Any, form: str) -> Any:
        def run(a: Any, b: Any, d: torch.Tensor, layout: torch.Tensor, *rest: Any) -> None:
            ours(a, b, d, layout, *rest)
            self.called += 1
            if self.off:
                last = (2, COUNTS[2] - 1) if form == "masked" else 256 + COUNTS[2] - 1
                d[last] += self.off

        return run


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(deepgemm, "_loaded", [])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are on the CPU."""
    for module in (grouped, k_grouped):
        monkeypatch.setattr(module, "make", functools.partial(module.make, device="cpu"))  # type: ignore[attr-defined]


@pytest.fixture
def timed(made: None, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The first call takes 10 us, the second 20, and so on."""
    names: list[list[str]] = []

    def flush(calls: dict[str, Any]) -> dict[str, float]:
        names.append(list(calls))
        return {name: 10.0 * (1 + index) for index, name in enumerate(calls)}

    monkeypatch.setattr(grouped.timing, "flush", flush)
    return names


class Timer:
    """A config's time: the look is the measurement."""

    def __init__(self, us: float) -> None:
        self.us = us

    def look(self) -> float:
        return self.us

    def __call__(self) -> float:
        return self.us
