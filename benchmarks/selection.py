"""Judge the selector on shapes that its calibration did not see: a survey of them, one row each.

    python benchmarks/selection.py benchmarks/results/selection.jsonl [OP]

The shapes are random, of a seed that no survey uses; shapes of a survey beside the file are left out. All configs that
can run a shape get a first look, whatever the model predicts, and the promising ones are timed. It needs a GPU,
compiles some six hundred kernels, and takes some minutes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.aot.layers import FP8
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import shapes, survey
from deep_gemm.bench.provenance import environment
from deep_gemm.bench.run import append

SEED, COUNT = 76, 63


def unseen(surveys: Sequence[Path], count: int = COUNT) -> list[GemmShape]:
    """`count` shapes that are in no row of `surveys`; N is a multiple of 8, so that TMA can store D."""
    seen = {(row["m"], row["n"], row["k"]) for row in survey.load(surveys)}
    drawn = (shape for shape in shapes.log_uniform(count * 4, SEED) if shape.n % 8 == 0)
    return list(itertools.islice((shape for shape in drawn if (shape.m, shape.n, shape.k) not in seen), count))


def judged(row: survey.Row) -> survey.Row:
    """The fields for README's sentence, from a row of a survey."""
    times, selected = row["times"], row["selected"]
    best = min(times, key=times.__getitem__)
    return {
        "mode": "selection",
        **{name: row[name] for name in ("m", "n", "k")},
        **{name: row[name] for name in ("op", "legal") if name in row},
        "timed": len(times),
        "of": "a survey that the calibration did not see",
        "selected": selected,
        "us": round(times[selected], 1),
        "best": best,
        "us_best": round(times[best], 1),
        "ratio_best": round(survey.quality(row), 4),
        **{name: row[name] for name in environment()},
    }


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__)
        return 2
    output = Path(arguments[0])
    op = arguments[1] if len(arguments) == 2 else FP8
    found = shapes.posed(unseen(sorted(output.parent.glob("survey*.jsonl"))), op)
    output.unlink(missing_ok=True)
    for row in survey.Survey(found, ("flush",), everything=True).rows():
        append(output, judged(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
