"""Fitting a calibration to a survey: the constants with which the model chooses best."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deep_gemm import arch as archs
from deep_gemm import kernels
from deep_gemm.bench import result_rows
from deep_gemm.bench.backends import spec_of
from deep_gemm.bench.modes import LAUNCH_MODES
from deep_gemm.bench.survey import name_of
from deep_gemm.kernels.features import Features
from deep_gemm.params import GemmConfig
from deep_gemm.select import candidates, sheets
from deep_gemm.select.calibration import Speed, default
from deep_gemm.select.model import features, parts
from deep_gemm.select.power import BLOCK_BYTES, Power, draws
from deep_gemm.spec import GemmSpec

BOUNDS: dict[str, tuple[float, float]] = {
    "launch_us": (1.5, 6.5),
    "consumer_us": (0.001, 1.0),
    "store_warp_us": (0.001, 1.0),
    "cluster_us": (0.01, 3.0),
    "exchange_us": (0.01, 2.5),
    "exchanged_per_us": (1e3, 2e5),
    "epilogue_us": (0.05, 3.0),
    "elements_per_us": (5e3, 3e5),
    "epilogue_hidden": (0.01, 0.99),
    "tensor": (1.0, 6.4),
    "chain_cycles": (30, 400),
    "load_cycles": (600, 6000),
    "fill_bytes_per_cycle": (10, 110),
    "crowded_cycles": (0.05, 60),
    "unaligned": (0.01, 6.0),
    "start_gb_per_s": (1000, 30000),
    "hbm_gb_per_s": (1000, 6500),
    "l2_gb_per_s": (3000, 30000),
    "overlap": (1.5, 8.0),
}
"""The bounds of each constant on Hopper GPUs; the search uses logarithms. The clock is not fitted. On other GPUs they
are moved as far as spec sheets move the constants of an H200."""

SOFTNESS = (0.05, 0.015)
"""Temperature of the softmin over logarithms of estimates: at the start and at the end of the search."""
LARGE, LARGE_WEIGHT = 0.1, 4.0
"""The part of a loss beyond ``LARGE``, as a logarithm, has this weight."""
MOST = 0.4
"""Losses are clipped here: some single times of a survey are outliers."""
ORDER_WEIGHT, ACCURACY_WEIGHT = 1.0, 0.2
"""Weights of errors between configs of one shape, and of the common error of a shape."""
DECAY = 8.0
"""The weight of an error is exp(-DECAY * x) for a config slower than the best by x, a logarithm."""
HIDDEN_US = 2.5
"""How much less a launch takes in a graph than alone, as a starting value: the fit finds it for each mode."""
SHORTEST_US = 0.2
"""The lower bound of a launch's time during the fit."""
STEPS, RATE = 300, 0.06
LEAST_PAIRS = 20
HELD_OUT = 4
"""One shape in this many is held out to judge the fit."""

Row = dict[str, Any]


def fold(row: Row) -> int:
    """It depends on the shape alone, so that all modes of a shape are held out together."""
    return zlib.crc32(f"{row['m']} x {row['n']} x {row['k']}".encode()) % HELD_OUT


def is_held_out(row: Row) -> bool:
    return fold(row) == 0


def timed(
    row: Row, spec: archs.ArchSpec, offered: Callable[[GemmSpec, archs.ArchSpec], list[GemmConfig]] = candidates
) -> tuple[GemmSpec, dict[GemmConfig, float]]:
    """The spec of a row, and its times for the configs that are ``offered``: those that calls choose among now."""
    asked = spec_of(result_rows.shape_of(row), spec.num_sms)
    # Names do not depend on the sizes, so few are needed.
    kind = replace(asked, m=1, n=128, k=128)
    configs = {_name(config, kind, spec): config for config in offered(asked, spec)}
    return asked, {configs[name]: us for name, us in row["times"].items() if name in configs}


def speeds_of(row: Row, spec: archs.ArchSpec) -> str:
    """The name of the speeds in a calibration by which the model estimates a row; empty for the common ones."""
    asked = spec_of(result_rows.shape_of(row), spec.num_sms)
    (name,) = {family.speeds(asked) for family in kernels.for_spec(asked, spec)}
    return name


@functools.cache
def _name(config: GemmConfig, asked: GemmSpec, spec: archs.ArchSpec) -> str:
    return name_of(config, asked, spec)


@dataclass
class Data:
    """A survey as tensors: one entry for each pair of a row and a config, or for each row."""

    rows: Sequence[Row]
    x: Features
    log_us: Tensor
    log_lost: Tensor
    """How much slower the pair is than the best of its row, as a logarithm."""
    row: Tensor
    """Index of the pair's row."""
    mode: Tensor
    """For each row, the index in ``modes.LAUNCH_MODES``."""

    @classmethod
    def of(cls, rows: Sequence[Row], spec: archs.ArchSpec) -> Data:
        """The pairs of those survey rows that have two configs or more."""
        kept: list[Row] = []
        x, pairs = [], []
        for row in rows:
            asked, times = timed(row, spec)
            if len(times) < 2:
                continue
            best = min(times.values())
            for config, us in times.items():
                x.append(features(asked, config, spec.name))
                pairs.append((math.log(us), math.log(us / best), len(kept)))
            kept.append(row)
        columns: Any = (torch.tensor(column, dtype=torch.float64) for column in zip(*x, strict=True))
        log_us, log_lost, row_of = torch.tensor(pairs, dtype=torch.float64).T
        mode = torch.tensor([LAUNCH_MODES.index(row["mode"]) for row in kept])
        return cls(kept, Features(*columns), log_us, log_lost, row_of.long(), mode)

    def selected(self, speed: Any) -> Tensor:
        """For each row, the best time over that of the config that ``speed`` selects."""
        estimates = self.estimates(speed)
        least = self._least(estimates)
        chosen = torch.where(estimates == least[self.row], self.log_lost, math.inf)
        return torch.exp(-self._least(chosen))

    def estimates(self, speed: Any) -> Tensor:
        total: Tensor = parts(self.x, speed, _maximum)["total"]
        return total

    def loss(self, speed: Any, softness: float = SOFTNESS[1], hidden: Tensor | None = None) -> Tensor:
        """The time lost by the choices, more for large losses, plus the weighted errors of the estimates. ``hidden``:
        how many us less a launch takes in each of ``modes.LAUNCH_MODES`` than alone."""
        hidden = torch.zeros(len(LAUNCH_MODES), dtype=torch.float64) if hidden is None else hidden
        us, felt = self.estimates(speed), self.log_lost.clamp(max=MOST)
        estimates = torch.log(us)
        shares = torch.exp((self._least(estimates.detach())[self.row] - estimates) / softness)
        lost = self._mean(felt, shares)
        near = torch.exp(-DECAY * self.log_lost)
        errors = torch.log(torch.clamp(us - hidden[self.mode][self.row], min=SHORTEST_US)) - self.log_us
        together = self._mean(errors, near)
        order = self._mean(_size(errors - together[self.row]), near)
        wrong = ORDER_WEIGHT * order + ACCURACY_WEIGHT * _size(together)
        return (lost + LARGE_WEIGHT * torch.clamp(lost - LARGE, min=0) + wrong).mean()

    def _least(self, values: Tensor) -> Tensor:
        most = torch.full((len(self.rows),), math.inf, dtype=values.dtype)
        return most.scatter_reduce(0, self.row, values, "amin")

    def _mean(self, values: Tensor, weights: Tensor) -> Tensor:
        none = torch.zeros(len(self.rows), dtype=values.dtype)
        return none.index_add(0, self.row, weights * values) / none.index_add(0, self.row, weights)


def _maximum(one: Tensor, other: Tensor | float) -> Tensor:
    return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype))


def _size(error: Tensor) -> Tensor:
    """The absolute value of an error, smooth at 0."""
    return torch.sqrt(error**2 + 1e-4)


def bounds(sheet: sheets.Sheet, name: str = "") -> dict[str, tuple[float, float]]:
    """The bounds of the constants of a card's speeds called ``name``."""
    if sheet.arch == archs.DEFAULT.name:
        return BOUNDS
    known = default()
    before, after = known.named(name), known.scaled(sheets.for_device("NVIDIA H200"), sheet).named(name)
    moved = {each: getattr(after, each) / getattr(before, each) for each in BOUNDS}
    return {each: (low * moved[each], high * moved[each]) for each, (low, high) in BOUNDS.items()}


def fit(
    data: Data, start: Speed, steps: int | None = None, within: Mapping[str, tuple[float, float]] = BOUNDS
) -> Speed:
    """The constants with the least loss on ``data`` that are ``within`` bounds, searched from ``start``: Adam (Kingma
    and Ba, 2015) on the logit of each constant's place between its bounds. Deterministic."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: with one core busy, two threads took seven times as long
    try:
        return _fit(data, start, STEPS if steps is None else steps, within)
    finally:
        torch.set_num_threads(threads)


def _fit(data: Data, start: Speed, steps: int, within: Mapping[str, tuple[float, float]]) -> Speed:
    low, high = torch.tensor(list(within.values()), dtype=torch.float64).log().T
    known = torch.tensor([math.log(getattr(start, name)) for name in within], dtype=torch.float64)
    # Not from a bound, where the gradient vanishes.
    point = torch.logit(((known - low) / (high - low)).clamp(0.02, 0.98)).requires_grad_()
    hidden = torch.full((len(LAUNCH_MODES) - 1,), HIDDEN_US, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([point, hidden], lr=RATE)
    none = torch.zeros(1, dtype=torch.float64)  # nothing is hidden in single calls

    def constants() -> dict[str, Tensor]:
        values = torch.exp(low + (high - low) * torch.sigmoid(point))
        return dict(zip(within, values, strict=True))

    for step in range(steps):
        done = step / steps
        adam.param_groups[0]["lr"] = RATE * (1 - done)
        adam.zero_grad()
        softness = SOFTNESS[0] * (SOFTNESS[1] / SOFTNESS[0]) ** done
        speed = SimpleNamespace(clock_ghz=start.clock_ghz, **constants())
        data.loss(speed, softness, torch.cat([none, hidden])).backward()
        adam.step()
    found = {name: float(f"{float(value.detach()):.4g}") for name, value in constants().items()}
    return Speed(clock_ghz=start.clock_ghz, **found)


def fit_power(rows: Sequence[dict[str, Any]], spec: archs.ArchSpec) -> tuple[Power, dict[str, float]] | None:
    """The constants of power from rows timed back to back, by least squares of relative errors; the number of pairs and
    the errors' standard deviation. None if there are too few rows, or a constant would not be positive."""
    drawn: list[list[float]] = []
    for row in rows:
        if row["mode"] != "steady":
            continue
        asked, times = timed(row, spec)
        for config, us in times.items():
            drawn.append([part / us for part in draws(asked, config, features(asked, config, spec.name))])
    if len(drawn) < LEAST_PAIRS:
        return None
    matrix = torch.tensor(sorted(drawn), dtype=torch.float64)
    scale = matrix.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
    found = torch.linalg.lstsq(matrix / scale, torch.ones(len(matrix), 1, dtype=torch.float64)).solution[:, 0] / scale
    if not bool((found > 0).all() and found.isfinite().all()):
        return None
    products, *rows_moved, stored, launch = (float(value) for value in found)
    values = (BLOCK_BYTES / products, *(row / products for row in rows_moved), 1 / stored, launch)
    power = Power(*(float(f"{value:.5g}") for value in values))
    return power, {"pairs": len(matrix), "deviation": round(float((matrix @ found - 1).std()), 4)}
