"""Grouped GEMMs: the table of groups in a CTA's shared memory, and the order of tiles (see ``groups.cuh``); and parts
of K of products that are summed (see ``parts_in_order.cuh`` and ``parts_together.cuh``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedError
from ..params import GemmConfig
from ..spec import GemmSpec, Grouping, align, ceil_div
from .base import Strides
from .features import Features
from .gemm_features import PACKING
from .raster import divisor, raster

LEAST_SEGMENTS, MOST_SEGMENTS = 32, 2048
"""Sizes of the table are powers of two."""

ALONG_M: tuple[Grouping, ...] = ("contiguous", "psum", "masked")
"""Forms of groups along M."""

WITH_TABLE = frozenset({*ALONG_M, "k"})
"""Forms of groups whose sizes are on the device. Others have groups of equal size."""

MOST_COLUMNS = 1 << 18
"""Columns of tiles: with more of them the device's quotient of floats could be off by one."""

FEW_ROWS = 32
"""Rows of a box of A in tiles of 64 rows, which are for groups of few rows."""

_FEW_TILES, _ONE_ROW, _LOW = 16, 1.35, 4
_HELD_IN_L2, _HELD_BESIDE_D = 64 << 20, 24 << 20
"""Tiles of a CTA, rows of tiles of a group, and bytes of B up to which padding is skipped: see `skips_padding`, and
docs/measurements/rules.md."""

_BYTES = {"e4m3": 1, "bf16": 2, "f16": 2}

_STRIP = 16
"""Rows of tiles in a strip."""
_CHUNK_BYTES = 1024
"""Bytes of row labels that a CTA scans at a time."""

MOST_SUMS = 128 * 128
"""Sums of a part of K that a CTA writes to memory, at most. So memory of one size is enough for every config."""

_WORD_BYTES = 128
"""Memory of the word that counts a tile's parts, which are two or more: so tiles are half of the SMs at most."""

_MORE_BYTES = 16 * 256
"""Memory of a part beside its sums, since slices of tiles are of equal size: see parts_together.cuh."""

_LEAST_BLOCKS = 4
"""Blocks of K in a part of a product with swapped operands: what a part costs beside them is little then."""
FEW_TOKENS, _LEAST_BLOCKS_OF_WARPS, _LEAST_PARTS = 16, 6, 3
"""Rows of tiles whose warps have blocks of K of their own; blocks of four such warps in a part, at least; and parts, if
there are several. Then they take one CTA on each SM. Their meeting takes longer than what more CTAs gain, and two parts
were slower than one on an H200 in five shapes of five."""
_MEETING_US = 1.2
"""What parts of products with few rows take to meet in memory: 1.1 to 1.5 us on an H200."""
_SUMS_MEET_US, _SUM_US, _ADD_US, _ALONE = 2.0, 1.5e-4, 0.03, 1.5
"""What parts of summed products take to meet, for one of a CTA's sums to be written and copied, and for a lane to add
two; and how much a byte counts that each CTA reads from L2. Of the times of six configs on 37 sizes, 28 of them
drawn, on an H200."""
_MOST_PARTS = 255
"""Parts that are counted in a byte."""

_COLUMNS_IN_PARTS, _LEAST_PART, _TILE_IN_PARTS = {1: (1152, 2304), 2: (1536, 2304)}, 512, 128
"""See `parts_of_k`: by the bytes of an element, up to how many columns K has four parts, and two; elements of a part,
at least; and a multiple of rows and columns of some tiles that have parts."""
IN_TURN = (2, 4)
"""Parts of K that a CTA may sum one after the other."""

_AHEAD = 32768
"""Bytes of B that a CTA prefetches while sizes are read."""

_MOST_EVICTED, _EVICT_START_B = 250_000_000, 4
"""Bytes of B up to which it is loaded with evict-first, and the bit of a launch for first tiles; see `evict_first`."""


def segments(grouping: str, groups: int) -> int:
    """Entries of the table: one for each group. Where rows have labels, padding may lie inside a group, which then has
    several entries: two on average. Without a table the least number. Raises UnsupportedError for too many groups."""
    wanted = (groups if grouping in WITH_TABLE else 0) * (2 if grouping == "contiguous" else 1)
    if wanted > MOST_SEGMENTS:
        most = MOST_SEGMENTS * groups // wanted
        raise UnsupportedError(f"{groups} groups are more than {most}, the most in this form.")
    return max(LEAST_SEGMENTS, 1 << (wanted - 1).bit_length())


def table_bytes(grouping: str, entries: int) -> int:
    """Shared memory of the table: three words for each entry, or four for labels, and one more."""
    if grouping not in WITH_TABLE:
        return 0
    labels = grouping == "contiguous"
    return align(((4 if labels else 3) * entries + 1) * 4 + (_CHUNK_BYTES if labels else 0), 128)


def order(config: GemmConfig, n: int, skips: bool, ahead: int = 0, pace: int = 0) -> Sequence[int]:
    """The kernel's argument ``raster``: columns of tiles, whether padding is skipped, blocks of B that are prefetched
    and their `pace`, and what it divides by."""
    columns = ceil_div(n, config.block_n)
    if columns > MOST_COLUMNS:
        raise UnsupportedError(f"N = {n} is more than {MOST_COLUMNS} tiles of {config.block_n} columns.")
    return [columns, int(skips), ahead, pace, *divisor(columns), *divisor(columns * _STRIP)]


def blocks_ahead(spec: GemmSpec, config: GemmConfig) -> int:
    """Blocks of B that are prefetched while sizes are read. With masked groups only if each is expected to have one row
    of tiles."""
    if spec.grouping == "masked" and not is_low(spec, config):
        return 0
    row_bytes = config.block_k * _BYTES[spec.b.dtype]
    return min(_AHEAD // (config.block_n * row_bytes), ceil_div(spec.k, config.block_k))


def pace(spec: GemmSpec, config: GemmConfig) -> int:
    """65536 divided by the rows of tiles that a group has if all have as many, or by one if that is less."""
    rows = expected(spec, config).m // config.block_m
    return ceil_div(min(rows, spec.groups) << 16, rows)


def is_low(spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether masked groups have one row of tiles each, even with twice the expected rows."""
    return spec.grouping == "masked" and 2 * one_group(spec).m <= config.block_m


def skips_padding(spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether tiles with few rows are shorter than others. Then CTAs that read the same columns of B drift apart. That
    does no harm if most groups have one row of tiles. Otherwise it pays where groups are low, so that much is padding,
    and the columns of B that are in use stay in L2 for as long as a tile takes. Masked groups, whose last tiles are not
    written whole, gain more: also if there are few tiles for each CTA."""
    counted = spec.grouping == "masked"
    rows, columns = expected(spec, config).m // config.block_m, ceil_div(spec.n, config.block_n)
    harmless = rows * columns <= _FEW_TILES * spec.num_sms if counted else rows <= _ONE_ROW * spec.groups
    if harmless:
        return True
    in_use = ceil_div(spec.num_sms * spec.groups, rows) * config.block_n * spec.k * _BYTES[spec.b.dtype]
    return rows <= _LOW * spec.groups and in_use <= (_HELD_IN_L2 if counted else _HELD_BESIDE_D)


def rows_of_tiles(spec: GemmSpec, config: GemmConfig) -> int:
    """The most rows of tiles that a call can have, whatever the sizes of its groups."""
    if spec.grouping == "masked":
        return spec.groups * ceil_div(spec.m, config.block_m)
    return ceil_div(spec.m, config.block_m)


def expected(spec: GemmSpec, config: GemmConfig) -> GemmSpec:
    """A spec without groups that is about as much work. Rows of each masked group are rounded up to whole tiles. In
    other forms M has the padding up to the alignment. Of tiles that are lower, half of those that a group could do
    without are left out."""
    if spec.grouping == "masked":
        return replace(one_group(spec), m=spec.groups * align(one_group(spec).m, config.block_m))
    tiles, spare = ceil_div(spec.m, config.block_m), max(0, spec.alignment // config.block_m - 1)
    most = min(spec.groups, ceil_div(spec.m, spec.alignment))  # groups that have rows
    tiles = max(tiles - most * spare // 2, ceil_div(tiles, 1 + spare))
    return replace(one_group(spec), m=tiles * config.block_m)


def evict_first(spec: GemmSpec, config: GemmConfig) -> int:
    """The operands that are loaded with evict-first, as in `loads.evict_first`: B if it has not too many bytes. L2 then
    keeps what others wrote, instead of writing it back while B is read (docs/measurements/rules.md). Of masked groups B
    has the policy if each has one row of tiles, even with twice the expected rows. In other forms only B of each CTA's
    first tile has it: CTAs start together, so several rows of tiles read it at the same time."""
    if spec.groups * spec.n * spec.k * _BYTES[spec.b.dtype] > _MOST_EVICTED:
        return 0
    return int(is_low(spec, config)) if spec.grouping == "masked" else _EVICT_START_B


def a_rows(grouping: str, dtype: str, config: GemmConfig) -> int:
    """Rows of a box of A; 0 for all of a tile. A tile loads the boxes that begin before its group's end; where rows
    have labels, all that one consumer multiplies, because the product of padding is written."""
    if grouping not in ALONG_M:
        return 64 if grouping == "k" and dtype == "e4m3" else 0
    return FEW_ROWS if config.block_m == 64 and grouping != "contiguous" else 64


def along_m_values(spec: GemmSpec, config: GemmConfig, strides: Strides) -> dict[str, Any]:
    """Values of the parameters that all families with groups along M have."""
    return _COMMON | {
        "last_rows": config.block_m,
        "last_columns": config.block_n,
        "groups": spec.groups,
        "raster": order(config, spec.n, skips_padding(spec, config), blocks_ahead(spec, config), pace(spec, config)),
        "d_stride": strides["d"][0],
        "alignment": spec.alignment,
        "evict_first": evict_first(spec, config),
    }


_COMMON = {"early_stages": 0, "evict_first": 0}
"""Grouped kernels have no edge boxes, and load nothing before the previous kernel has ended."""


def along_m_ctas(spec: GemmSpec, config: GemmConfig) -> int:
    """One CTA for each SM, or fewer if there cannot be as many tiles."""
    return min(rows_of_tiles(spec, config) * ceil_div(spec.n, config.block_n), spec.num_sms)


def one_group(spec: GemmSpec) -> GemmSpec:
    """A spec of the rows that are expected in one group."""
    each = spec.m if spec.grouping == "batched" else ceil_div(spec.m, spec.groups)
    rows = min(spec.expected_m or spec.m, spec.m) if spec.grouping == "masked" else each
    return replace(spec, m=max(rows, 1), grouping="none", groups=1)


def with_weights(found: Features, spec: GemmSpec, element_bytes: int) -> Features:
    """``found``, with the bytes of all groups' weights instead of those of one."""
    return found._replace(traffic=found.traffic + (spec.groups - 1) * spec.n * spec.k * element_bytes)


def along_k_values(spec: GemmSpec, config: GemmConfig, strides: Strides, element_bytes: int) -> dict[str, Any]:
    """Values of the parameters that all families with groups along K have. d and c have three strides."""
    each = max(1, spec.k // spec.groups) * element_bytes
    inside = raster(config, spec.m, spec.n, each, spec.num_sms)
    c = {"c_stride": strides["c"][1], "c_stride_g": strides["c"][0]} if "c" in strides else {}
    return _COMMON | {
        "last_rows": config.block_m,
        "last_columns": config.block_n,
        "groups": spec.groups,
        "raster": [*divisor(_tiles(spec, config)), *inside.arguments],
        "d_stride": strides["d"][1],
        "d_stride_g": strides["d"][0],
        **c,
    }


def along_k_ctas(spec: GemmSpec, config: GemmConfig) -> int:
    """One CTA for each SM, or fewer if there are fewer tiles."""
    return min(_tiles(spec, config) * spec.groups, spec.num_sms)


def one_product(spec: GemmSpec, config: GemmConfig, least_k: int) -> GemmSpec:
    """A spec without groups of as many tiles, with one group's part of K."""
    each = max(least_k, spec.k // spec.groups)
    return replace(spec, m=spec.groups * align(spec.m, config.block_m), k=each, grouping="none", groups=1)


def _tiles(spec: GemmSpec, config: GemmConfig) -> int:
    return ceil_div(spec.m, config.block_m) * ceil_div(spec.n, config.block_n)


def parts(config: GemmConfig, spec: GemmSpec) -> int:
    """The number of parts that K is cut into: as many as fill the GPU with clusters, if each CTA has enough blocks of K
    then. 1 for a config without parts."""
    if not config.parts:
        return 1
    size, blocks = config.cluster_size, ceil_div(spec.k, config.block_k)
    if config.block_m <= FEW_TOKENS:
        blocks_of_warps = blocks // (_LEAST_BLOCKS_OF_WARPS * config.num_consumers)
        found = min(spec.num_sms // _tiles(spec, config), blocks_of_warps, _MOST_PARTS)
        return found if found >= _LEAST_PARTS else 1
    least = _LEAST_BLOCKS if config.swap_ab else 1
    tiles = ceil_div(spec.m, config.block_m * config.cluster_m) * ceil_div(spec.n, config.block_n * config.cluster_n)
    room = int(PACKING[size] * spec.num_sms * config.ctas_per_sm / size) // tiles
    return max(1, min(room, blocks // (config.cluster_k * least), _MOST_PARTS))


def parts_of_k(spec: GemmSpec) -> int:
    """Parts in which K of one product is summed under batch invariance: the sums of each begin at zero, and are added
    in order. It depends on everything but M. It is 1 unless all kernels for the spec have configs with parts."""
    if not spec.batch_invariant or spec.grouping != "none" or spec.epilogue.is_gated:
        return 1
    if spec.a.dtype == "e4m3":
        split = spec.scaling == "1d2d" and spec.d.dtype == "bf16" and spec.accumulate == "none"
    else:
        split = spec.a.dtype in ("bf16", "f16")
    if not split or any(_TILE_IN_PARTS % multiple for multiple in spec.block_multiple):
        return 1
    four, two = _COLUMNS_IN_PARTS[_BYTES[spec.a.dtype]]
    found = 4 if spec.n <= four else 2 if spec.n <= two else 1
    while found > 1 and spec.k < found * _LEAST_PART:
        found //= 2
    return found


def memory_of_sums(spec: GemmSpec) -> int:
    """The memory that parts of K of summed products need for ``spec``, at most; 0 if no config has two parts or
    more."""
    if spec.batch_invariant or 2 * spec.m * spec.n > spec.num_sms * MOST_SUMS:
        return 0
    return 128 + spec.num_sms * (_WORD_BYTES // 2 + MOST_SUMS * 4 + _MORE_BYTES)


def in_parts(counted: Callable[[GemmSpec], Features], spec: GemmSpec, config: GemmConfig, alone: bool) -> Features:
    """The inputs of the performance model for a config with parts: those of a product with one part of K, and the tiles
    of all parts. ``counted`` returns the inputs for a spec. The last cluster of a tile exchanges sums once more,
    also if its part is the only one and ``alone`` is true."""
    count = parts(config, spec)
    whole = counted(spec)
    if count == 1 and not alone:
        return whole
    each = counted(replace(spec, n=count * align(spec.n, config.block_n), k=ceil_div(spec.k, count)))
    return each._replace(
        traffic=max(0.0, whole.traffic + whole.first - each.first),
        prologue_us=each.prologue_us + (_MEETING_US if config.swap_ab else 0.0),
        exchanges=each.exchanges + 1,
        exchanged=each.exchanged + count * config.block_m * config.block_n / config.cluster_size,
    )


def summed(counted: Callable[[GemmSpec], Features], spec: GemmSpec, config: GemmConfig) -> Features:
    """`Features` of products that are summed. CTAs that read the same rows drift apart, so that L2 answers each of them
    alone. If K has parts, all CTAs of a tile add them, after they have met."""
    if not config.parts:
        whole = counted(spec)
        return whole._replace(from_l2=_ALONE * whole.from_l2)
    count = parts(config, spec)
    whole, k = counted(spec), ceil_div(spec.k // config.block_k, count) * config.block_k
    each = counted(replace(spec, n=count * align(spec.n, config.block_n), k=k))
    tiles, area = _tiles(spec, config), config.block_m * config.block_n
    added = max(count, area / (2 * 128 * config.num_consumers))  # pairs of sums, by the busiest lane
    met = _SUMS_MEET_US + area * _SUM_US + added * _ADD_US
    return each._replace(
        traffic=max(0.0, whole.traffic + whole.first - each.first),
        from_l2=_ALONE * _BYTES[spec.a.dtype] * spec.k * tiles * (config.block_m + config.block_n),
        elements=0.0,
        prologue_us=each.prologue_us + met,
    )
