"""The time of a GEMM with a config, where power is the limit.

When its tensor cores are busy, an H200 lowers its clock until it draws 700 W. Then it no longer matters which SM idles
when, only how much energy the work takes: products, their reads from shared memory, writes into it, and requests to L2.
These do not hide storing D, the launch, and the sums of a split-K exchange. The model is a sum of these terms.
docs/measurements/rules.md says how good it is.
"""

from __future__ import annotations

from ..kernels import groups
from ..kernels.features import Features
from ..params import GemmConfig
from ..records import record
from ..spec import GemmSpec, ceil_div

ROW_BYTES = 128
BLOCK_BYTES = 128
"""Counts are for a block of this many bytes of each row of K."""
KNOWN_BYTES = 1
"""Bytes of the elements that the constants were fitted to. No 16-bit operands were timed back to back."""


@record(frozen=True)
class Power:
    """Constants of one GPU model, fitted to launches timed back to back. Moving a row is counted in products that draw
    as much power."""

    products_per_us: float
    """Multiply-adds of eight-bit elements a microsecond, if nothing else drew power. Of 16-bit ones half as many are
    assumed."""
    read_row: float
    """Reading a row of 128 bytes from shared memory, in units of 128 products."""
    filled_row: float
    """Writing a row from L2 into shared memory."""
    requested_row: float
    """Requesting a row from L2, which CTAs of a cluster may share."""
    stored_per_us: float
    """Elements of D that are stored a microsecond."""
    launch_us: float


def draws(spec: GemmSpec, config: GemmConfig, x: Features) -> tuple[float, ...]:
    """The factor of each constant of `Power`. Not all padding of groups is multiplied; see `groups.expected`."""
    m = groups.expected(spec, config).m if spec.grouping in ("contiguous", "psum") else spec.m
    tiles = ceil_div(m, config.block_m * config.cluster_m) * config.cluster_m
    tiles *= ceil_div(spec.n, config.block_n * config.cluster_n) * config.cluster_n
    blocks = tiles * ceil_div(spec.k * int(x.element_bytes), BLOCK_BYTES)
    return (
        float(blocks * config.block_m * config.block_n),
        blocks * x.read / ROW_BYTES,
        blocks * x.filled / ROW_BYTES,
        blocks * x.requested,
        float(spec.m * spec.n),
        1.0,
    )


def sustained_us(spec: GemmSpec, config: GemmConfig, x: Features, power: Power) -> float:
    """The time of one launch among many back to back, if power is the limit. ``x`` are the features of the pair."""
    products, read, filled, requested, stored, launches = draws(spec, config, x)
    moved = power.read_row * read + power.filled_row * filled + power.requested_row * requested
    drawn = (products + moved) * BLOCK_BYTES / power.products_per_us
    return drawn + stored / power.stored_per_us + power.launch_us * launches
