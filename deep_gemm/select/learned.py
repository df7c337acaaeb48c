"""Corrections of the model, learned from times that were measured.

The model's error for a config is similar at similar sizes. So the correction for a config is the mean of its errors at
the shapes where it was timed, each weighted by how near that shape is (Nadaraya and Watson, 1964), and shrunk towards 0
by one error of 0 at no distance. Where nothing near was timed the correction is 0, and the model decides. A new
measurement is one more term: nothing is fitted.

An error is the logarithm of measured over modelled time, less its mean over the configs of that shape: only the order
of configs matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Config = TypeVar("Config", bound=Hashable)
Point = tuple[float, ...]

WIDTH = 2.0
"""The weight of a shape is exp(-d^2 / 2) at a distance of d times this, in octaves of M, N and K."""
DECAY = 8.0
"""In the mean of a shape, a config slower than its best by x (a logarithm) has the weight exp(-DECAY * x)."""
LEAST_SHAPES = 8
"""With fewer shapes there are no corrections."""
MOST_JUDGED = 64
"""How many shapes `Corrections.help` is judged by."""


@dataclass(frozen=True)
class Timed(Generic[Config]):
    """The measured and the modelled time, in us, of each config that was timed at one shape; ``at`` is the logarithm of
    its sizes to base 2."""

    at: Point
    times: Mapping[Config, tuple[float, float]]

    def errors(self) -> dict[Config, float]:
        """The error of each config."""
        least = min(us for us, _ in self.times.values())
        errors = {config: math.log(us / modelled) for config, (us, modelled) in self.times.items()}
        weights = {config: (least / us) ** DECAY for config, (us, _) in self.times.items()}
        mean = sum(weights[config] * error for config, error in errors.items()) / sum(weights.values())
        return {config: error - mean for config, error in errors.items()}


class Corrections(Generic[Config]):
    """What was learned from the shapes ``timed``, all of one kind of spec."""

    def __init__(self, timed: Sequence[Timed[Config]]) -> None:
        self._timed = [(each, each.errors()) for each in timed if len(each.times) > 1]

    def at(self, point: Point, without: Timed[Config] | None = None) -> Callable[[Config, float], float]:
        """A function of a config and its modelled time at this shape that returns the corrected time. ``without``
        leaves out one of the shapes."""
        sums: dict[Config, float] = {}
        weights: dict[Config, float] = {}
        for each, errors in self._timed:
            if each is not without:
                weight = math.exp(-((math.dist(point, each.at) / WIDTH) ** 2) / 2)
                for config, error in errors.items():
                    sums[config] = sums.get(config, 0.0) + weight * error
                    weights[config] = weights.get(config, 0.0) + weight

        def corrected(config: Config, us: float) -> float:
            return us * math.exp(sums[config] / (1 + weights[config])) if config in sums else us

        return corrected

    def help(self) -> bool:
        """Whether choices among the timed configs are better with corrections than by the model alone. Each shape is
        judged by what was learned from all others."""
        if len(self._timed) < LEAST_SHAPES:
            return False
        gained = 0.0
        for each, _ in self._timed[:: math.ceil(len(self._timed) / MOST_JUDGED)]:
            corrected = self.at(each.at, without=each)
            before = min(each.times, key=lambda config: each.times[config][1])
            after = min(each.times, key=lambda config: corrected(config, each.times[config][1]))
            gained += math.log(each.times[before][0] / each.times[after][0])
        return gained > 0
