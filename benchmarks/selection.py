"""Judge the selector on shapes that its calibration did not see: one row each.

    python benchmarks/selection.py benchmarks/results/selection.jsonl
    python benchmarks/selection.py FILE bf16_gemm_nt --list benchmarks/families.txt --seconds 240

The shapes are random, of a seed that no survey uses; shapes of a survey beside the file are left out. With `--list`
they are those of a file of lines "NAME MxNxK", and a table with a line for each name is printed last. All configs that
can run a shape get a first look, whatever the model predicts, and the promising ones are timed. It needs a GPU,
compiles some 220 kernels of FP8 or 600 of BF16, and takes minutes; after `--seconds` no other shape is begun.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from deep_gemm.aot import inputs
from deep_gemm.aot.layers import FP8
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import shapes, survey
from deep_gemm.bench.provenance import environment
from deep_gemm.bench.run import append

SEED, COUNT = 76, 63
FAMILIES = Path(__file__).with_name("families.txt")
"""Products of Llama, Qwen, GLM and Mistral that nothing is fitted to."""


def unseen(surveys: Sequence[Path], count: int = COUNT) -> list[GemmShape]:
    """`count` shapes that are in no row of `surveys`; N is a multiple of 8, so that TMA can store D."""
    seen = {(row["m"], row["n"], row["k"]) for row in survey.load(surveys)}
    drawn = (shape for shape in shapes.log_uniform(count * 4, SEED) if shape.n % 8 == 0)
    return list(itertools.islice((shape for shape in drawn if (shape.m, shape.n, shape.k) not in seen), count))


def listed(path: Path) -> list[GemmShape]:
    """The shapes of a file of lines "NAME MxNxK"; the name becomes the source. Lines that begin with # are left out."""
    lines = (line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#"))
    found = []
    for name, text in lines:
        m, n, k = inputs.parse_dimensions(text)
        found.append(GemmShape(m, n, k, name))
    return found


def in_turns(found: Iterable[GemmShape]) -> list[GemmShape]:
    """One of each source after the other, the last source first: a run that is cut short still covers all."""
    by_source: dict[str, list[GemmShape]] = {}
    for shape in found:
        by_source.setdefault(shape.source, []).append(shape)
    rounds = itertools.zip_longest(*reversed(by_source.values()))
    return [shape for each in rounds for shape in each if shape is not None]


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


def table(found: Mapping[str, Sequence[survey.Row]]) -> str:
    """A line for each name of a list: how many rows, best time over the choice's as a geometric mean, and the worst."""
    lines = [f"{'':8} {'shapes':>6} {'chosen/best':>11}  worst"]
    for name, rows in found.items():
        worst = min(rows, key=lambda row: row["ratio_best"])
        shape = f"{worst['m']}x{worst['n']}x{worst['k']}"
        configs = f"{worst['selected']} {worst['us']} us, {worst['best']} {worst['us_best']} us"
        mean = geometric_mean(row["ratio_best"] for row in rows)
        lines.append(f"{name:8} {len(rows):6} {mean:11.3f}  {worst['ratio_best']:.3f} {shape}: {configs}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file of rows to write")
    parser.add_argument("op", nargs="?", default=FP8)
    parser.add_argument("--list", type=Path, help=f"such as {FAMILIES.name} beside this script")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args(arguments)
    chosen = in_turns(listed(given.list)) if given.list else unseen(sorted(given.output.parent.glob("survey*.jsonl")))
    given.output.unlink(missing_ok=True)
    found: dict[str, list[survey.Row]] = {}
    for row in survey.Survey(shapes.posed(chosen, given.op), ("flush",), seconds=given.seconds, everything=True).rows():
        append(given.output, judged(row))
        found.setdefault(row["source"] if given.list else "random", []).append(judged(row))
    print(table(found))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
