"""Rasterisation: the order in which a launch computes its tiles. What was measured is in docs/measurements/rules.md."""

from __future__ import annotations

import functools
import math

from ..params import GemmConfig
from ..records import record
from ..spec import ceil_div

_LONE_GROUP = 6
"""Up to this many rows of tiles form a single group."""

_NEIGHBOURS = 16
"""Consecutive CTAs that run in one GPC, which has 16 or 18 SMs on an H200. A GPC requests a line once from L2 for all
of its SMs: 4 x 4 tiles need 8 rows or columns of operands, 16 x 1 tiles need 17."""

_COUNTED_WAVES = 16
"""Launches of up to this many waves get the order that reads the fewest bytes, by counting them. Counting takes 1 to
5 ms, once for each number of tiles."""

KEPT_BYTES = 30_000_000
"""Bytes that stay in L2 until they are used again. An H200 has 50 MB, but each half of the chip keeps its own copy of
lines that both halves read. An LRU cache of this size predicts the bytes that launches read from HBM."""


@record(frozen=True)
class Raster:
    """An order of tiles: bands of ``band`` cluster tiles along n and all ``rows`` along m; in a band groups of
    ``height`` rows; in a group m first. The last band and the last group may be smaller (see ``raster.cuh``)."""

    rows: int
    columns: int
    band: int
    height: int
    evict_b: bool = False
    """Whether B, which is read once, would evict A from L2 if it were not loaded with evict-first."""

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """The kernel's arguments: rows, columns, band, and then each number that it divides by, as `divisor` returns
        it: the rows of the last group and of a whole group, the tiles of a whole band, and the tiles of a group in a
        whole band and in the last band."""
        last_band = self.columns - (ceil_div(self.columns, self.band) - 1) * self.band
        last_height = self.rows - (ceil_div(self.rows, self.height) - 1) * self.height
        return (
            *(self.rows, self.columns, self.band),
            *divisor(last_height),
            *divisor(self.height),
            *divisor(self.band * self.rows),
            *divisor(self.band * self.height),
            *divisor(last_band * self.height),
        )


def divisor(value: int) -> tuple[int, int, int]:
    """``value``, and a factor and a shift with x // value == (2 * x * factor >> 32) >> shift for any x < 2**31. From
    Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994."""
    shift = (value - 1).bit_length()
    return value, ceil_div(1 << (31 + shift), value), shift


@functools.lru_cache(maxsize=1024)
def raster(config: GemmConfig, m: int, n: int, k: int, num_sms: int) -> Raster:
    """The order in which a launch computes its tiles.

    If one operand stays in L2, the other one is read once, in strips. A strip is as narrow as makes consecutive CTAs
    read the least.

    If neither stays, a wave of C clusters that covers w columns of tiles reads w B-tiles and C / w A-tiles. The fewest
    bytes are read at w = sqrt(C * cluster rows / cluster columns). Waves do not end where bands and groups end. So the
    bytes of all waves are counted for bands of about that width and groups up to the height that suits consecutive
    CTAs, and the order with the fewest bytes is taken. If bytes are not counted, bands are equally wide, so that the
    last band is not narrow.

    An operand stays in L2 if it fits there together with the part of the other that a wave reads. A also stays if B is
    loaded with evict-first. Such parts of B are sometimes evicted before the last CTA has read them, so this pays only
    if a wave reads much. A is never loaded with evict-first: that was slower.

    The result is cached, because it does not depend on addresses."""
    rows, columns = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    each = config.cluster_m  # rows of tiles in a row of cluster tiles
    clusters = min(num_sms * config.ctas_per_sm // config.cluster_size, tiles_m * tiles_n)
    few, kept = tiles_m * each <= _LONE_GROUP, min(m, n) * k
    if kept <= KEPT_BYTES and not few and clusters < tiles_m * tiles_n:
        together = _NEIGHBOURS // config.cluster_size
        wave = (ceil_div(clusters, tiles_m) * columns if m <= n else ceil_div(clusters, tiles_n) * rows) * k
        fits = kept + wave <= KEPT_BYTES
        if m <= n and (fits or 2 * wave > KEPT_BYTES):
            return Raster(tiles_m, tiles_n, min(_narrowest(together, columns, rows), tiles_n), 1, not fits)
        if m > n and fits:
            return Raster(tiles_m, tiles_n, tiles_n, min(_narrowest(together, rows, columns), tiles_m))
    best = max(1.0, math.sqrt(clusters * rows / columns), clusters / max(tiles_m, 1))
    band = max(1, ceil_div(tiles_n, max(1, round(tiles_n / best))))
    height = tiles_m if few else max(1, math.isqrt(_NEIGHBOURS) // each)
    if few or not clusters < tiles_m * tiles_n <= _COUNTED_WAVES * clusters:
        return Raster(tiles_m, tiles_n, band, height)
    near = range(min(tiles_n, max(1, int(best * 0.7))), min(tiles_n, int(best * 1.5)) + 1)
    heights = [1 << power for power in range(height.bit_length())]
    return Raster(tiles_m, tiles_n, *_least_read(tiles_m, tiles_n, clusters, rows, columns, near, tuple(heights)))


@functools.lru_cache(maxsize=256)
def _least_read(
    tiles_m: int, tiles_n: int, clusters: int, rows: int, columns: int, bands: range, heights: tuple[int, ...]
) -> tuple[int, int]:
    """The width of bands and the height of groups with which waves read the fewest bytes."""
    orders = [(band, height) for height in heights for band in bands]
    return min(orders, key=lambda order: _read(tiles_m, tiles_n, order[0], order[1], clusters, rows, columns))


def _read(tiles_m: int, tiles_n: int, band: int, height: int, clusters: int, rows: int, columns: int) -> int:
    """Rows of A and B that all waves read with such an order of tiles of ``rows`` x ``columns``. A wave reads the rows
    of its tiles once."""
    total, left, wanted_m, wanted_n = 0, clusters, 0, 0  # of the current wave: tiles left, and bits of rows and columns
    for first in range(0, tiles_n, band):
        wide = min(band, tiles_n - first)
        for top in range(0, tiles_m, height):
            high = min(height, tiles_m - top)
            at, end = 0, wide * high
            while at < end:
                stop = min(end, at + left)
                begin_n, last_n = at // high, (stop - 1) // high
                wanted_n |= ((2 << last_n - begin_n) - 1) << first + begin_n
                for row in range(at, min(stop, at + high)):
                    wanted_m |= 1 << top + row % high
                left -= stop - at
                at = stop
                if left == 0:
                    total += wanted_m.bit_count() * rows + wanted_n.bit_count() * columns
                    left, wanted_m, wanted_n = clusters, 0, 0
    return total + wanted_m.bit_count() * rows + wanted_n.bit_count() * columns


def _narrowest(together: int, across: int, along: int) -> int:
    """The width of a strip, in tiles of ``across`` x ``along`` rows of operands, with which ``together`` consecutive
    tiles read the fewest rows."""
    widths = [1 << power for power in range(together.bit_length())]
    return min(widths, key=lambda width: width * across + ceil_div(together, width) * along)
