"""The fewest tiles with which a family's choices lose little, from a survey in which each row times nearly all configs.

    python benchmarks/serving_set.py FAMILY FILE ... [--sizes 100 64 48]

The tile whose choices matter the least is taken out again and again. Each size is judged by cross-validation: tiles are
chosen by three quarters of the shapes and judged by the rest, four times in turn. A loss is the logarithm of the chosen
config's time over the best of all. At the end come the tiles of the last size, chosen by all shapes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deep_gemm import kernels, select
from deep_gemm.arch import SM90
from deep_gemm.bench import fit, survey
from deep_gemm.kernels.families import GEMMS
from deep_gemm.params import GemmConfig
from deep_gemm.select import calibration, heuristic
from deep_gemm.select.model import features, parts, speed

LARGE, LARGE_WEIGHT = 0.05, 2.0
"""The part of a loss beyond ``LARGE`` has this weight more."""
UNTIMED = math.log(1.35)
"""The loss of a config that was not timed: surveys leave out slower ones."""


@dataclass(frozen=True)
class Table:
    """Shapes by configs: the model's estimates as logarithms, infinite for configs that are not offered for a shape;
    and losses. The configs of the family, which may be taken out, come first."""

    configs: Sequence[GemmConfig]
    own: int
    estimates: Tensor
    losses: Tensor
    folds: Tensor

    def choices(self, kept: Tensor) -> Tensor:
        """The loss of the choice for each shape among the configs ``kept``."""
        chosen = torch.where(kept, self.estimates, math.inf).argmin(1)
        return self.losses[torch.arange(len(chosen)), chosen]

    def reduced(self, shapes: Tensor, size: int) -> Tensor:
        """The configs that are kept if only ``size`` of the family's may be, judged by ``shapes``."""
        kept = torch.ones(len(self.configs), dtype=torch.bool)
        estimates, losses = self.estimates[shapes], self.losses[shapes]
        cost = losses + LARGE_WEIGHT * (losses - LARGE).clamp(min=0)
        at = torch.arange(len(cost))
        while int(kept[: self.own].sum()) > size:
            first, second = torch.where(kept, estimates, math.inf).topk(2, 1, largest=False).indices.unbind(1)
            more = torch.zeros(len(self.configs), dtype=torch.float64)
            more.index_add_(0, first, cost[at, second] - cost[at, first] + 1e-6)
            more[~kept] = math.inf
            kept[int(more[: self.own].argmin())] = False
        return kept

    def crossed(self, size: int) -> Tensor:
        """The loss of each shape with tiles that were chosen without it."""
        found = torch.zeros(len(self.folds), dtype=torch.float64)
        for fold in self.folds.unique().tolist():
            out = self.folds == fold
            found[out] = self.choices(self.reduced(~out, size))[out]
        return found


def table(family: kernels.GemmFamily, files: Sequence[Path]) -> Table:
    """The table of those rows of a survey, single calls, for which the rules offer tiles of ``family``."""
    found = []
    for row in survey.load(files):
        asked, times = fit.timed(row, SM90, heuristic.legal)
        asked = heuristic.ranked_as(asked)
        fits = [config for config in times if config.family != family.name or config in family.legal(SM90)]
        own = family.offered(asked, [config for config in fits if config.family == family.name])
        if row["mode"] == "flush" and own:
            others = [config for config in select.candidates(asked, SM90) if config.family != family.name]
            offered = [*own, *(config for config in others if config in times)]
            known = speed(asked, family.name, calibration.for_device(str(row["device"])))
            estimates = {config: float(parts(features(asked, config), known)["total"]) for config in offered}
            found.append((estimates, {config: times[config] for config in offered}, min(times.values()), fit.fold(row)))
    configs = sorted(
        {c for estimates, *_ in found for c in estimates}, key=lambda c: (c.family != family.name, repr(c))
    )
    place = {config: index for index, config in enumerate(configs)}
    estimated = torch.full((len(found), len(configs)), math.inf, dtype=torch.float64)
    losses = torch.full_like(estimated, UNTIMED)
    for index, (estimates, times, best, _) in enumerate(found):
        for config, us in times.items():
            estimated[index, place[config]] = math.log(estimates[config])
            losses[index, place[config]] = math.log(us / best)
    own_count = sum(config.family == family.name for config in configs)
    return Table(configs, own_count, estimated, losses, torch.tensor([fold for *_, fold in found]))


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python benchmarks/serving_set.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("family", choices=[family.name for family in GEMMS])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 64, 48])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    found = table(kernels.gemm_family(asked.family), asked.files)
    every = torch.ones(len(found.folds), dtype=torch.bool)
    print(f"{len(every)} shapes, {found.own} tiles of {asked.family}\n")
    print("| tiles | loss, crossed | loss, on all |\n|---|---|---|")
    for size in (found.own, *asked.sizes):
        kept = found.reduced(every, size)
        print(f"| {size} | {found.crossed(size).mean():.4f} | {found.choices(kept).mean():.4f} |", flush=True)
    for config, keep in zip(found.configs[: found.own], kept[: found.own].tolist(), strict=True):
        if keep:
            c = config
            print((c.block_m, c.block_n, (c.cluster_m, c.cluster_n, c.cluster_k)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
