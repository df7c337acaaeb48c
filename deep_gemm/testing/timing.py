"""Three ways to time a kernel on the GPU, each for one way of using it.

- flush: one call between two events with a cold L2 and the launch hidden. An empty kernel reads about 2.8 us this way.
- graph: many calls in one CUDA graph, each with weights of its own, as a decoder runs. Overlap of kernels counts.
- steady: back to back for seconds, at the clocks that the power limit allows; in graphs, so that the host is no limit.

All times are in microseconds a call. Several callables are timed in turns, so that a drift of the clocks affects all
alike. `flush`, `graph` and `steady` give medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deep_gemm.runtime.timer import FLUSH_BYTES

Call = Callable[[], Any]

GRAPH_WEIGHT_BYTES = 256 << 20
"""Bytes of weights that one graph reads before it reads the same ones again: several times the L2."""


SHORT_US = 100.0
"""If all single calls take less, they are timed in three times as many turns: calls of 5 us vary by a tenth."""

REST_SECONDS = 0.2
"""Each turn of longer calls begins after a rest of the GPU: otherwise its clocks are those that the power limit left to
the turn before. On an H200, 8192 x 7168 x 16384 took 1391 us (cuBLASLt 1389) in turns without a rest, 1313 us (1228)
with."""


Samples = dict[str, list[float]]


def medians(samples: Samples) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def flush(calls: Mapping[str, Call], **options: int) -> dict[str, float]:
    """The medians of `flush_samples`."""
    return medians(flush_samples(calls, **options))


def flush_samples(calls: Mapping[str, Call], repeats: int = 30, rounds: int = 3) -> Samples:
    """`repeats` single calls or more, each between two events, with 512 MB written before it."""
    if repeats < 20:
        raise ValueError(f"repeats must be at least 20 for a median to mean something, but it is {repeats}.")
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    short = all(elapsed_us(call) < SHORT_US for call in calls.values())
    for _ in range(3 * rounds if short else rounds):
        for name, call in calls.items():
            if not short:
                time.sleep(REST_SECONDS)
            samples[name] += singles(call, scratch, -(-repeats // rounds))
    return samples


def singles(call: Call, scratch: torch.Tensor, count: int) -> list[float]:
    """Single calls, each between two events, with ``scratch`` written before it."""
    pairs = []
    for _ in range(count):
        scratch.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def graph(calls: Mapping[str, Sequence[Call]], **options: int) -> dict[str, float]:
    """The medians of `graph_samples`."""
    return medians(graph_samples(calls, **options))


def graph_samples(calls: Mapping[str, Sequence[Call]], calls_in_graph: int = 64, replays: int = 10) -> Samples:
    """`replays` of one CUDA graph of `calls_in_graph` calls or more, divided by their number.

    `calls` gives, for each name, one callable for each set of weights; the graph goes through them in turn.
    """
    counts = {name: max(calls_in_graph, len(sets)) for name, sets in calls.items()}
    graphs = {name: capture(sets, counts[name]) for name, sets in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for replay in range(replays + 2):
        for name, captured in graphs.items():
            us = elapsed_us(captured.replay)
            if replay >= 2:
                samples[name].append(us / counts[name])
    return samples


def capture(sets: Sequence[Call], count: int, stream: Any = None) -> Any:
    """One CUDA graph of `count` calls, which go through the sets in turn; on ``stream`` if the calls are bound to
    it."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in sets:  # compile, load and size workspaces, which a capture does not allow
            call()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        for index in range(count):
            sets[index % len(sets)]()
    return captured


def steady(calls: Mapping[str, Sequence[Call]], seconds: float = 3.0) -> dict[str, float]:
    """The medians of `steady_samples`."""
    return medians(steady_samples(calls, seconds))


def steady_samples(calls: Mapping[str, Sequence[Call]], seconds: float = 3.0) -> Samples:
    """`back_to_back_samples` of each callable. The first of several runs twice and its second time counts, since it
    alone would begin on a rested GPU."""
    first = next(iter(calls))
    if len(calls) > 1:
        back_to_back_samples(calls[first], seconds)
    return {name: back_to_back_samples(sets, seconds) for name, sets in calls.items()}


GRAPH_US, BATCH_US = 2_000, 20_000
"""Microseconds of calls in one graph, and microseconds between two events, between which the graph is replayed."""


def back_to_back(sets: Sequence[Call], seconds: float, stream: Any = None) -> float:
    """The median of `back_to_back_samples`."""
    return statistics.median(back_to_back_samples(sets, seconds, stream))


def back_to_back_samples(sets: Sequence[Call], seconds: float, stream: Any = None) -> list[float]:
    """The second half of at least `seconds` of back-to-back calls, which go through the sets in turn.

    Calls run in graphs (see `capture`): small calls that are launched one by one would wait for the host.
    """
    once = capture(sets, len(sets), stream)
    once.replay()
    estimate = elapsed_us(once.replay)
    rounds = max(1, round(GRAPH_US / max(estimate, 1.0)))
    captured = once if rounds == 1 else capture(sets, rounds * len(sets), stream)
    replays = max(1, round(BATCH_US / max(estimate, 1.0) / rounds))
    samples = []
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        us = elapsed_us(lambda: [captured.replay() for _ in range(replays)])
        samples.append(us / (replays * rounds * len(sets)))
    return samples[len(samples) // 2 :]


def elapsed_us(work: Call) -> float:
    """The time of `work` on the GPU, from start to end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def host_samples(calls: Mapping[str, Call], seconds: float = 1.0, repeats: int = 30) -> Samples:
    """Single calls on a machine without a GPU, in turns, until each has `repeats` or all have taken `seconds` times
    their number; one at least."""
    samples: Samples = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
        if sum(map(sum, samples.values())) > seconds * 1e6 * len(calls):
            break
    return samples


def host(call: Call, calls: int = 200, rounds: int = 60) -> float:
    """Host time of one call: the least of `rounds` means, since other processes can only add time."""
    for _ in range(20):
        call()
    best = float("inf")
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def host_in_turns(calls: Mapping[str, Call], passes: int = 6, rounds: int = 20) -> dict[str, float]:
    """Host time of one call of each: the least result of `host` over several passes through all."""
    return least_of_passes(lambda: {name: host(call, rounds=rounds) for name, call in calls.items()}, passes)


def least_of_passes(measure: Callable[[], dict[str, float]], passes: int = 6) -> dict[str, float]:
    """A short slowdown of the host cannot spoil the least of several readings."""
    found = [measure() for _ in range(passes)]
    return {name: min(times[name] for times in found) for name in found[0]}
