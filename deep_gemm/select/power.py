"""How long a config takes where power is the limit.

With its tensor cores at work an H200 lowers its clock until it draws 700 W. Which SM idles when no longer matters
then, only what all of the work draws: products, what they read from shared memory, what is written there, and what L2
is asked for. Timed back to back, 30 pairs of a shape and a config took what a sum of these says within 1% (standard
deviation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..params import SCALE_BLOCK, FP8Config, GemmProblem, ceil_div
from .constants import Constants
from .features import Features

ROW_BYTES = 128


@dataclass(frozen=True)
class Power(Constants):
    """Constants of one GPU model, fitted to launches timed back to back. What is moved counts as the products that draw
    as much."""

    WHAT: ClassVar[str] = "A calibration's part about power"

    products_per_us: float
    """Multiplications of two elements, each with its addition, if nothing else drew power."""
    read_row: float
    """Reading a row of 128 bytes from shared memory, in blocks of 128 products."""
    filled_row: float
    """Writing one there that comes from L2."""
    asked_row: float
    """Asking L2 for one, which CTAs of a cluster may share."""
    dealt: float
    """Dealing out blocks of K over CTAs, as a part of all products."""


def draws(problem: GemmProblem, config: FP8Config, x: Features) -> tuple[float, float, float, float, float]:
    """What each constant of `Power` is multiplied with, in blocks of 128 products: products, rows read, filled and
    asked for, and the products of which a part is due where blocks of K are dealt out."""
    tiles = ceil_div(problem.m, config.block_m * config.cluster_m) * config.cluster_m
    tiles *= ceil_div(problem.n, config.block_n * config.cluster_n) * config.cluster_n
    blocks = tiles * ceil_div(problem.k, SCALE_BLOCK)
    dealt = problem.m * problem.n * problem.k / SCALE_BLOCK if config.stream_k else 0.0
    return (
        float(blocks * config.block_m * config.block_n),
        blocks * x.read / ROW_BYTES,
        blocks * x.filled / ROW_BYTES,
        blocks * x.asked,
        dealt,
    )


def sustained_us(problem: GemmProblem, config: FP8Config, x: Features, power: Power) -> float:
    """The time of a launch among many back to back, if power is what limits them. ``x`` are the pair's features."""
    products, read, filled, asked, dealt = draws(problem, config, x)
    moved = power.read_row * read + power.filled_row * filled + power.asked_row * asked
    drawn = products + moved + power.dealt * dealt
    return drawn * SCALE_BLOCK / power.products_per_us
