"""Comparing other device headers with these: the order of turns, and the comparison."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import versus
from chosen import PLAIN, find_config, make_params

from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.runtime import engine
from deep_gemm.select.calibration import default

SHAPE = GemmShape(4096, 7168, 2048)


def test_turns_go_there_and_back_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def timer(name: str, times: list[float]) -> Any:
        def time() -> float:
            order.append(name)
            return times.pop(0)

        return time

    found = versus.in_turns({"a": timer("a", [99.0, 1.0, 2.0]), "b": timer("b", [99.0, 5.0, 4.0])}, turns=2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert found == {"a": 1.5, "b": 4.5}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake GPU on which other headers take 20 us and these 15; `"d"` is the result of each."""
    said: dict[str, Any] = {"d": {versus.OTHERS: 1.0, versus.THESE: 1.0}, "seen": []}
    names = {}

    def timers_of(
        shape: GemmShape, asked: Any, configs: Any, mode: str, spec: Any, device: int, builder: Builder
    ) -> Any:
        name = names[builder]
        said["seen"].append((mode, name))

        class Timer:
            operands = (SimpleNamespace(d=torch.tensor([said["d"][name]])),)

            def __call__(self) -> float:
                return 20.0 if name == versus.OTHERS else 15.0

        yield "a kernel", Timer()

    class Built:
        def build(self, request: Any) -> None:
            said.setdefault("built", []).append(names[self])

    def builders(directory: Path) -> Any:
        found = {name: Built() for name in (versus.OTHERS, versus.THESE)}
        names.update({builder: name for name, builder in found.items()})
        return found

    monkeypatch.setattr(versus, "builders", builders)
    monkeypatch.setattr(versus.survey, "timers_of", timers_of)
    monkeypatch.setattr(versus.archs, "for_device", lambda device: SM90)
    monkeypatch.setattr(versus.engine, "calibration_of", lambda device: default())
    monkeypatch.setattr(versus.options, "num_sms_for", lambda device: SM90.num_sms)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return said


def test_each_shape_is_timed_in_the_modes_that_are_about_it(
    gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert versus.main(["there", "4096x7168x2048", "64x7168x2048"]) == 0
    modes = [mode for mode, name in gpu["seen"] if name == versus.THESE]
    assert modes == ["flush", "steady", "flush", "promised", "unpromised"]
    assert gpu["built"].count(versus.OTHERS) == gpu["built"].count(versus.THESE) == 2
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["steady", "4096", "x", "7168", "x", "2048", "20.00", "->", "15.00", "us,", "0.750"] in lines
    assert [line[1] for line in lines if line[0] == "flush:"] == ["0.7500"]
    assert "another result" not in said


def test_other_device_code_is_loaded_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise these headers would be timed against themselves."""

    class Made:
        def __init__(self, cubin: bytes) -> None:
            self.cubin = cubin

        def build(self, request: Any) -> Any:
            return SimpleNamespace(cubin=self.cubin, name="a kernel")

    monkeypatch.setattr(engine.archs, "for_device", lambda device: SM90)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(engine, "load_function", lambda cubin, name, device, shared: (cubin, shared))
    monkeypatch.setattr(engine, "build_request", lambda params: params)
    monkeypatch.setattr(engine, "default_builder", lambda: Made(b"this"))
    monkeypatch.setattr(engine, "_functions", {})
    asked, config = versus.survey.spec_of(SHAPE, 132), find_config(block_m=128, block_n=128)
    shared = PLAIN.shared_bytes(make_params(config))
    other: Any = Made(b"another")
    assert engine.forced_plan(asked, config, 0, other).function == (b"another", shared)
    assert engine._functions == {}
    assert engine.forced_plan(asked, config, 0).function == (b"this", shared)
    assert len(engine._functions) == 1
    assert engine.forced_plan(asked, config, 0, other).function == (b"another", shared)
