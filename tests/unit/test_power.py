"""The power model: the predicted time of launches back to back, its fit, and the survey for it."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, geometric_mean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import arch, ops
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import fit, survey
from deep_gemm.select import legal, rank
from deep_gemm.select.calibration import default
from deep_gemm.select.heuristic import sustains
from deep_gemm.select.model import features
from deep_gemm.select.power import Power, sustained_us

SM90 = arch.SM90

POWER = Power(
    products_per_us=8e8,
    read_row=5.0,
    filled_row=30.0,
    requested_row=2.0,
    stored_per_us=2e6,
    launch_us=3.0,
)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.integers(1, 20000), st.integers(1, 200))
def test_twice_the_work_draws_twice_as_much(rows: int, n: int, blocks: int) -> None:
    """Except for the terms that do not depend on K: the launch, and D."""
    problem = ops.spec(m=256 * rows, n=n, k=128 * blocks, num_sms=132)
    double = replace(problem, k=2 * problem.k)
    power = default().power
    for config in legal(problem, SM90)[::7]:
        at_once = power.launch_us + problem.m * n / power.stored_per_us
        once, twice = (sustained_us(p, config, features(p, config), power) - at_once for p in (problem, double))
        assert twice == pytest.approx(2 * once)
        assert once >= problem.m * problem.n * problem.k / power.products_per_us * (1 - 1e-9)


def test_16_bit_elements_draw_as_two_of_eight_bits() -> None:
    """Power is counted by bytes. But how much 16-bit operands draw was not measured, so it does not decide for them."""
    half = ops.spec(4096, 7168, 2048, 132, "bf16_gemm_nt")
    fp8 = ops.spec(4096, 7168, 2 * 2048, 132)
    config = next(c for c in legal(half, SM90) if (c.block_m, c.block_n, c.cluster_size) == (128, 128, 1))
    x, power = features(half, config), default().power
    assert sustained_us(half, config, x, power) == pytest.approx(
        sustained_us(fp8, config, x._replace(element_bytes=1), power)
    )
    assert sustains(half)
    many = replace(default(), power=replace(power, products_per_us=1.0))
    assert [each.config for each in rank(half, SM90, many)] == [each.config for each in rank(half, SM90)]
    assert [each.config for each in rank(fp8, SM90, many)] != [each.config for each in rank(fp8, SM90)]


def test_multicast_draws_less_and_padding_more() -> None:
    problem = ops.spec(m=4096, n=8192, k=4096, num_sms=132)
    power = default().power

    def drawn(cluster_n: int, m: int = 4096) -> float:
        asked = replace(problem, m=m)
        config = next(
            c
            for c in legal(asked, SM90)
            if (c.block_m, c.block_n, c.cluster_m, c.cluster_n) == (256, 128, 1, cluster_n)
        )
        return sustained_us(asked, config, features(asked, config), power)

    assert 0.97 * drawn(1) < drawn(2) < drawn(1)
    # Rows beyond M are multiplied, but not stored.
    stored = 8192 / power.stored_per_us
    assert drawn(1, 4096 - 100) == pytest.approx(drawn(1) - 100 * stored)
    multiplied = drawn(1) - 4096 * stored - power.launch_us
    assert drawn(1, 4096 + 1) == pytest.approx(multiplied * 17 / 16 + 4097 * stored + power.launch_us)


def back_to_back(power: Power, pairs: int = 12) -> list[dict[str, Any]]:
    """Survey rows of a GPU that behaves as ``power`` predicts."""
    out = []
    for m, n, k in ((4096, 7168, 2048), (1000, 8192, 8192), (8192, 2112, 7168)):
        asked = survey.spec_of(GemmShape(m, n, k, "test"), 132)
        configs = [choice.config for choice in rank(asked, SM90)][: 2 * pairs : 2]
        times = {
            survey.name_of(c, asked, arch.SM90): sustained_us(asked, c, features(asked, c), power) for c in configs
        }
        out.append({"m": m, "n": n, "k": k, "mode": "steady", "times": times, "selected": min(times, key=times.get)})
    return out


def test_the_fit_finds_what_draws_power() -> None:
    fitted = fit.fit_power(back_to_back(POWER), arch.SM90)
    assert fitted is not None
    found, summary = fitted
    assert summary == {"pairs": 36, "deviation": 0.0}
    for name, value in asdict(POWER).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_power_is_not_guessed_from_too_little() -> None:
    assert fit.fit_power([row | {"mode": "flush"} for row in back_to_back(default().power)], arch.SM90) is None
    assert fit.fit_power(back_to_back(default().power, pairs=5), arch.SM90) is None
    odd = back_to_back(default().power)
    for row in odd:  # as if loading more drew less power
        row["times"] = {name: 1 / us for name, us in row["times"].items()}
    assert fit.fit_power(odd, arch.SM90) is None


def test_the_h200s_power_is_what_its_survey_says() -> None:
    """For the pairs whose config is still legal. The constants were fitted to these and to some that no longer are."""
    errors = []
    for row in survey.load([RESULTS / "survey-steady.jsonl"]):
        asked = survey.spec_of(GemmShape(row["m"], row["n"], row["k"], "test"), 132)
        for config in legal(asked, SM90):
            us = row["times"].get(survey.name_of(config, asked, SM90))
            if us and row["mode"] == "steady":
                errors.append(sustained_us(asked, config, features(asked, config), default().power) / us - 1)
    assert len(errors) >= 35
    assert abs(fmean(errors)) < 0.005
    assert pstdev(errors) < 0.02


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def judged(file: str, mode: str, least: float, most: float = math.inf) -> list[float]:
    """The quality of the choice in rows of this many FLOPs, where it was timed: an older model chose the configs of
    these surveys."""
    found = []
    for row in survey.load([RESULTS / file]):
        asked = survey.spec_of(GemmShape(row["m"], row["n"], row["k"], "test"), 132)
        chosen = survey.name_of(rank(asked, SM90)[0].config, asked, SM90)
        if row["mode"] == mode and least <= asked.flops < most and chosen in row["times"]:
            found.append(survey.quality(row | {"selected": chosen}))
    return found


@pytest.mark.parametrize(
    ("file", "mode", "least", "most", "rows", "mean", "worst"),
    [
        ("survey-sustained.jsonl", "steady", 1.9e10, math.inf, 14, 0.99, 0.96),
        ("survey-prefill.jsonl", "steady", 1.5e10, math.inf, 23, 0.985, 0.94),
        ("survey-prefill.jsonl", "steady", 0, 1.5e10, 10, 0.975, 0.9),
        ("survey-prefill.jsonl", "flush", 0, 1.5e10, 10, 0.955, 0.89),
    ],
)
def test_what_is_chosen_stays_near_the_best_back_to_back(
    file: str, mode: str, least: float, most: float, rows: int, mean: float, worst: float
) -> None:
    """Shapes timed back to back on an H200, and the same small ones alone. No constant of power was fitted to them, but
    `SUSTAINED_PART` was chosen by them."""
    qualities = judged(file, mode, least, most)
    assert len(qualities) >= rows
    assert geometric_mean(qualities) > mean
    assert min(qualities) > worst
