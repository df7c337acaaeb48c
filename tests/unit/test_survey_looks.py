"""The first look at all legal configs: a measurement, not the model, decides which are timed in full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.bench import survey
from deep_gemm.runtime.timer import Single

NOISE = 0.05
"""Single calls on an H200 differ by 2 to 5%."""


@given(
    st.lists(st.tuples(st.floats(2.0, 5000.0), st.floats(1 - NOISE, 1 + NOISE)), min_size=1, max_size=40),
    st.integers(0, 39),
)
def test_noise_of_single_calls_hides_neither_the_best_nor_the_selected(
    configs: list[tuple[float, float]], selected: int
) -> None:
    timers = {
        f"{i}": SimpleNamespace(look=lambda us=us, noise=noise: us * noise) for i, (us, noise) in enumerate(configs)
    }
    chosen = f"{selected % len(configs)}"
    found = survey.promising(timers, chosen)
    best = min(range(len(configs)), key=lambda index: configs[index][0])
    assert {f"{best}", chosen} <= found.keys()
    assert all(found[name] is timers[name] for name in found)


@given(st.lists(st.floats(2.0, 5000.0), min_size=1, max_size=40))
def test_what_takes_twice_as_long_is_not_timed_in_full(us: list[float]) -> None:
    """Timing all configs in full would take an hour."""
    timers = {f"{index}": SimpleNamespace(look=lambda us=each: us) for index, each in enumerate(us)}
    found = survey.promising(timers, "0")
    assert all(us[int(name)] < 2 * min(us) for name in found if name != "0")


def test_a_look_is_the_less_of_two_cold_calls_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    ms = iter([0.0120, 0.0112])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Any) -> float:
            assert log[-1] == "wait"
            return next(ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    scratch = SimpleNamespace(zero_=lambda: log.append("flush"))
    look = Single(lambda: log.append("call"), scratch, []).look()
    assert look == pytest.approx(11.2)  # us
    assert log == ["call", *["flush", "event", "call", "event"] * 2, "wait"]


def test_a_line_says_of_how_many_the_timed_ones_are() -> None:
    row: survey.Row = {"mode": "flush", "m": 4, "n": 256, "k": 15872, "selected": "a", "times": {"a": 4.0, "b": 3.0}}
    assert "2 configs" in survey.line(row)
    assert "0.750" in survey.line(row)
    assert "2 of 596 configs" in survey.line(row | {"legal": 596})
