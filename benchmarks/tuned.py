"""Judge measured and learned choices on surveys: shapes that are held out, several seeds. Needs no GPU.

    python benchmarks/tuned.py benchmarks/results/survey-h100.jsonl [MORE.jsonl ...]

A quarter of the shapes of each file is held out. Corrections are learned from the rest. Of a held-out shape, the chosen
config is the best of the first 1, 3, 5 and 8, by the survey's times, and then of these 8 and the first 8 of all other
legal configs: that is what the tuner would choose if it measured as the survey did. Numbers are the time of the best
legal config of the row over that of the chosen one: the geometric mean, and the worst.

If the survey looked at all legal configs, one that it did not time counts as slower by a quarter and 1 us, as it was at
the first look. If it did not, only timed configs count. Times above twice the best of the row are left out: the first
look had been near the best, so something else disturbed them. Corrections are learned with them, as they would be.
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
from deep_gemm.bench.rows import shape_of
from deep_gemm.bench.summary import geometric_mean
from deep_gemm.params import GemmConfig
from deep_gemm.select import calibration, learned, tuner
from deep_gemm.select.heuristic import ranked_as
from deep_gemm.spec import GemmSpec

ALL = tuner.TOP + tuner.BEYOND
"""What the tuner measures."""
TOPS = (1, 3, 5, tuner.TOP, ALL)
SEEDS, HELD_OUT = 4, 4
DISTURBED = 2.0
FEW = 20
"""Shapes of the second line about learning: what a user has after tuning a model's layers at a few sizes."""


@dataclass(frozen=True)
class Shape:
    """A survey's row. ``times`` are in us, by config: of all legal ones that could be chosen. ``ranked`` are those of
    the serving set, the first by the model first; ``others`` are the first of the other legal ones that were timed, of
    the `BEYOND` that the tuner would measure. ``timed`` is what can be learned from the row."""

    spec: GemmSpec
    known: calibration.Calibration
    times: dict[GemmConfig, float]
    ranked: list[GemmConfig]
    others: list[GemmConfig]
    timed: learned.Timed[GemmConfig]

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
        times, measured = {}, {}
        for config in select.legal(asked, arch):
            name = survey.kind_name(config, replace(asked, m=1, n=128, k=128, expected_m=0))
            us = row["times"].get(name)
            if us is not None:
                measured[config] = us
            if us is not None and us <= DISTURBED * least:
                times[config] = us
            elif us is None and "legal" in row and name in seen:
                times[config] = survey.PROMISING * least + survey.PROMISING_US
        serving = [config for config in select.candidates(asked, arch) if config in times]
        record = tuner.Record(asked, {tuner.label(config): us for config, us in measured.items()})
        timed = tuner.timed(record, arch, known)
        if timed is not None and len(timed.times) > 1:
            ranked = [choice.config for choice in select.order(asked, serving, known)]
            rest = [config for config in select.legal(asked, arch) if config not in set(ranked[: tuner.TOP])]
            others = [choice.config for choice in select.order(asked, rest, known)[: tuner.BEYOND]]
            found.append(Shape(asked, known, times, ranked, [x for x in others if x in times], timed))
    return found


def first(shape: Shape, count: int) -> learned.Timed[GemmConfig]:
    """What the tuner learns from a shape: the times of the first configs by the model."""
    kept = [config for config in shape.ranked if config in shape.timed.times][:count]
    return replace(shape.timed, times={config: shape.timed.times[config] for config in kept})


def judge(shapes: Sequence[Shape], seeds: int = SEEDS, noise: float = 0.0) -> dict[str, dict[int, list[float]]]:
    """The qualities of held-out shapes for each way to rank and each number of measured configs. ``noise`` is the
    standard deviation of a measurement's logarithm."""
    few = f"learned from {FEW} shapes, {tuner.TOP} configs each"
    found: dict[str, dict[int, list[float]]] = {
        name: {top: [] for top in TOPS} for name in ("model", few, "learned from all others")
    }
    for seed in range(seeds):
        rng = random.Random(seed)
        specs = sorted({shape.spec for shape in shapes}, key=str)
        rng.shuffle(specs)
        held = set(specs[: len(specs) // HELD_OUT])
        rest = [shape for shape in shapes if shape.spec not in held]
        chosen = set(specs[len(held) : len(held) + FEW])
        learned_few = [first(shape, tuner.TOP) for shape in rest if shape.spec in chosen]
        ways = [learned.Corrections(timed) for timed in (learned_few, [shape.timed for shape in rest])]
        used = dict(zip(found, (None, *(each if each.help() else None for each in ways)), strict=True))
        for shape in shapes:
            for name, corrections in used.items() if shape.spec in held else ():
                ranked = shape.ranked if corrections is None else _corrected(shape, corrections)
                for top in TOPS:
                    measured = [*ranked[: tuner.TOP], *shape.others] if top == ALL else ranked[:top]
                    found[name][top].append(shape.best_of(measured, _reader(rng, noise)))
    return found


def _reader(rng: random.Random, noise: float) -> Callable[[float], float]:
    return lambda us: us * math.exp(rng.gauss(0, noise))


def _corrected(shape: Shape, corrections: learned.Corrections[GemmConfig]) -> list[GemmConfig]:
    """The serving set by the model and what was learned."""
    corrected = corrections.at(shape.timed.at)
    return [choice.config for choice in select.order(shape.spec, shape.ranked, shape.known, corrected)]


def main(arguments: Sequence[str]) -> int:
    """Print a table in Markdown for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of measurements, such as 0.02")
    given = parser.parse_args(arguments)
    for path in given.surveys:
        shapes = shapes_of(path)
        print(f"\n{path.name}: {len(shapes)} rows, {given.seeds} seeds\n")
        heads = [*(f"first {top}" for top in TOPS[:-1]), f"the tuner's {ALL}"]
        print(f"| ranked by | {' | '.join(heads)} |\n|---{'|---' * len(TOPS)}|")
        for name, tops in judge(shapes, given.seeds, given.noise).items():
            cells = [f"{geometric_mean(values):.4f} ({min(values):.2f})" for values in tops.values()]
            print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
