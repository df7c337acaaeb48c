"""The tiles that templates for Hopper offer the selector, of those in their serving sets that fit a spec.

Each rule stands for what the performance model does not know. docs/measurements/rules.md has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...params import GemmConfig
from ...spec import GemmSpec, ceil_div
from .. import groups
from ..features import ctas
from ..template import BYTES

MOST_TOKENS = 64
"""16-bit tiles for few rows of A are offered up to this M. Above, swap-AB tiles of any height are."""

FEW_IN_PARTS = 32
"""Up to this M FP8 has swapped tiles only if K has parts under batch invariance: 16 x 1536 x 7168 in 64x32 tiles took
1.37 of its time without the switch, and one row in swapped tiles 1.12 (H200)."""

SMALL_TILE = 96 * 128
"""Elements of a tile that is not small, see `takes_too_many_rounds`."""

LONG_K = 4096
"""From this K on small tiles of products without groups have one round, see `takes_too_many_rounds`."""

LARGE_F32 = 1 << 22
"""Elements of a large float32 D. To add to one in place, tiles below 128x128 are slower."""

NARROW, WIDE = 32, 128
"""Columns of the narrow FP8 tiles for masked groups, and of the next wider ones; see `masked`."""

SHORT_K = 128
"""Up to this K a batch of 16-bit products has two tiles only, see `short_batch`."""

_LITTLE_PADDING = 1.15


def of_few_rows(spec: GemmSpec, configs: Sequence[GemmConfig], sizes: tuple[int, ...]) -> list[GemmConfig]:
    """The configs for few rows of A whose height suits M; ``sizes`` are the heights in the serving set."""
    if BYTES[spec.a.dtype] > 1 and spec.m > MOST_TOKENS:
        return []
    chosen = suitable(spec.m, sizes)
    return [config for config in configs if config.block_m in chosen]


def of_fp8(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """The FP8 configs to rank, for any scaling, output and grouping."""
    if spec.grouping in groups.ALONG_M:
        filled = half_filled(spec, of_groups(spec, configs))
        return masked(spec, filled) if spec.grouping == "masked" else filled
    return splits_in_one_round(spec, half_filled(spec, configs))


def of_16_bits(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """The 16-bit configs to rank, swap-AB ones too."""
    if spec.grouping in groups.ALONG_M:
        return half_filled(spec, of_groups(spec, configs))
    filled = half_filled(spec, configs)
    if spec.grouping == "batched" and spec.k <= SHORT_K:
        filled = short_batch(filled)
    swap_ab, k_major_a = has_swap_ab_tiles(spec), spec.a.major == "k"
    adds_much = spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.m * spec.n >= LARGE_F32
    found = []
    for c in filled:
        area, splits = c.block_m * c.block_n, c.cluster_k > 1
        if (area < SMALL_TILE or splits) and takes_too_many_rounds(spec, c):
            continue
        if c.swap_ab:
            chosen = swap_ab
        else:
            # Where there are swap-AB tiles of any height, which K-major A allows, only small tiles and parts of K.
            chosen = splits or c.in_turn > 1 or area <= 64 * 128 or not (swap_ab and k_major_a)
            chosen = chosen and not (adds_much and area < 128 * 128)
        if chosen:
            found.append(c)
    return found


def of_groups(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """The configs that products of groups choose from, whatever their sizes; these ship. Tiles of other widths than a
    power of two are for the usual layouts of groups whose sizes are not counted. Narrow ones are for counted groups,
    and wide ones of 16-bit operands for a D that TMA stores."""
    counted = spec.grouping == "masked"
    usual = not counted and spec.d.aligned and spec.b.major == "k"
    wide = spec.d.aligned or BYTES[spec.a.dtype] == 1
    return [
        c
        for c in configs
        if (usual or c.block_n & (c.block_n - 1) == 0)
        and (counted or c.block_n != NARROW)
        and (wide or c.block_n <= WIDE)
    ]


def half_filled(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Drops configs with more than half padding: one with half the height is better."""
    highest = max(64, 2 * (groups.one_group(spec).m if spec.grouping in groups.ALONG_M else spec.m))
    return [config for config in configs if config.block_m <= highest]


def short_batch(configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Two configs for a batch with few blocks of K, such as MLA's queries by the weight of keys: one for few rows and
    one for many. D is most of the bytes then, so that other tiles gain little, and a model needs fewer kernels."""
    two = [c for c in configs if c.cluster_size == 1 and c.tile in ((64, 128), (128, 256))]
    return two or list(configs)


def masked(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Configs for masked groups of FP8: the lowest tiles that hold twice the expected rows, if any do. Groups differ in
    size, and a second tile of a group reads its weights again. Narrow tiles are taken only if wider ones are fewer than
    SMs."""
    low = [config for config in configs if groups.is_low(spec, config)]
    if not low:
        return list(configs)
    height = min(config.block_m for config in low)
    enough = spec.groups * ceil_div(spec.n, WIDE) >= spec.num_sms
    return [c for c in low if c.block_m == height and not (enough and c.block_n == NARROW)]


def rounds(spec: GemmSpec, config: GemmConfig) -> int:
    """Waves of CTAs."""
    return ceil_div(ctas(spec, config), spec.num_sms * config.ctas_per_sm)


def splits_in_one_round(spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Drops FP8 configs that split K and need more than one wave: the model underestimates them."""
    return [config for config in configs if config.cluster_k == 1 or rounds(spec, config) <= 1]


def takes_too_many_rounds(spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether a 16-bit config with a small tile, or split K, needs too many waves. CTAs that compute several tiles
    drift apart, so that L2 answers each of them alone, and small tiles wait for it. A longer K makes that worse. The
    model does not know it."""
    long = spec.k >= LONG_K and spec.grouping == "none"
    return spec.m > MOST_TOKENS and rounds(spec, config) > (1 if config.cluster_k > 1 or long else 3)


def has_swap_ab_tiles(spec: GemmSpec) -> bool:
    """They store 16-bit products by TMA, and few rows of A have a kernel of their own."""
    alone = spec.grouping == "none" and spec.accumulate == "none"
    return alone and spec.m > MOST_TOKENS and spec.d.dtype == spec.a.dtype and spec.d.aligned


@functools.lru_cache(maxsize=1024)
def suitable(m: int, sizes: tuple[int, ...]) -> frozenset[int]:
    """The sizes of tiles that suit ``m`` tokens. Few tokens need the smallest tile that holds them, so that weights are
    read once. More tokens need tiles with little padding. ``sizes`` are those of the serving set, in rising order."""
    if m <= sizes[-1]:
        return frozenset([next(size for size in sizes if size >= m)])
    rows = {size: ceil_div(m, size) * size for size in sizes if size >= 32 or size == sizes[-1]}
    most = min(rows.values()) * _LITTLE_PADDING
    return frozenset(size for size, padded in rows.items() if padded <= most)
