"""Fitting a calibration to a survey: the constants with which the model selects best."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deep_gemm import arch as archs
from deep_gemm.aot.workload import GemmShape
from deep_gemm.benchmarks.modes import LAUNCH_MODES
from deep_gemm.benchmarks.survey import name_of, spec_of
from deep_gemm.kernels.features import Features
from deep_gemm.params import GemmConfig
from deep_gemm.select import candidates
from deep_gemm.select.calibration import Calibration
from deep_gemm.select.model import features, parts
from deep_gemm.select.power import BLOCK_K, Power, draws

BOUNDS: dict[str, tuple[float, float]] = {
    "clock_ghz": (1.5, 1.98),
    "tensor_ghz": (1.3, 1.98),
    "launch_us": (2.0, 6.5),
    "epilogue_us": (0.02, 2.0),
    "epilogue_elements_per_us": (5e3, 3e5),
    "narrow_store": (0.01, 1.5),
    "epilogue_hidden": (0.01, 0.99),
    "direct_elements_per_us": (300, 3e4),
    "transposed_elements_per_us": (5e3, 1e6),
    "upright_us": (0.001, 2.0),
    "stage_us": (0.0005, 0.06),
    "consumer_us": (0.001, 1.0),
    "store_warp_us": (0.001, 1.0),
    "cluster_2_us": (0.01, 3.0),
    "cluster_4_us": (0.01, 4.0),
    "cluster_8_us": (0.01, 4.0),
    "local_us": (0.01, 1.5),
    "exchange_us": (0.01, 2.5),
    "skew": (0.0005, 0.4),
    "handed_per_us": (1e3, 3e5),
    "exchanged_per_us": (1e3, 2e5),
    "instruction_cycles": (8, 60),
    "chain_cycles": (30, 300),
    "promote_cycles": (0.35, 1.5),
    "token_cycles": (0.01, 6.0),
    "exposed": (0.02, 1.0),
    "in_step": (0.01, 1.0),
    "parts_cycles": (1, 100),
    "ahead_cycles": (30, 300),
    "issue_cycles": (15, 200),
    "shared_bytes_per_cycle": (130, 300),
    "fill_bytes_per_cycle": (50, 110),
    "line_cycles": (0.3, 4.0),
    "load_cycles": (600, 5000),
    "start_gb_per_s": (1500, 30000),
    "hbm_gb_per_s": (2500, 6000),
    "again": (0.005, 1.0),
    "l2_gb_per_s": (4000, 20000),
    "l2_sharing": (0.01, 0.5),
    "unaligned": (1.0, 6.0),
    "torn": (0.01, 8.0),
    "crowded_cycles": (0.05, 60),
    "hanging_cycles": (0.1, 60),
}
"""Where each constant may lie on a GPU of Hopper's kind; the search goes by its logarithm."""

SOFTNESS = (0.05, 0.012)
"""Configs whose estimates are this close (as logarithms) share a choice, so that the loss has slopes to go down; at the
search's begin, and at its end."""
LARGE = 0.1
LARGE_WEIGHT = 4.0
"""What is lost by a choice beyond ``LARGE``, as a logarithm, counts so many times more."""
ORDER_WEIGHT, ACCURACY_WEIGHT = 1.0, 0.2
"""What errors of estimates cost beside the time lost by choices: of configs of one shape against each other, and of a
shape's all together."""
DECAY = 8.0
"""Errors count by exp of minus this for configs that are slower than the best, as a logarithm: far from it they do no
harm."""
HIDDEN_US = 2.5
"""What launches of a graph take less than alone, to begin with: the fit finds how much it was in each mode."""
SHORTEST_US = 0.2
"""No launch takes less, whatever a fit tries."""
STEPS, RATE = 600, 0.05
"""Of Adam. On 500 shapes 1500 steps, and twice the rate, chose no better."""
TRIES = 8000
"""Of a climb."""
LEAST_PAIRS = 20
"""Of a shape and a config, for the constants of power."""
HELD_OUT = 4
"""One shape in so many is kept for judging."""


@dataclass
class Data:
    """A survey as tensors: one entry for each pair of a shape (in a mode) and a config, or for each shape."""

    x: Features
    log_us: Tensor
    log_lost: Tensor
    """How much slower than the best of its shape, as a logarithm."""
    shape: Tensor
    """Index of the pair's shape."""
    held_out: Tensor
    """By shape."""
    mode: Tensor
    """By shape: index in ``modes.LAUNCH_MODES``."""
    weight: Tensor
    """By shape: a row's "weight", or 1. Only climbs go by it."""

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], spec: archs.ArchSpec) -> Data:
        """The pairs of survey rows, of `LAUNCH_MODES` alone; configs that are not legal any more are left out."""
        x: list[Features] = []
        log_us: list[float] = []
        log_lost: list[float] = []
        shape: list[int] = []
        held_out: list[bool] = []
        mode: list[int] = []
        weight: list[float] = []
        for row in rows:
            asked = spec_of(GemmShape(row["m"], row["n"], row["k"], ""), spec.num_sms)
            legal: dict[str, GemmConfig] = {name_of(c, asked, spec): c for c in candidates(asked, spec)}
            names = [name for name in row["times"] if name in legal]
            if len(names) < 2:
                continue
            best = min(row["times"][name] for name in names)
            x += [features(asked, legal[name]) for name in names]
            log_us += [math.log(row["times"][name]) for name in names]
            log_lost += [math.log(row["times"][name] / best) for name in names]
            shape += [len(held_out)] * len(names)
            # By shape, not by row: its modes are kept together.
            text = f"{row['m']} x {row['n']} x {row['k']}"
            held_out.append(zlib.crc32(text.encode()) % HELD_OUT == 0)
            mode.append(LAUNCH_MODES.index(row["mode"]))
            weight.append(row.get("weight", 1.0))
        columns: Any = (torch.tensor(column, dtype=torch.float64) for column in zip(*x, strict=True))
        return cls(
            Features(*columns),
            torch.tensor(log_us, dtype=torch.float64),
            torch.tensor(log_lost, dtype=torch.float64),
            torch.tensor(shape),
            torch.tensor(held_out),
            torch.tensor(mode),
            torch.tensor(weight, dtype=torch.float64),
        )

    def selected(self, calibration: Calibration) -> Tensor:
        """For each shape, the best time over that of the config that ``calibration`` selects."""
        estimates = self._estimates(calibration)
        least = self._least(estimates)
        chosen = torch.where(estimates == least[self.shape], self.log_lost, math.inf)
        return torch.exp(-self._least(chosen))

    def loss(
        self,
        constants: Any,
        softness: float = SOFTNESS[1],
        shapes: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Time lost by the choices on ``shapes`` (a mask; all if it is None), large losses counted more, and a little
        of how wrong the estimates are where they matter. ``hidden`` are the us that a launch takes less in each of
        ``modes.LAUNCH_MODES`` than alone, which is what the model estimates; none if it is None."""
        shapes = torch.ones_like(self.held_out) if shapes is None else shapes
        hidden = torch.zeros(len(LAUNCH_MODES), dtype=torch.float64) if hidden is None else hidden
        us = self._estimates(constants)
        estimates = torch.log(us)
        shares = torch.exp((self._least(estimates.detach())[self.shape] - estimates) / softness)
        lost = self._mean(self.log_lost, shares)
        near = torch.exp(-DECAY * self.log_lost)
        seen = torch.clamp(us - hidden[self.mode][self.shape], min=SHORTEST_US)
        errors = torch.log(seen) - self.log_us
        together = self._mean(errors, near)
        order = self._mean(_size(errors - together[self.shape]), near)
        wrong = ORDER_WEIGHT * order + ACCURACY_WEIGHT * _size(together)
        return (_felt(lost) + wrong)[shapes].mean()

    def felt(self, calibration: Calibration, shapes: Tensor | None = None) -> float:
        """Time lost by its choices alone, on all ``shapes`` if None, by their weights; large losses counted more."""
        weight = self.weight if shapes is None else self.weight * shapes
        return float((_felt(-torch.log(self.selected(calibration))) * weight).sum() / weight.sum())

    def _estimates(self, constants: Any) -> Tensor:
        total: Tensor = parts(self.x, constants, _maximum)["total"]
        return total

    def _least(self, values: Tensor) -> Tensor:
        """By shape."""
        most = torch.full(self.held_out.shape, math.inf, dtype=values.dtype)
        return most.scatter_reduce(0, self.shape, values, "amin")

    def _mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """By shape."""
        none = torch.zeros(self.held_out.shape, dtype=values.dtype)
        return none.index_add(0, self.shape, weights * values) / none.index_add(0, self.shape, weights)


def _maximum(one: Tensor, other: Tensor | float) -> Tensor:
    return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype))


def _felt(lost: Tensor) -> Tensor:
    return lost + LARGE_WEIGHT * torch.clamp(lost - LARGE, min=0)


def _size(error: Tensor) -> Tensor:
    """Of an error, with a slope everywhere."""
    return torch.sqrt(error**2 + 1e-4)


def middle() -> Calibration:
    """Constants of which nothing is known."""
    return Calibration(**{name: math.sqrt(low * high) for name, (low, high) in BOUNDS.items()})


def fit(data: Data, start: Calibration, shapes: Tensor | None = None) -> Calibration:
    """The calibration, near ``start``, that loses least on ``shapes`` of ``data`` (a mask; all if it is None). Adam
    (Kingma and Ba, 2015) on the logit of where each constant lies between its bounds; the same each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: two threads took seven times as long where one core was busy
    try:
        return _fit(data, start, shapes)
    finally:
        torch.set_num_threads(threads)


def _fit(data: Data, start: Calibration, shapes: Tensor | None) -> Calibration:
    names = [field.name for field in fields(Calibration)]
    low, high = (torch.tensor([math.log(BOUNDS[name][end]) for name in names], dtype=torch.float64) for end in (0, 1))
    known = torch.tensor([math.log(getattr(start, name)) for name in names], dtype=torch.float64)
    # Not from a bound, where slopes are flat.
    point = torch.logit(((known - low) / (high - low)).clamp(0.01, 0.99)).requires_grad_()
    hidden = torch.full((len(LAUNCH_MODES) - 1,), HIDDEN_US, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([point, hidden], lr=RATE)
    none = torch.zeros(1, dtype=torch.float64)  # of single calls

    def constants() -> dict[str, Tensor]:
        values = torch.exp(low + (high - low) * torch.sigmoid(point))
        return dict(zip(names, values, strict=True))

    for step in range(STEPS):
        done = step / STEPS
        for group in adam.param_groups:
            group["lr"] = RATE * (1 - done)
        adam.zero_grad()
        softness = SOFTNESS[0] * (SOFTNESS[1] / SOFTNESS[0]) ** done
        data.loss(SimpleNamespace(**constants()), softness, shapes, torch.cat([none, hidden])).backward()
        adam.step()
    return Calibration(**{name: float(f"{float(value.detach()):.5g}") for name, value in constants().items()})


def climb(data: Data, start: Calibration, shapes: Tensor | None = None, tries: int | None = None) -> Calibration:
    """``start``, changed by chance wherever its choices on ``shapes`` of ``data`` then lose no more; the same each
    time.

    For few tokens: cross-validated on 238 rows of an H200, climbs from known constants chose at 0.942 to 0.956 of the
    best, by chance, ``fit`` at 0.946 and those constants at 0.943. On 668 rows of more tokens they gained nothing. For
    65 to 128 tokens, from constants that already knew what reading B again costs, climbs brought 33 graphs of random
    shapes, held out in turn, from 0.935 to 0.968, and left 36 of models' at 0.971; ``fit`` left these at 0.959 to
    0.972."""
    tries = TRIES if tries is None else tries
    chance = random.Random(0)
    least = data.felt(start, shapes)
    for index in range(tries):
        width = 0.05 + 0.6 * (1 - index / tries)
        changed = {}
        for name in chance.sample(list(BOUNDS), chance.choice((1, 1, 2, 3))):
            low, high = BOUNDS[name]
            value = getattr(start, name) * math.exp(chance.gauss(0, width))
            changed[name] = float(f"{min(high, max(low, value)):.5g}")
        other = replace(start, **changed)
        if (lost := data.felt(other, shapes)) <= least:
            start, least = other, lost
    return start


def fit_power(rows: Sequence[dict[str, Any]], spec: archs.ArchSpec) -> tuple[Power, dict[str, float]] | None:
    """What draws power, by the times of survey rows back to back: least squares of relative errors. With how many pairs
    of a shape and a config that is from, and the errors' standard deviation. None where the rows do not tell: too few,
    or a constant would not be positive."""
    drawn: list[list[float]] = []
    for row in rows:
        if row["mode"] != "steady":
            continue
        asked = spec_of(GemmShape(row["m"], row["n"], row["k"], ""), spec.num_sms)
        legal: dict[str, GemmConfig] = {name_of(c, asked, spec): c for c in candidates(asked, spec)}
        for name in row["times"].keys() & legal.keys():
            config = legal[name]
            drawn.append([part / row["times"][name] for part in draws(asked, config, features(asked, config))])
    if len(drawn) < LEAST_PAIRS:
        return None
    matrix = torch.tensor(sorted(drawn), dtype=torch.float64)
    scale = matrix.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
    found = torch.linalg.lstsq(matrix / scale, torch.ones(len(matrix), 1, dtype=torch.float64)).solution[:, 0] / scale
    if not bool((found > 0).all() and found.isfinite().all()):
        return None
    products, *rows_moved, stored, launch = (float(value) for value in found)
    values = (BLOCK_K / products, *(row / products for row in rows_moved), 1 / stored, launch)
    power = Power(*(float(f"{value:.5g}") for value in values))
    return power, {"pairs": len(matrix), "deviation": round(float((matrix @ found - 1).std()), 4)}
