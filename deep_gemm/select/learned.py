"""Corrections of the model, learned from times that were measured.

The model's error for a config is similar at similar sizes. So the correction for a config is the mean of its errors at
the shapes where it was timed, each weighted by how near that shape is (Nadaraya and Watson, 1964), and shrunk towards 0
by `PRIOR` errors of 0 at no distance. Where nothing near was timed the correction is 0, and the model decides. A new
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
DECAY = 3.0
"""A time longer than the best of its shape by x (a logarithm) has the weight exp(-DECAY * x), in the mean of the shape
and in corrections: errors of slow configs matter less, and a time that something disturbed hardly counts."""
LEAST_SHAPES = 8
"""With fewer shapes there are no corrections."""
PRIOR = 2.5
"""With 1, first choices by corrections on an H100 are 0.1% worse, for BF16 and for FP8."""
LEAST_GAIN = 0.95
"""Corrections are used only where the mean square of errors falls to this part. With 0.9 first choices of FP8 by
corrections from 20 shapes are 0.6% worse."""
MOST_JUDGED = 128


@dataclass(frozen=True)
class Timed(Generic[Config]):
    """The measured and the modelled time, in us, of each config that was timed at one shape; ``at`` is the logarithm of
    its sizes to base 2."""

    at: Point
    times: Mapping[Config, tuple[float, float]]

    def weights(self) -> dict[Config, float]:
        """Of each config in a mean over them; together 1."""
        least = min(us for us, _ in self.times.values())
        weights = {config: (least / us) ** DECAY for config, (us, _) in self.times.items()}
        whole = sum(weights.values())
        return {config: weight / whole for config, weight in weights.items()}

    def errors(self) -> dict[Config, float]:
        errors = {config: math.log(us / modelled) for config, (us, modelled) in self.times.items()}
        mean = sum(weight * errors[config] for config, weight in self.weights().items())
        return {config: error - mean for config, error in errors.items()}


class Corrections(Generic[Config]):
    """What was learned from the shapes ``timed``, all of one kind of spec."""

    def __init__(self, timed: Sequence[Timed[Config]]) -> None:
        self._timed = [each for each in timed if len(each.times) > 1]
        self._errors: dict[Config, list[tuple[int, float, float]]] = {}
        """For each config the shapes where it was timed, its error there, and how much that counts."""
        for index, each in enumerate(self._timed):
            weights = each.weights()
            most = max(weights.values())
            for config, error in each.errors().items():
                self._errors.setdefault(config, []).append((index, error, weights[config] / most))

    def at(self, point: Point, without: int = -1) -> Callable[[Config, float], float]:
        """Corrects a modelled time of a config at this shape. ``without`` is a shape to leave out."""
        near = [math.exp(-((math.dist(point, each.at) / WIDTH) ** 2) / 2) for each in self._timed]
        if without >= 0:
            near[without] = 0.0

        def corrected(config: Config, us: float) -> float:
            seen = self._errors.get(config, ())
            total = sum(near[index] * weight * error for index, error, weight in seen)
            return us * math.exp(total / (PRIOR + sum(near[index] * weight for index, _, weight in seen)))

        return corrected

    def help(self) -> bool:
        """Whether the mean square of errors falls to `LEAST_GAIN`. Each shape is judged by all others."""
        if len(self._timed) < LEAST_SHAPES:
            return False
        before = after = 0.0
        for index in range(0, len(self._timed), math.ceil(len(self._timed) / MOST_JUDGED)):
            each = self._timed[index]
            corrected, errors, weights = self.at(each.at, without=index), each.errors(), each.weights()
            left = {config: error - math.log(corrected(config, 1.0)) for config, error in errors.items()}
            mean = sum(weight * left[config] for config, weight in weights.items())
            before += sum(weight * errors[config] ** 2 for config, weight in weights.items())
            after += sum(weight * (left[config] - mean) ** 2 for config, weight in weights.items())
        return after < LEAST_GAIN * before
