"""Judge the choices of the model and of the tuner on surveys. Needs no GPU.

    python benchmarks/tuned.py SURVEY.jsonl [MORE.jsonl ...]

The chosen config is the best of the first 1, 3, 5 and 8, by the survey's times, and then of these 8 and the first 8 of
all other legal configs: that is what the tuner would choose if it measured as the survey did. Numbers are the time of
the best legal config of the row over that of the chosen one: the geometric mean, and the worst.

If the survey looked at all legal configs, one that it did not time counts as slower by a quarter and 1 us, as it was at
the first look. If it did not, only timed configs count. Times above twice the best of the row are left out: the first
look had been near the best, so something else disturbed them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deep_gemm import arch as archs
from deep_gemm import select
from deep_gemm.bench import survey
from deep_gemm.bench.result_rows import shape_of
from deep_gemm.bench.summary import geometric_mean
from deep_gemm.params import GemmConfig
from deep_gemm.select import calibration, tuner
from deep_gemm.select.heuristic import ranked_as
from deep_gemm.spec import GemmSpec

ALL = tuner.TOP + tuner.BEYOND
"""What the tuner measures."""
TOPS = (1, 3, 5, tuner.TOP, ALL)
DISTURBED = 2.0


@dataclass(frozen=True)
class Shape:
    """A survey's row. ``times`` are in us, by config: of all legal ones that could be chosen. ``ranked`` are those of
    the serving set, the first by the model first; ``others`` are the first of the other legal ones that were timed, of
    the `BEYOND` that the tuner would measure."""

    spec: GemmSpec
    times: dict[GemmConfig, float]
    ranked: list[GemmConfig]
    others: list[GemmConfig]

    def best_of(self, configs: Iterable[GemmConfig], read: Callable[[float], float] = float) -> float:
        """The quality of that of ``configs`` whose time is the least as a measurement would ``read`` it."""
        return min(self.times.values()) / min((self.times[config] for config in configs), key=read)


def shapes_of(path: Path) -> list[Shape]:
    """The rows of single calls of a survey in which two configs or more of today's serving set were timed."""
    rows, arch = [row for row in survey.load([path]) if row["mode"] == "flush"], archs.get("sm_90a")
    seen = set().union(*(row["times"] for row in rows))
    found = []
    for row in rows:
        asked = ranked_as(survey.spec_of(shape_of(row), arch.num_sms))
        known, least = calibration.for_device(row["device"]), min(row["times"].values())
        times = {}
        for config in select.legal(asked, arch):
            name = survey.kind_name(config, replace(asked, m=1, n=128, k=128, expected_m=0), arch)
            us = row["times"].get(name)
            if us is not None and us <= DISTURBED * least:
                times[config] = us
            elif us is None and "legal" in row and name in seen:
                times[config] = survey.PROMISING * least + survey.PROMISING_US
        serving = [config for config in select.candidates(asked, arch) if config in times]
        if sum(config in times for config in serving) > 1:
            ranked = [choice.config for choice in select.order(asked, serving, known)]
            rest = [config for config in select.legal(asked, arch) if config not in set(ranked[: tuner.TOP])]
            others = [choice.config for choice in select.order(asked, rest, known)[: tuner.BEYOND]]
            found.append(Shape(asked, times, ranked, [x for x in others if x in times]))
    return found


def judge(shapes: Sequence[Shape], noise: float = 0.0) -> dict[int, list[float]]:
    """The qualities of shapes for each number of measured configs. ``noise`` is the standard deviation of a
    measurement's logarithm."""
    found: dict[int, list[float]] = {top: [] for top in TOPS}
    rng = random.Random(0)
    for shape in shapes:
        for top in TOPS:
            measured = [*shape.ranked[: tuner.TOP], *shape.others] if top == ALL else shape.ranked[:top]
            found[top].append(shape.best_of(measured, _reader(rng, noise)))
    return found


def _reader(rng: random.Random, noise: float) -> Callable[[float], float]:
    return lambda us: us * math.exp(rng.gauss(0, noise))


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", nargs="+", type=Path)
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of measurements, such as 0.02")
    given = parser.parse_args(arguments)
    heads = [*(f"first {top}" for top in TOPS[:-1]), f"the tuner's {ALL}"]
    print(f"| survey | {' | '.join(heads)} |\n|---{'|---' * len(TOPS)}|")
    for path in given.surveys:
        shapes = shapes_of(path)
        found = judge(shapes, given.noise).values()
        cells = [f"{geometric_mean(values):.4f} ({min(values):.2f})" for values in found]
        print(f"| {path.name}, {len(shapes)} rows | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
