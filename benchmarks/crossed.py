"""How well a serving set chooses for shapes that it was not made for.

    python benchmarks/crossed.py [--least-m M] [--common N] [--handicap F] FILE ...

FILE holds rows of a survey in which each row times nearly all configs. Constants are fitted and sets are searched on
three quarters of the shapes, and judged on the other quarter, four times in turn. Each line is one way to choose: the
speed of the choices beside the best of all, and beside cuBLASLt where the rows have its time. At the end come the
`--common` configs of all shapes that are best without a handicap, with the constants of the calibration.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm import arch as archs
from deep_gemm import kernels, select
from deep_gemm.bench import fit, survey
from deep_gemm.kernels.features import Features
from deep_gemm.params import GemmConfig
from deep_gemm.select import calibration
from deep_gemm.select.calibration import Speed
from deep_gemm.select.heuristic import ranked_as
from deep_gemm.select.model import features
from deep_gemm.spec import GemmSpec

SIZES = (28, 56)
"""Sizes of searched sets."""
LARGE, LARGE_WEIGHT = 0.05, 2.0
"""The part of a loss beyond ``LARGE``, as a logarithm, has this weight more."""
RARE = 0.03
"""What the choice of a config that is not common costs, as a logarithm: another kernel to compile."""
ROUNDS = 2
"""How often each config of a searched set is exchanged for the best other one."""
MISSING = 1.35
"""The time of a config that was not timed, as a multiple of the best: surveys leave out slower ones."""
SLOW = 0.95
"""Products below this share of cuBLASLt's speed are counted."""

Row = dict[str, Any]


class Table:
    """The rows of a survey as tables of shapes by configs."""

    def __init__(self, rows: Sequence[Row], offered: Callable[[GemmSpec, archs.ArchSpec], list[GemmConfig]]) -> None:
        self.rows = rows
        asked, timed = zip(*(fit.timed(row, archs.get("sm_90a"), offered) for row in rows), strict=True)
        self.configs = sorted({config for times in timed for config in times}, key=repr)
        place = {config: index for index, config in enumerate(self.configs)}
        pairs = [(index, config, us) for index, times in enumerate(timed) for config, us in times.items()]
        self._at = tuple(torch.tensor(x) for x in ([i for i, _, _ in pairs], [place[c] for _, c, _ in pairs]))
        counts = zip(*(features(ranked_as(asked[index]), config) for index, config, _ in pairs), strict=True)
        x = Features(*(torch.tensor(column, dtype=torch.float64) for column in counts))  # type: ignore[arg-type]
        log_us = torch.tensor([math.log(us) for _, _, us in pairs], dtype=torch.float64)
        best = torch.tensor([math.log(min(row["times"].values())) for row in rows], dtype=torch.float64)
        self._data = fit.Data(rows, x, log_us, log_us - best[self._at[0]], self._at[0], torch.zeros(len(rows)).long())
        self.lost = self._table(self._data.log_lost)
        """How much slower a config is than the best of all, as a logarithm; infinite where it was not timed."""

    def _table(self, values: Tensor) -> Tensor:
        found = torch.full((len(self.rows), len(self.configs)), math.inf, dtype=torch.float64)
        return found.index_put(self._at, values)

    def estimates(self, speed: Speed) -> Tensor:
        """The model's times as logarithms; infinite where a config was not timed."""
        return self._table(torch.log(self._data.estimates(speed)))

    def fitted(self, kept: Tensor, start: Speed) -> Speed:
        """The constants that suit the rows ``kept``."""
        data, pairs = self._data, kept[self._at[0]]
        new = torch.cumsum(kept.long(), 0) - 1
        seen = fit.Data(
            [row for row, keep in zip(self.rows, kept.tolist(), strict=True) if keep],
            Features(*(column[pairs] for column in data.x)),  # type: ignore[index]
            data.log_us[pairs],
            data.log_lost[pairs],
            new[data.row[pairs]],
            data.mode[kept],
        )
        return fit.fit(seen, start)


def choices(estimates: Tensor, common: Sequence[int], handicap: float) -> Tensor:
    """The config that is chosen for each row, if all but the ``common`` ones count longer by ``handicap``."""
    weighed = estimates + math.log(handicap)
    weighed[:, list(common)] = estimates[:, list(common)]
    return weighed.argmin(1)


def search(estimates: Tensor, lost: Tensor, count: int, handicap: float, fixed: Sequence[int] = ()) -> list[int]:
    """The ``count`` configs besides ``fixed`` with which, as common ones, the choices lose the least: added one by one,
    and then each exchanged for the best other one. An infinite ``handicap`` leaves all others out."""
    cost = torch.where(lost.isfinite(), lost, 9.0)
    cost = cost + LARGE_WEIGHT * (cost - LARGE).clamp(min=0)
    rows = torch.arange(len(cost))

    def loss(chosen: list[int]) -> float:
        common = [*chosen, *fixed]
        found = choices(estimates, common, handicap)
        rare = ~torch.isin(found, torch.tensor(common))
        return float(cost[rows, found].mean() + RARE * rare.double().mean())

    def best(others: list[int]) -> int:
        free = set(range(cost.shape[1])) - {*others, *fixed}
        return min(sorted(free), key=lambda each: loss([*others, each]))

    chosen: list[int] = []
    while len(chosen) < min(count, cost.shape[1] - len(fixed)):
        chosen.append(best(chosen))
    for place in list(range(len(chosen))) * ROUNDS:
        others = chosen[:place] + chosen[place + 1 :]
        if loss([*others, other := best(others)]) < loss(chosen):
            chosen[place] = other
    return chosen


def crossed(table: Table, known: Speed | None, choose: Callable[[Tensor, Tensor], Tensor], start: Speed) -> Tensor:
    """How much the choices lose in each row. ``choose`` takes estimates of all rows and which rows it may learn from.
    With ``known`` None, constants are fitted to these."""
    fold = torch.tensor([fit.fold(row) for row in table.rows])
    found, rows = torch.zeros(len(table.rows), dtype=torch.float64), torch.arange(len(table.rows))
    for each in range(fit.HELD_OUT):
        seen = fold != each
        chosen = choose(table.estimates(known or table.fitted(seen, start)), seen)
        found[~seen] = table.lost[rows, chosen][~seen]
    return torch.where(found.isfinite(), found, math.log(MISSING))


def line(rows: Sequence[Row], lost: Tensor, least_m: int) -> str:
    """The quality of choices for M of ``least_m`` and more."""
    kept = [index for index, row in enumerate(rows) if row["m"] >= least_m]
    text = f"{math.exp(-float(lost[kept].mean())):.4f}"
    if not all("cublaslt" in rows[index] for index in kept):
        text += " | - | -"
    else:
        speeds = [rows[i]["cublaslt"] / min(rows[i]["times"].values()) / math.exp(float(lost[i])) for i in kept]
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        text += f" | {mean:.4f} | {sum(speed < SLOW for speed in speeds)}"
    return text + " |"


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python benchmarks/crossed.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--least-m", type=int, default=1000)
    parser.add_argument("--common", type=int, default=28)
    parser.add_argument("--handicap", type=float, default=1.03)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    arch = archs.get("sm_90a")
    rows = [row for row in survey.load(asked.files) if row["mode"] == "flush"]
    named = {name: [row for row in rows if fit.speeds_of(row, arch) == name] for name in ("", "of 16-bit tiles")}
    name, rows = max(named.items(), key=lambda item: len(item[1]))
    known = calibration.of(str(rows[0].get("device")))
    every, offered = Table(rows, select.legal), Table(rows, select.candidates)
    handicaps = [kernels.of(config).handicap(config) for config in offered.configs]
    rare = {kernels.of(config).name for config, each in zip(offered.configs, handicaps, strict=True) if each > 1}
    fixed = [index for index, config in enumerate(offered.configs) if kernels.of(config).name not in rare]
    print(f"{len(rows)} rows\n\n| constants | configs | of the best | of cuBLASLt | below {SLOW} |")
    print("|---|---|---|---|---|")

    def show(constants: str, what: str, table: Table, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        speed = known.speed if constants == "common" else None
        lost = crossed(table, speed, choose, known.named(name))
        print(f"| {constants} | {what} | {line(rows, lost, asked.least_m)}", flush=True)

    for constants in ("common", "fitted"):
        for size in SIZES:

            def few(estimates: Tensor, seen: Tensor, size: int = size) -> Tensor:
                return choices(estimates, search(estimates[seen], every.lost[seen], size, math.inf), math.inf)

            show(constants, f"{size}, searched", every, few)
        show(constants, f"all {len(every.configs)}", every, lambda estimates, _: estimates.argmin(1))
    show("fitted", f"the {len(offered.configs)} offered", offered, lambda estimates, _: estimates.argmin(1))

    def handicapped(estimates: Tensor, seen: Tensor) -> Tensor:
        common = search(estimates[seen], offered.lost[seen], asked.common, asked.handicap, fixed)
        return choices(estimates, [*common, *fixed], asked.handicap)

    show("fitted", f"so, {asked.common} common", offered, handicapped)
    estimates = offered.estimates(known.named(name))
    for index in sorted(search(estimates, offered.lost, asked.common, asked.handicap, fixed)):
        config = offered.configs[index]
        print(kernels.of(config).describe(config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
