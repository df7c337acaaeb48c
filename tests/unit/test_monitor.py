"""The performance monitor: what it counts and times, in which forms it reports, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu, calls_behind

import deep_gemm
from deep_gemm import InvalidInputError, settings
from deep_gemm.errors import SettingError
from deep_gemm.ops import dense
from deep_gemm.runtime import monitor, reports
from deep_gemm.settings import child_environment

M, N, K = 24, 136, 272


class Clock:
    """CUDA events without a GPU: the time between two is what was asked for when the first was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.recorded = self.synchronised = self.queries = 0
        self.us, self.done, self.capturing = 5.0, True, False
        clock = self

        class Event:
            def __init__(self) -> None:
                clock.made += 1

            def record(self) -> None:
                assert not clock.capturing
                clock.recorded += 1
                self.us = clock.us

            def query(self) -> bool:
                clock.queries += 1
                return clock.done

            def synchronize(self) -> None:
                clock.synchronised += 1

            def elapsed_time(self, end: Event) -> float:
                return self.us / 1e3

        monkeypatch.setattr(monitor, "_new_event", Event)
        monkeypatch.setattr(monitor, "_is_capturing", lambda: self.capturing)
        monkeypatch.setattr(monitor, "beside_captures", contextlib.nullcontext)


@pytest.fixture
def clock(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def operands(m: int = M, n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16(), torch.zeros(m, n).bfloat16()


def entries(watched: monitor.Monitor) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["operation"], entry["shape"]): entry for entry in watched.report()["calls"]}


def test_calls_are_counted_and_timed_by_operation_shape_and_config(gpu: FakeGpu, clock: Clock) -> None:
    mine, other = operands(), operands(m=1)
    with deep_gemm.monitor(every=3) as m:
        for index in range(10):
            clock.us = 10.0 + index
            deep_gemm.bf16_gemm_nt(*mine)
        deep_gemm.bf16_gemm_nt(*other)
        assert clock.synchronised == clock.queries == 0  # nothing waits, and nothing asks, before the report
    found = entries(m)
    entry = found["bf16_gemm_nt", "24x136x272"]
    assert entry | {"config": "64x64", "kernel": "gemm", "device": "cuda:0", "calls": 10, "timed": 3} == entry
    # Not the first, which may load a kernel; then one in three.
    assert entry["us"] | {"mean": 14.0, "min": 11.0, "p50": 14.0, "p99": 17.0, "max": 17.0} == entry["us"]
    assert entry["flops"] == 2 * M * N * K
    assert entry["bytes"] == 2 * (M * K + N * K + M * N)
    assert entry["tflops"] == pytest.approx(entry["flops"] / 14e6)
    assert entry["gbps"] == pytest.approx(entry["bytes"] / 14e3)
    assert found["bf16_gemm_nt", "1x136x272"]["calls"] == 1
    assert "us" not in found["bf16_gemm_nt", "1x136x272"]
    assert len(gpu.launched) == 11


def test_calls_at_other_addresses_are_counted_too(gpu: FakeGpu, clock: Clock) -> None:
    cases = [operands() for _ in range(4)]
    with deep_gemm.monitor(every=1) as m:
        for _ in range(3):
            for case in cases:
                deep_gemm.bf16_gemm_nt(*case)
    assert entries(m)["bf16_gemm_nt", "24x136x272"]["calls"] == 12
    assert entries(m)["bf16_gemm_nt", "24x136x272"]["timed"] == 12


def test_a_launch_before_the_gemm_is_part_of_the_call(gpu: FakeGpu, clock: Clock) -> None:
    a, b, *_ = deep_gemm.testing.random_operands(M, N, K, "cpu")
    d = torch.empty(M, N, dtype=torch.bfloat16)
    with deep_gemm.monitor(every=1) as m:
        deep_gemm.fp8_gemm_nt((a[0], a[1].contiguous()), b, d)
    assert [launched.kernel for launched in gpu.launched] == ["transpose", "gemm"]
    assert (
        entries(m)["fp8_gemm_nt", "24x136x272"] | {"calls": 1, "timed": 1, "kernel": "gemm"}
        == (entries(m)["fp8_gemm_nt", "24x136x272"])
    )


def test_without_a_monitor_the_warm_path_is_what_it_was(gpu: FakeGpu, clock: Clock) -> None:
    """The very same launch record is called, with nothing around it."""
    calls, case = calls_behind(dense.bf16), operands()

    def remembered() -> list[str]:
        deep_gemm.bf16_gemm_nt(*case)
        warm = [call for _, call in calls.warm.values()]
        return [type(call).__name__ for call in (*warm, *calls.replays.values())]

    before = remembered()
    with deep_gemm.monitor():
        assert remembered() == ["function", "Watched"]
    assert remembered() == before == ["FakeLaunch", "Replay"]


def test_with_dg_nvtx_each_call_is_a_range(gpu: FakeGpu, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm calls and replays too; an operation that was called before as well; without it nothing is left."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(f"end after {len(gpu.launched)}"))
    calls, cases = calls_behind(dense.bf16), [operands(), operands()]
    deep_gemm.bf16_gemm_nt(*cases[0])
    assert not seen
    with deep_gemm.settings.override(nvtx=True), deep_gemm.monitor() as m:
        for case in (cases[0], cases[0], cases[1]):
            deep_gemm.bf16_gemm_nt(*case)
    assert seen == [text for after in (2, 3, 4) for text in ("bf16_gemm_nt 24x136x272 64x64", f"end after {after}")]
    assert entries(m)["bf16_gemm_nt", "24x136x272"]["calls"] == 3
    deep_gemm.bf16_gemm_nt(*cases[0])
    assert len(seen) == 6
    assert [type(call).__name__ for _, call in calls.warm.values()] == ["FakeLaunch"]


def test_inside_graph_capture_calls_are_counted_and_not_timed(gpu: FakeGpu, clock: Clock) -> None:
    case = operands()
    with deep_gemm.monitor(every=1) as m:
        clock.capturing = True
        for _ in range(5):
            deep_gemm.bf16_gemm_nt(*case)
    assert clock.recorded == 0
    (entry,) = m.report()["calls"]
    assert (entry["calls"], entry["timed"]) == (5, 0)


def test_events_are_used_again_and_bounded(gpu: FakeGpu, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "MAX_PENDING", 100)
    case = operands()
    with deep_gemm.monitor(every=1) as m:
        for _ in range(1000):
            deep_gemm.bf16_gemm_nt(*case)
        assert clock.made <= 2 * monitor.MANY_PENDING
        clock.done = False  # the GPU has fallen behind
        for _ in range(1000):
            deep_gemm.bf16_gemm_nt(*case)
        assert clock.made <= 2 * 100
    (entry,) = m.report()["calls"]
    assert entry["calls"] == 2000
    assert 1000 <= entry["timed"] <= 1100


def test_threads_lose_no_count(gpu: FakeGpu, clock: Clock) -> None:
    def work() -> None:
        for _ in range(500):
            deep_gemm.bf16_gemm_nt(*case)

    case = operands()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with deep_gemm.monitor(every=2) as m:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    (entry,) = m.report()["calls"]
    assert entry["calls"] == 2000
    assert entry["timed"] == 1000


def test_what_is_kept_is_bounded(gpu: FakeGpu, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "KEPT_TIMES", 4)
    monkeypatch.setattr(monitor, "MAX_SERIES", 2)
    with deep_gemm.monitor(every=1) as m:
        for m_rows in range(1, 6):
            case = operands(m=m_rows)
            for us in range(1, 11):
                clock.us = float(us)
                deep_gemm.bf16_gemm_nt(*case)
    found = entries(m)
    assert len(found) == 3
    assert (
        found["bf16_gemm_nt", "others"] | {"calls": 30, "timed": 30, "flops": 0, "config": ""}
        == (found["bf16_gemm_nt", "others"])
    )
    assert (
        found["bf16_gemm_nt", "1x136x272"]["us"] | {"p50": 8.0, "min": 1.0, "max": 10.0, "mean": 5.5}
        == (found["bf16_gemm_nt", "1x136x272"]["us"])
    )


def test_monitors_nest(gpu: FakeGpu, clock: Clock) -> None:
    case = operands()
    with deep_gemm.monitor() as outer:
        deep_gemm.bf16_gemm_nt(*case)
        with deep_gemm.monitor() as inner:
            deep_gemm.bf16_gemm_nt(*case)
        deep_gemm.bf16_gemm_nt(*case)
    counts = [entries(m)["bf16_gemm_nt", "24x136x272"]["calls"] for m in (outer, inner)]
    assert counts == [3, 1]


def test_a_fallback_is_a_series_of_its_own(gpu: FakeGpu, clock: Clock) -> None:
    gpu.unsupported = "no kernel."
    with settings.override(fallback="torch"), deep_gemm.monitor(every=1) as m:
        deep_gemm.bf16_gemm_nt(*operands())
    (entry,) = m.report()["calls"]
    assert (entry["config"], entry["kernel"], entry["device"], entry["timed"]) == ("fallback torch", "", "cuda:0", 1)


def test_tensors_on_the_cpu_are_timed_by_the_clock() -> None:
    a, b, d = operands()
    with deep_gemm.monitor(every=1) as m:
        for _ in range(3):
            deep_gemm.bf16_gemm_nt(a, b, d)
    (entry,) = m.report()["calls"]
    assert (entry["config"], entry["device"], entry["calls"], entry["timed"]) == ("reference", "cpu", 3, 3)
    assert 0 < entry["us"]["min"] <= entry["us"]["p50"] <= entry["us"]["max"] < 60e6


def test_an_error_of_a_call_is_passed_on_and_leaves_no_event(gpu: FakeGpu, clock: Clock) -> None:
    def fail() -> None:
        raise KeyError("launch")

    with deep_gemm.monitor(every=1) as m:
        series = m.series(monitor.Labels("op", "1", "c", "k", "cuda:0"), 0, 0)
        with pytest.raises(KeyError):
            series.call(fail)
    assert m.report()["calls"][0]["timed"] == 0


def watched(clock: Clock) -> monitor.Monitor:
    with deep_gemm.monitor(every=1) as m:
        for us in (1.5, 2.5, 4.0):
            clock.us = us
            deep_gemm.bf16_gemm_nt(*operands())
    return m


def test_prometheus_text(gpu: FakeGpu, clock: Clock) -> None:
    text = watched(clock).prometheus()
    labels = 'operation="bf16_gemm_nt",shape="24x136x272",config="64x64",kernel="gemm",device="cuda:0"'
    assert f"deep_gemm_calls_total{{{labels}}} 3\n" in text
    assert f"deep_gemm_flops_total{{{labels}}} {3 * 2 * M * N * K}\n" in text
    assert f'deep_gemm_call_seconds{{{labels},quantile="0.5"}} 2.5e-06\n' in text
    assert f"deep_gemm_call_seconds_sum{{{labels}}} 8e-06\n" in text
    assert f"deep_gemm_call_seconds_count{{{labels}}} 3\n" in text
    name = r"[a-z_]+"
    line = re.compile(rf'# (HELP|TYPE) {name} .+|{name}\{{({name}="[^"]*",?)+\}} [0-9.e+-]+')
    assert all(line.fullmatch(row) for row in text.splitlines())
    assert text.endswith("\n")


def test_labels_are_escaped() -> None:
    entry = dict.fromkeys(("operation", "shape", "kernel", "device"), "x") | {"config": 'a"b\\c\nd'}
    text = reports.as_prometheus({"calls": [entry | {"calls": 1, "timed": 0, "bytes": 0, "flops": 0}]})
    assert r'config="a\"b\\c\nd"' in text


@pytest.mark.parametrize(("name", "begins"), [("r.json", "{"), ("r.prom", "# HELP"), ("%p.json", "{")])
def test_the_name_of_a_file_says_the_format(tmp_path: Path, name: str, begins: str) -> None:
    m = deep_gemm.monitor()
    m.write(tmp_path / name)
    (written,) = tmp_path.iterdir()
    assert "%p" not in written.name
    assert written.read_text().startswith(begins)


def test_another_ending_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"path must end in \.json .* but it is 'r\.txt'"):
        deep_gemm.monitor().write("r.txt")
    with pytest.raises(InvalidInputError, match=r"but it is 'r\.trace\.json'. For a trace, set DG_NVTX=1 and run nsys"):
        deep_gemm.monitor().write("r.trace.json")


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "3"])
def test_every_is_a_positive_integer(every: Any) -> None:
    with pytest.raises(InvalidInputError, match="every must be a positive integer"):
        deep_gemm.monitor(every)


@pytest.mark.parametrize(("values", "part", "wanted"), [([3.0, 1.0, 2.0], 50, 2.0), ([1.0], 99, 1.0), ([1, 2], 99, 2)])
def test_percentiles(values: list[float], part: int, wanted: float) -> None:
    assert monitor.percentile(values, part) == wanted


RUN = """
import torch, deep_gemm
a, b, d = torch.ones(3, 16).bfloat16(), torch.ones(4, 16).bfloat16(), torch.ones(3, 4).bfloat16()
for _ in range(5):
    deep_gemm.bf16_gemm_nt(a, b, d)
"""


def child(code: str, **environment: str) -> str:
    env = child_environment() | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_process_is_watched_from_its_first_call_to_its_end(tmp_path: Path) -> None:
    fork = "import os\npid = os.fork()\nif not pid: raise SystemExit\nos.waitpid(pid, 0)\n"
    child(RUN + fork, DG_MONITOR=f"{tmp_path}/r%p.json", DG_MONITOR_EVERY="2")
    (written,) = tmp_path.iterdir()  # none of the forked child, which called nothing
    (entry,) = json.loads(written.read_text())["calls"]
    assert (entry["operation"], entry["shape"], entry["calls"], entry["timed"]) == ("bf16_gemm_nt", "3x4x16", 5, 2)


@pytest.mark.long
def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    assert "DG_MONITOR could not write its report to" in child(RUN, DG_MONITOR=f"{tmp_path}/none/r.prom")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DG_MONITOR", "report.txt", 'DG_MONITOR must be "off", or a path that ends in .json or .prom, and not in'),
        ("DG_MONITOR", "r.trace.json", "not in .trace.json (use nsys and DG_NVTX), but it is 'r.trace.json'"),
        ("DG_MONITOR_EVERY", "0", "DG_MONITOR_EVERY must be a positive integer, but it is '0'"),
        ("DG_MONITOR_EVERY", "x", "DG_MONITOR_EVERY must be a positive integer, but it is 'x'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(monitor, "_begun", False)
    with pytest.raises(SettingError, match=re.escape(says)):
        deep_gemm.bf16_gemm_nt(*operands())


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_MONITOR", "off")
    assert settings.monitor is None
