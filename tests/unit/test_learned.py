"""What the model's errors at measured shapes teach for others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.select.learned import LEAST_SHAPES, WIDTH, Corrections, Timed

CONFIGS = "abcdefgh"


def shapes(count: int, error: Callable[[str, float], float], seed: int = 1) -> list[Timed[str]]:
    """Shapes near each other, whose configs the model thinks almost equally fast; ``error`` takes a config and the
    first size."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        at = (draw.uniform(4, 8), draw.uniform(10, 13), draw.uniform(9, 12))
        modelled = {config: 10 * draw.uniform(1, 1.05) for config in CONFIGS}
        found.append(Timed(at, {c: (us * math.exp(error(c, at[0])), us) for c, us in modelled.items()}))
    return found


def steady(config: str, size: float) -> float:
    """Some configs are always slower than the model says."""
    return 0.03 * CONFIGS.index(config)


def test_the_error_of_a_config_is_learned_and_helps() -> None:
    learned = Corrections(shapes(30, steady))
    assert learned.help()
    corrected = learned.at((6.0, 11.0, 10.0))
    assert min(CONFIGS, key=lambda config: corrected(config, 10.0)) == "a"
    assert min(CONFIGS, key=lambda config: corrected(config, 10.0 - 0.6 * (config == "h"))) == "a"
    assert corrected("h", 10.0) / corrected("a", 10.0) == pytest.approx(math.exp(steady("h", 0)), rel=0.05)


def test_where_nothing_near_was_measured_the_model_decides() -> None:
    learned = Corrections(shapes(30, steady))
    assert learned.at((6.0 + 6 * WIDTH, 11.0, 10.0))("h", 10.0) == pytest.approx(10.0, rel=1e-4)
    assert learned.at((6.0, 11.0, 10.0))("a config that was never timed", 10.0) == 10.0
    assert Corrections[str]([]).at((6.0, 11.0, 10.0))("a", 10.0) == 10.0


def test_noise_teaches_nothing_and_stays_out() -> None:
    """Errors without a pattern: in at least nine of ten surveys the verdict is that they do not help."""
    verdicts = []
    for seed in range(20):
        draw = random.Random(seed)
        verdicts.append(Corrections(shapes(40, lambda config, size, d=draw: d.gauss(0, 0.05), seed)).help())
    assert sum(verdicts) <= 2


def test_a_disturbed_measurement_teaches_almost_nothing() -> None:
    """One that took twelve times as long, as some in surveys do."""
    plain = shapes(30, steady)
    slow = plain[7].times["a"]
    disturbed = [*plain[:7], replace(plain[7], times={**plain[7].times, "a": (12 * slow[0], slow[1])}), *plain[8:]]
    assert Corrections(disturbed).help()
    one, other = (Corrections(each).at(plain[7].at) for each in (plain, disturbed))
    for config in CONFIGS:
        assert one(config, 10.0) == pytest.approx(other(config, 10.0), rel=0.01)


def test_a_few_shapes_are_too_few() -> None:
    assert not Corrections(shapes(LEAST_SHAPES - 1, steady)).help()
    assert Corrections(shapes(LEAST_SHAPES, steady)).help()
    alone = [replace(each, times={"a": each.times["a"]}) for each in shapes(20, steady)]
    assert not Corrections(alone).help()  # one config of a shape says nothing about the order of two


def test_many_shapes_are_judged_in_reasonable_time() -> None:
    """2000 shapes: each of 128 is judged by all others."""
    assert Corrections(shapes(2000, steady)).help()


@given(st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12), st.integers(0, 1000))
def test_what_slows_all_configs_of_a_shape_alike_teaches_nothing(factors: list[float], seed: int) -> None:
    """A GPU at lower clocks, or a model that is wrong about a shape as a whole."""
    plain = shapes(12, steady, seed)
    slowed = [
        replace(each, times={config: (us * factor, modelled) for config, (us, modelled) in each.times.items()})
        for each, factor in zip(plain, factors, strict=True)
    ]
    one, other = (Corrections(each).at((6.0, 11.0, 10.0)) for each in (plain, slowed))
    for config in CONFIGS:
        assert one(config, 10.0) == pytest.approx(other(config, 10.0))


@given(st.permutations(range(12)))
def test_the_order_of_measurements_does_not_matter(order: list[int]) -> None:
    plain = shapes(12, steady)
    one, other = (Corrections(each).at((6.0, 11.0, 10.0)) for each in (plain, [plain[index] for index in order]))
    assert [one(config, 10.0) for config in CONFIGS] == pytest.approx([other(config, 10.0) for config in CONFIGS])
