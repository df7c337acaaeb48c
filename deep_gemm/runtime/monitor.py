"""The performance monitor: how often each call was made, and how long it took.

While a monitor is active, each launch record is wrapped in a counter, and a pair of CUDA events measures one call in
``every``. Without a monitor launch records have no counter, and a warm call has no branch for it. Beginning or ending a
monitor drops the launch records, so that the next call of each shape makes new ones.
"""

from __future__ import annotations

import array
import atexit
import collections
import functools
import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.module import beside_captures
from deep_gemm.jit.forking import ForkLock
from deep_gemm.listeners import Listeners
from deep_gemm.log import warn_once
from deep_gemm.records import record
from deep_gemm.runtime.call_code import Places
from deep_gemm.runtime.operation import KernelOperation
from deep_gemm.settings import settings

KEPT_TIMES = 512
"""The last times of each series, from which percentiles are computed."""
MAX_SERIES = 4096
"""The number of series after which further calls are counted by operation and device only."""
MAX_PENDING, MANY_PENDING = 4096, 64
"""Limits for pairs of events that have not been read. Above the first no call is timed. Above the second the events of
finished calls are read."""

PERCENTILES = (50, 90, 99)

changed = Listeners()
"""Is called when a monitor begins or ends."""
_active: tuple[Monitor, ...] = ()
_begun = False
_lock = ForkLock()


def percentile(values: Collection[float], part: int) -> float:
    """The smallest of ``values`` that is at least as large as ``part`` percent of them."""
    return sorted(values)[max(0, math.ceil(len(values) * part / 100) - 1)]


class Call(Protocol):
    """The launches of a call; see `deep_gemm.runtime.calls.Replay`."""

    constant: bool
    device: int
    fits: Callable[[Places], bool]

    def is_for(self, key: Any) -> bool: ...

    def record(self, at: Places | None = None) -> Callable[[], None]: ...

    def __call__(self, at: Places) -> None: ...


@record(frozen=True)
class Labels:
    """The labels of a series. ``config`` is the kernel's config, or the name of the fallback that computed the call. If
    a cast follows the product as a launch of its own, both have two parts, joined by " + "."""

    operation: str
    shape: str
    config: str
    kernel: str
    device: str


class Pending(NamedTuple):
    """Two CUDA events around a call that the GPU may not have finished yet."""

    series: Series
    events: tuple[Any, Any]


class Series:
    """The calls with the same labels."""

    def __init__(self, monitor: Monitor, labels: Labels, bytes_moved: int, flops: int) -> None:
        self.monitor, self.labels, self.bytes, self.flops = monitor, labels, bytes_moved, flops
        self.calls = self.timed = 0
        self.total_us, self.least_us, self.most_us = 0.0, float("inf"), 0.0
        self.times = array.array("d")
        self._on_gpu = labels.device != "cpu"

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Make a call, and count it. One call in ``every`` is timed. The first, which may load a kernel, is timed only
        if all are."""
        monitor = self.monitor
        with monitor.lock.lock:
            number = self.calls
            self.calls = number + 1
        if (number - 1) % monitor.every:
            function(*arguments)
        elif not self._on_gpu:
            start = time.perf_counter()
            function(*arguments)
            self.add((time.perf_counter() - start) * 1e6)
        elif _is_capturing() or len(monitor.pending) >= MAX_PENDING:
            function(*arguments)  # without events, which would become a part of the graph
        else:
            events = monitor.events(self.labels.device)
            events[0].record()
            function(*arguments)
            events[1].record()
            monitor.pending.append(Pending(self, events))
            if len(monitor.pending) >= MANY_PENDING:
                monitor.collect(wait=False)

    def add(self, us: float) -> None:
        """Add a call that took ``us``."""
        with self.monitor.lock.lock:
            if len(self.times) < KEPT_TIMES:
                self.times.append(us)
            else:
                self.times[self.timed % KEPT_TIMES] = us
            self.timed += 1
            self.total_us += us
            self.least_us, self.most_us = min(self.least_us, us), max(self.most_us, us)

    def to_json(self) -> dict[str, Any]:
        """Its labels, counts, and times in microseconds; rates are computed from the mean time."""
        entry: dict[str, Any] = {**asdict(self.labels), "calls": self.calls, "timed": self.timed}
        entry |= {"bytes": self.bytes, "flops": self.flops}
        if self.timed:
            mean = self.total_us / self.timed
            parts = {f"p{part}": percentile(self.times, part) for part in PERCENTILES}
            entry["us"] = {"mean": mean, "min": self.least_us, **parts, "max": self.most_us, "sum": self.total_us}
            if mean > 0:
                entry |= {"gbps": self.bytes / mean / 1e3, "tflops": self.flops / mean / 1e6}
        return entry


class Monitor:
    """The result of `deep_gemm.monitor`. It counts inside its ``with`` block."""

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidInputError(
                f"every must be a positive integer n (one call in n is timed), but it is {every!r}."
            )
        self.every = every
        self.lock = ForkLock()
        self.pending: collections.deque[Pending] = collections.deque()
        self._series: dict[Labels, Series] = {}
        self._free: dict[str, list[tuple[Any, Any]]] = {}
        self._began = time.perf_counter()
        self._date = time.time()
        self._seconds: float | None = None

    def __enter__(self) -> Monitor:
        global _active
        self._began, self._date, self._seconds = time.perf_counter(), time.time(), None
        with _lock.lock:
            _active = (*_active, self)
        changed()
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        with _lock.lock:
            _active = tuple(monitor for monitor in _active if monitor is not self)
        changed()
        self._seconds = time.perf_counter() - self._began

    def series(self, labels: Labels, bytes_moved: int, flops: int) -> Series:
        """The series of these labels."""
        with self.lock.lock:
            if labels not in self._series and len(self._series) >= MAX_SERIES:
                labels, bytes_moved, flops = Labels(labels.operation, "others", "", "", labels.device), 0, 0
            return self._series.setdefault(labels, Series(self, labels, bytes_moved, flops))

    def events(self, device: str) -> tuple[Any, Any]:
        """An unused pair of events of ``device``."""
        free = self._free.setdefault(device, [])
        try:
            return free.pop()
        except IndexError:
            return _new_event(), _new_event()

    def collect(self, wait: bool) -> None:
        """Read the events of calls that the GPU has finished; with ``wait``, wait for all calls first."""
        with beside_captures() if self.pending else nullcontext():
            while self.pending:
                try:
                    pending = self.pending.popleft()
                except IndexError:  # another thread was faster
                    return
                start, end = pending.events
                if wait:
                    end.synchronize()
                elif not end.query():
                    self.pending.appendleft(pending)
                    return
                pending.series.add(start.elapsed_time(end) * 1e3)
                self._free[pending.series.labels.device].append(pending.events)

    def report(self) -> dict[str, Any]:
        """Counts and times, JSON-ready: ``calls`` has an entry for each operation, shape, config, kernel and device.
        Waits until the GPU has finished all timed calls.

        An entry has ``calls``, ``timed`` (the number of timed calls), and ``bytes`` (of the operands) and ``flops`` of
        one call. If there are times, it also has ``us`` (mean, min, p50, p90, p99, max, sum), ``gbps`` and ``tflops``.
        """
        self.collect(wait=True)
        seconds = time.perf_counter() - self._began if self._seconds is None else self._seconds
        with self.lock.lock:
            entries = [series.to_json() for series in self._series.values()]
        entries.sort(key=lambda entry: (-entry.get("us", {}).get("mean", 0.0) * entry["calls"], entry["operation"]))
        return {"began": self._date, "seconds": seconds, "every": self.every, "pid": os.getpid(), "calls": entries}

    def json(self) -> str:
        """`report` as JSON."""
        from deep_gemm.runtime import reports

        return reports.as_json(self.report())

    def prometheus(self) -> str:
        """`report` in Prometheus' text format."""
        from deep_gemm.runtime import reports

        return reports.as_prometheus(self.report())

    def write(self, path: str | Path) -> None:
        """Write a report: Prometheus' text if the name ends in .prom, JSON for .json. ``%p`` is replaced with the
        process's id. Raises InvalidInputError for another name, and OSError."""
        from deep_gemm.runtime import reports

        place = reports.place(path)
        written = {reports.PROMETHEUS: self.prometheus, reports.JSON: self.json}
        place.write_text(written[reports.kind(place)]())


def monitor(every: int = 16) -> Monitor:
    """Count and time the calls of this process, in all its threads, inside a ``with`` block::

        with deep_gemm.monitor() as m:
            model(x)
        print(m.json())

    Args:
        every: one call in ``every`` of each operation, shape and config is timed, by CUDA events on its stream. The
            host waits for the GPU only when it makes a report.

    A call inside CUDA-graph capture is counted, but not timed; replays of the graph are not counted. Calls on the CPU
    are timed by the host's clock. A counted call takes the host some 0.5 us longer, and a timed one some 10 us. Without
    a monitor there is no cost. DG_MONITOR watches a whole process.
    """
    return Monitor(every)


class Watched:
    """A replay whose calls are made by ``call``, such as `Series.call`."""

    def __init__(self, replay: Call, call: Callable[..., None]) -> None:
        self.constant, self.device, self.fits = replay.constant, replay.device, replay.fits
        self._replay, self._call = replay, call

    def is_for(self, key: Any) -> bool:
        return self._replay.is_for(key)

    def record(self, at: Places | None = None) -> Callable[[], None]:
        record, call = self._replay.record(at), self._call
        return lambda: call(record)

    def __call__(self, at: Places) -> None:
        self._call(self._replay, at)


def watch(replay: Call, operation: KernelOperation, x: Any, config: str, kernel: str) -> Call:
    """``replay``, or while there is a monitor a wrapper that counts its calls; with DG_NVTX they are ranges."""
    for monitor in _active:
        replay = Watched(replay, _series(monitor, operation, x, config, kernel).call)
    if settings.nvtx:
        replay = Watched(replay, functools.partial(_in_range, f"{operation.name} {operation.shape(x)} {config}"))
    return replay


def _in_range(name: str, function: Callable[..., object], *arguments: Any) -> None:
    torch.cuda.nvtx.range_push(name)
    try:
        function(*arguments)
    finally:
        torch.cuda.nvtx.range_pop()


def run(operation: KernelOperation, x: Any, config: str, function: Callable[[Any], None]) -> None:
    """Call ``function(x)``, which computes the operation without our kernels. Count it while there is a monitor."""

    def step(monitors: tuple[Monitor, ...]) -> None:
        if not monitors:
            function(x)
        else:
            _series(monitors[0], operation, x, config, "").call(step, monitors[1:])

    step(_active)


def _series(monitor: Monitor, operation: KernelOperation, x: Any, config: str, kernel: str) -> Series:
    labels = Labels(operation.name, operation.shape(x), config, kernel, str(x.device))
    moved = sum(tensor.numel() * tensor.element_size() for tensor in x.tensors.values())
    return monitor.series(labels, moved, operation.flops(x))


def begin() -> None:
    """Start the monitor that DG_MONITOR asks for, once in a process. Raises SettingError."""
    global _begun
    if _begun:
        return
    path, every = settings.monitor, settings.monitor_every
    with _lock.lock:
        begun, _begun = _begun, True
    if path is not None and not begun:
        watching = Monitor(every).__enter__()
        atexit.register(_write_at_exit, watching, path, os.getpid())


def _write_at_exit(watching: Monitor, path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, whose calls are not in it
    try:
        watching.write(path)
    except (OSError, RuntimeError) as error:  # of torch, after a kernel has crashed
        warn_once("monitor", f"DG_MONITOR could not write its report to {path}: {error}.")


def _after_fork() -> None:
    global _active, _begun
    _active, _begun = (), False


os.register_at_fork(after_in_child=_after_fork)


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
