"""Which 16-bit configs are offered: rules that precede the model."""

from __future__ import annotations

from ..params import HalfConfig
from ..spec import GemmSpec, ceil_div
from .swapped import MOST_TOKENS

SMALL_TILE = 96 * 128
"""Elements of a tile that is not small, see `drifts`."""

LONG_K = 4096
"""From this K on small tiles of products without groups have one round, see `drifts`."""


def padded(m: int, config: HalfConfig) -> bool:
    """Whether more than half of a tile is padding, where there are ``m`` rows of A."""
    return config.block_m > max(64, 2 * m)


def drifts(spec: GemmSpec, config: HalfConfig) -> bool:
    """Whether a config with small tiles, or split K, would take so many rounds that others are better. CTAs that
    compute several tiles one after the other drift apart, so that L2 answers each of them alone, and small tiles then
    wait for it: the longer K is, the more. The model does not know that. In 369 products of more than 64 rows of A, no
    such config was the best (H100)."""
    tiles = ceil_div(spec.m, config.block_m) * ceil_div(spec.n, config.block_n) * config.k_splits
    rounds = ceil_div(tiles, spec.num_sms * config.ctas_per_sm)
    small = config.block_m * config.block_n < SMALL_TILE
    long = spec.k >= LONG_K and spec.grouping == "none"
    few = 1 if config.k_splits > 1 or long else 3
    return spec.m > MOST_TOKENS and (small or config.k_splits > 1) and rounds > few


def for_small_outputs(config: HalfConfig) -> bool:
    """Whether a config suits small outputs: it has a small tile, or splits K."""
    return config.k_splits > 1 or config.block_m * config.block_n <= 64 * 128


def turns(spec: GemmSpec) -> bool:
    """Whether the kernel with operands swapped and large tiles computes ``spec``, and is worthwhile: it stores 16-bit
    products by TMA, and few rows of A have a kernel of their own."""
    alone = spec.grouping == "none" and spec.accumulate == "none"
    return alone and spec.m > MOST_TOKENS and spec.d.dtype == spec.a.dtype and spec.d.aligned
