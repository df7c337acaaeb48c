"""How long a config takes where power is the limit.

With its tensor cores at work an H200 lowers its clock until it draws 700 W. Which SM idles when no longer matters
then, only what all of the work draws: products, what they read from shared memory, what is written there, and what L2
is asked for; and what none of it hides: D, a launch, and sums that CTAs give each other. Timed back to back, 53 pairs
of a config and a shape of 30 GFLOP and more took what a sum of these says within 1.5% (standard deviation, K from 512
to 16384), and five random shapes that it was not fitted to within 2.5%. It says 8% too little of one whose rows begin
inside sectors, and 17% of one whose tiles have tokens past their slices. Of twelve random shapes of 20 to 90 GFLOP it
says 7% too little, more or less by 5.5%. With what HBM moves, rows that begin inside lines, SMs that wait for the last
tiles of others, and a part more for products that are dealt out, a sum fits these within 2%, and chose no better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kernels.features import Features
from ..params import GemmConfig
from ..spec import GemmSpec, ceil_div
from .constants import Constants

ROW_BYTES = 128
BLOCK_K = 128
"""What is counted is counted for a block of so much of K."""


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
    stored_per_us: float
    """Elements of D."""
    launch_us: float


def draws(spec: GemmSpec, config: GemmConfig, x: Features) -> tuple[float, ...]:
    """What each constant of `Power` is multiplied with, or divides: products, rows read, filled and asked for, in
    blocks of 128 products; elements of D; and a launch."""
    tiles = ceil_div(spec.m, config.block_m * config.cluster_m) * config.cluster_m
    tiles *= ceil_div(spec.n, config.block_n * config.cluster_n) * config.cluster_n
    blocks = tiles * ceil_div(spec.k, BLOCK_K)
    return (
        float(blocks * config.block_m * config.block_n),
        blocks * x.read / ROW_BYTES,
        blocks * x.filled / ROW_BYTES,
        blocks * x.asked,
        float(spec.m * spec.n),
        1.0,
    )


def sustained_us(spec: GemmSpec, config: GemmConfig, x: Features, power: Power) -> float:
    """The time of a launch among many back to back, if power is what limits them. ``x`` are the pair's features."""
    products, read, filled, asked, stored, launches = draws(spec, config, x)
    moved = power.read_row * read + power.filled_row * filled + power.asked_row * asked
    drawn = (products + moved) * BLOCK_K / power.products_per_us
    return drawn + stored / power.stored_per_us + power.launch_us * launches
