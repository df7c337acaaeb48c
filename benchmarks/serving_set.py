"""Which configs are worth having: the gain of each feature, and the loss of a small set of configs.

    python -m deep_gemm.benchmarks.serving_set [--all] [--list N] FILE ...

FILE holds rows of a survey, as `deep-gemm calibrate survey` writes them; the more configs each row times, the better.
The configs that calls choose among (`SERVING` in the families' modules) are the first of such a list. With --all,
configs that are no longer legal count too. --list prints the best N. Rows of all forms, outputs and dtypes of 16-bit
operations are judged together, since one set serves them; rows of FP8 are judged separately.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_gemm.benchmarks import survey
from deep_gemm.benchmarks.rows import operation_of, shape_of
from deep_gemm.benchmarks.summary import RANGES, geometric_mean
from deep_gemm.errors import DeepGemmError

Row = dict[str, Any]
Times = dict[str, float]

MISSING = 1.35
"""The least time of a config that was not timed, as a multiple of the best: surveys leave out slower ones."""

SIZES = (24, 32, 48, 64, 96)

_NAME = re.compile(
    r"[a-z0-9]+_gemm_(?:[nt][nt]_)?(?:f32_)?(?:(?:add|reduce)_)?"
    r"(?:(swapped|turned|small)_)?(\d+x\d+)_(.+?)_(?:tma|direct)(?:_[mnk]\d+)*"
)
_NO_CHOICE = re.compile(r"[sp]\d+")
"""Parts of a name that are no choice: stages and sets of partial sums follow from the other parts. (How D is stored,
and compiled-in sizes, follow from the call.)"""


@functools.cache
def parts_of(name: str) -> tuple[str, str, tuple[str, ...]]:
    """(family, tile, other parts) of a kernel's name, such as ("swapped", "16x64", ("k2x1",)). Raises DeepGemmError."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise DeepGemmError(f"{name!r} is no name of a GEMM kernel such as fp8_gemm_128x128_s5_p2_c2x1_tma.")
    others = [part for part in found[3].split("_") if not _NO_CHOICE.fullmatch(part)]
    return found[1] or "upright", found[2], tuple(others)


def config_of(name: str) -> str:
    """The config of a kernel's name, such as "swapped 16x64 k2x1": the same for all ways to store D."""
    family, tile, others = parts_of(name)
    return " ".join((family, tile, *others))


def features_of(config: str) -> frozenset[str]:
    """The features of a config by `config_of`: its family, its tile, and each of its other parts."""
    family, *others = config.split(" ")
    return frozenset((family, *(f"{family} {part}" for part in others)))


def by_config(rows: Iterable[Row], legal: frozenset[str] | None = None) -> list[Times]:
    """For each row, the times by config, relative to the row's best. Configs that are not ``legal`` are left out."""
    found = []
    for row in rows:
        times: Times = {}
        for name, us in row["times"].items():
            config = config_of(name)
            if legal is None or config in legal:
                times[config] = min(us, times.get(config, us))
        best = min(times.values(), default=1.0)
        found.append({config: us / best for config, us in times.items()})
    return found


def _missing(times: Times) -> float:
    """The relative time of a row without any of its timed configs: no less than the worst of them."""
    return max(MISSING, *times.values())


def loss(table: Sequence[Times], kept: Callable[[str], bool]) -> float:
    """The time of the best config that is ``kept`` over the best of all, by geometric mean."""
    return geometric_mean(min((r for c, r in times.items() if kept(c)), default=_missing(times)) for times in table)


def greedy(table: Sequence[Times], count: int) -> list[str]:
    """Up to ``count`` configs: the one that is best alone, then always the one that gains most beside those before
    it."""
    ratios: dict[str, list[tuple[int, float]]] = {}
    for index, times in enumerate(table):
        for config, ratio in times.items():
            ratios.setdefault(config, []).append((index, ratio))
    now, chosen = [_missing(times) for times in table], list[str]()

    def gain(config: str) -> float:
        return sum(math.log(now[index] / ratio) for index, ratio in ratios[config] if ratio < now[index])

    while len(chosen) < count and len(chosen) < len(ratios):
        best = max(sorted(ratios.keys() - set(chosen)), key=gain)
        chosen.append(best)
        for index, ratio in ratios[best]:
            now[index] = min(now[index], ratio)
    return chosen


def columns(rows: Sequence[Row]) -> dict[str, list[int]]:
    """The indices of rows by mode and range of M, such as "flush, M <= 64"; empty ranges are left out."""
    found: dict[str, list[int]] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for low, high, label in RANGES:
            places = [i for i, row in enumerate(rows) if row["mode"] == mode and low <= row["m"] <= high]
            if places:
                found[f"{mode}, {label}"] = places
    return found


def worth(rows: Sequence[Row], table: Sequence[Times]) -> dict[str, dict[str, float]]:
    """The worth of each feature by column: the time of rows without it over the time with it, the largest first."""
    features = {config: features_of(config) for times in table for config in times}
    found = {
        feature: {
            label: loss([table[i] for i in places], lambda config: feature not in features[config])  # noqa: B023
            for label, places in columns(rows).items()
        }
        for feature in sorted(set().union(*features.values()))
    }
    return dict(sorted(found.items(), key=lambda item: -max(item[1].values())))


def legal_configs(rows: Iterable[Row]) -> frozenset[str]:
    """All configs that are legal for the operations of ``rows``."""
    from deep_gemm import arch, select

    # The longest K, which can be split into the most parts.
    longest = {operation_of(row): row for row in sorted(rows, key=lambda row: int(row["k"]))}
    specs = [survey.spec_of(shape_of(row), arch.SM90.num_sms) for row in longest.values()]
    pairs = [(asked, config) for asked in specs for config in select.legal(asked, arch.SM90)]
    return frozenset(config_of(survey.name_of(config, asked, arch.SM90)) for asked, config in pairs)


def print_table(of: Mapping[str, Mapping[str, float]], labels: Sequence[str]) -> None:
    """Print a line of percentages for each entry."""
    for index, label in enumerate(labels):
        print(f"({index + 1}) {label}")
    print(f"{'':24}" + "".join(f"{f'({index + 1})':>8}" for index in range(len(labels))))
    for name, values in of.items():
        print(f"{name:24}" + "".join(f"{100 * (values[label] - 1):8.2f}" for label in labels))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m deep_gemm.benchmarks.serving_set", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--all", action="store_true", help="also count configs that are no longer legal")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="print the best N")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    rows = survey.load(asked.files)
    if len({next(iter(row["times"])).startswith("fp8") for row in rows}) > 1:
        raise DeepGemmError("These files hold rows of FP8 and of 16-bit operations: pass files of one kind.")
    legal = None if asked.all else legal_configs(rows)
    rows = [row for row in rows if legal is None or any(config_of(name) in legal for name in row["times"])]
    if not rows:
        raise DeepGemmError("These files hold no row of a config that is legal here; --all counts the others too.")
    table = by_config(rows, legal)
    labels = columns(rows)
    print("Slowdown of rows without a feature, in percent, by geometric mean:")
    print_table(worth(rows, table), list(labels))
    chosen = greedy(table, max(*SIZES, asked.list))
    print("\nSlowdown of rows with the best few configs against all, in percent, by geometric mean:")
    few = {
        f"the best {size}": {
            label: loss([table[i] for i in places], set(chosen[:size]).__contains__) for label, places in labels.items()
        }
        | {"all": loss(table, set(chosen[:size]).__contains__)}
        for size in SIZES
    }
    print_table(few, ["all", *labels])
    for config in chosen[: asked.list]:
        print(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
