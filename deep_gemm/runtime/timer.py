"""Times of single calls with a cold L2, as surveys and the tuner take them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)

FLUSH_BYTES = 512 << 20
"""Bytes that are written before a timed call: more than any L2 holds, and long enough to hide the launch."""
FLUSH_REPEATS = ((100.0, 20), (1000.0, 8), (float("inf"), 4))
"""(us, calls): up to this time, this many single calls. Long ones vary less, and heat the GPU."""

CONTENDING = 1.06
"""Configs within this factor of the least time are timed again: the least of many noisy times is too low."""
CONTENDERS = 10
ROUNDS = 3


def times_of(timers: Mapping[Name, Callable[[], float]], selected: Name, rounds: int = ROUNDS) -> dict[Name, float]:
    """The times of all configs. Contenders and the selected config are timed again ``rounds`` times, in turns, and
    their time is the median. The least time is always one of these: a single lucky time never wins."""
    times = {name: timer() for name, timer in timers.items()}
    least = min(times.values())
    contenders = sorted((name for name in times if times[name] <= least * CONTENDING), key=times.__getitem__)
    samples: dict[Name, list[float]] = {name: [] for name in (*contenders[:CONTENDERS], selected)}
    for _ in range(rounds):
        for name, again in samples.items():
            again.append(timers[name]())
    times |= {name: statistics.median(again) for name, again in samples.items()}
    while (best := min(times, key=times.__getitem__)) not in samples:
        samples[best] = [timers[best]() for _ in range(rounds)]
        times[best] = statistics.median(samples[best])
    return times


def middle_mean(times: Sequence[float]) -> float:
    """The mean without the smallest and the largest quarter."""
    outer = len(times) // 4
    return statistics.fmean(sorted(times)[outer : len(times) - outer])


@dataclass
class Single:
    """Times single calls, each with a cold L2 and the launch hidden: the mean of their middle half.

    On an H200, every other call of an empty kernel took 0.8 us longer. A median is one of the two values at random,
    which put configs of the same speed half a microsecond apart; so the mean is used.
    """

    call: Callable[[], object]
    scratch: Any
    operands: Sequence[Any]  # keeps alive what the call reads

    def __call__(self) -> float:
        import torch

        self.call()
        first = self._events()
        torch.cuda.synchronize()
        us = first[0].elapsed_time(first[1]) * 1e3
        pairs = [self._events() for _ in range(next(repeats for limit, repeats in FLUSH_REPEATS if us <= limit))]
        torch.cuda.synchronize()
        return middle_mean([start.elapsed_time(end) * 1e3 for start, end in pairs])

    def look(self) -> float:
        """The lesser time of two calls."""
        import torch

        self.call()
        pairs = [self._events() for _ in range(2)]
        torch.cuda.synchronize()
        return min(start.elapsed_time(end) * 1e3 for start, end in pairs)

    def _events(self) -> tuple[Any, Any]:
        import torch

        self.scratch.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.call()
        end.record()
        return start, end
