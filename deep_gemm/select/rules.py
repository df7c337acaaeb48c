"""The rules that precede the model: which configs it ranks, and with which constants.

Each says what was measured that the model does not know.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..params import GemmConfig
from ..spec import GemmSpec, ceil_div

if TYPE_CHECKING:
    from ..kernels.gemm import GemmFamily

MOST_TOKENS = 64
"""16-bit tiles for few rows of A are offered up to this M. Above, swap-AB tiles of any height are."""

SMALL_TILE = 96 * 128
"""Elements of a tile that is not small, see `takes_too_many_rounds`."""

LONG_K = 4096
"""From this K on small tiles of products without groups have one round, see `takes_too_many_rounds`."""

LARGE_F32 = 1 << 22
"""Elements of a large float32 D. To add to one in place, tiles below 128x128 took 4 to 40% longer."""

NARROW = 32
"""Columns of FP8 tiles for groups of few rows; see `serving.FP8_GROUPED`."""

_LITTLE_PADDING = 1.15


def worthwhile(family: GemmFamily, spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether the model ranks ``config``; False where another config is known to be better."""
    from ..kernels import groups  # here: a process whose kernels are all known ranks none

    along_m = spec.grouping in ("contiguous", "psum", "masked")
    wide = spec.a.dtype != "e4m3"
    if family.rules.few_tokens:
        return not (wide and spec.m > MOST_TOKENS) and suits(spec.m, config.block_m, _sizes(family))
    if not wide and family.rules.scales_have_edges:
        return True
    if is_padded(groups.one_group(spec).m if along_m else spec.m, config):
        return False
    if along_m:
        return wide or config.block_n == NARROW or not groups.is_low(spec, config)
    if not wide:
        return True
    if takes_too_many_rounds(spec, config):
        return False
    if config.swap_ab:
        return has_swap_ab_tiles(spec)
    adds_much = spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.m * spec.n >= LARGE_F32
    if adds_much and config.block_m * config.block_n < 128 * 128:
        return False
    # Where there are swap-AB tiles of any height, which K-major A allows, only small tiles and split K.
    small = config.k_splits > 1 or config.block_m * config.block_n <= 64 * 128
    return small or not (has_swap_ab_tiles(spec) and spec.a.major == "k")


def is_padded(rows: int, config: GemmConfig) -> bool:
    """Whether more than half of a tile is padding. Then a config with half the height is better."""
    return config.block_m > max(64, 2 * rows)


def takes_too_many_rounds(spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether a 16-bit config with small tiles, or split K, would take so many rounds that others are better. CTAs that
    compute several tiles one after the other drift apart, so that L2 answers each of them alone, and small tiles then
    wait for it: the longer K is, the more. The model does not know that. In 369 products of more than 64 rows of A, no
    such config was the best (H100)."""
    tiles = ceil_div(spec.m, config.block_m) * ceil_div(spec.n, config.block_n) * config.k_splits
    rounds = ceil_div(tiles, spec.num_sms * config.ctas_per_sm)
    small = config.block_m * config.block_n < SMALL_TILE
    long = spec.k >= LONG_K and spec.grouping == "none"
    few = 1 if config.k_splits > 1 or long else 3
    return spec.m > MOST_TOKENS and (small or config.k_splits > 1) and rounds > few


def has_swap_ab_tiles(spec: GemmSpec) -> bool:
    """Whether large 16-bit swap-AB tiles compute ``spec``, and are worthwhile: they store 16-bit products by TMA, and
    few rows of A have a kernel of their own."""
    alone = spec.grouping == "none" and spec.accumulate == "none"
    return alone and spec.m > MOST_TOKENS and spec.d.dtype == spec.a.dtype and spec.d.aligned


def suits(m: int, block_m: int, sizes: tuple[int, ...]) -> bool:
    """Whether tiles of ``block_m`` tokens suit ``m`` tokens. Few tokens need the smallest tile that holds them, so that
    weights are read once. More tokens need tiles with little padding. ``sizes`` are those of the serving set."""
    if m <= sizes[-1]:
        return block_m == min(x for x in sizes if x >= m)
    rows = {size: ceil_div(m, size) * size for size in sizes if size >= 32}
    return rows.get(block_m, m * 2) <= min(rows.values()) * _LITTLE_PADDING


@functools.cache
def _sizes(family: GemmFamily) -> tuple[int, ...]:
    return tuple(sorted({row[0] for row in family.serving}))


def speeds(spec: GemmSpec) -> str:
    """The name of the speeds in a calibration by which the model estimates ``spec``; empty for the common ones.
    Products that swap-AB tiles can compute have speeds of their own: with those of FP8 the choices there are 1.5%
    worse."""
    return "of 16-bit tiles" if has_swap_ab_tiles(spec) else ""
