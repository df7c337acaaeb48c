"""In which order a launch walks its tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..params import GemmConfig
from ..spec import ceil_div

_LONE_GROUP = 6
"""Rows of tiles that may be one group."""

_NEIGHBOURS = 16
"""CTAs next to each other in the order run in one cluster of SMs, 16 or 18 on an H200, which asks L2 once for a line
that several want: 4 x 4 tiles want 8 rows or columns of operands, 16 x 1 want 17. Loads of 128x128 tiles alone took
15.2 us in such an order and 23.4 in rows there, at M = 512, N = 4096, K = 7168; whole kernels became up to 12% faster,
and 4% at M = 256 and 512."""

_COUNTED_WAVES = 16
"""Of launches up to so many waves long the bytes are counted. That takes 1 to 5 ms, once for each count of tiles."""

KEPT_BYTES = 30_000_000
"""What stays in L2 until it is used again. Of an H200's 50 MB each half of the chip has copies of its own
of what both read: bytes that launches read from HBM are those of one cache of 30 MB that forgets what was used longest
ago (1893 x 30176 x 12800: 1147 MB by such a model, 1213 counted; 4096 x 7168 x 16384: 612 and 622)."""


@dataclass(frozen=True)
class Raster:
    """Bands of ``band`` cluster tiles along n, the last of what is left, through all ``rows`` along m; inside a band
    groups of ``height`` rows, the last of what is left, and m first inside a group (see ``raster.cuh``)."""

    rows: int
    columns: int
    band: int
    height: int
    evict_b: bool = False
    """Whether B, which is gone through once, would push out A if it were not loaded with evict-first."""

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """For the kernel: rows, columns and band, and what it divides by, each with the numbers that ``divisor``
        gives: the rows of the last and of a whole group, the tiles of a whole band, of a group in a whole and in the
        last band."""
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
    """``value``, and a factor and a shift that divide any x < 2**31 by it: (2 * x * factor >> 32) >> shift. From
    Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994."""
    shift = (value - 1).bit_length()
    return value, ceil_div(1 << (31 + shift), value), shift


@functools.lru_cache(maxsize=1024)
def raster(config: GemmConfig, m: int, n: int, k: int, num_sms: int) -> Raster:
    """The order in which a launch walks its tiles.

    Where an operand stays in L2, the other is gone through once, in strips as narrow as neighbours want them. Where
    neither does, a wave of C clusters that covers w columns of tiles reads w B-tiles and C / w A-tiles: least bytes at
    w = sqrt(C * cluster rows / cluster columns). Waves do not end where bands and groups do, so that of bands about as
    wide, and of groups up to as high as neighbours would have them, those are taken whose waves read least: counted so,
    4096 x 7168 x 16384 reads 570 MB for 612, and took 1.9% less time back to back and 1.1% less alone (H200), others
    of 4096 rows and more 0.4 to 1.0% and 0.4 to 0.7%. Where nothing is counted, bands are equally wide, so that the
    last is not a sliver.

    One stays if what a wave reads of the other fits beside it, or if that is B and leaves L2 first. What does so is
    sometimes gone before the last CTA asked for it, which pays only where a wave reads much: on an H200,
    1893 x 30176 x 12800 (24 MB of A stay, a wave reads 25 of B) got 2 to 4% shorter, 4096 x 4096 x 7168 (29 and 9) 1%
    longer. A never leaves: 8192 x 4096 x 7168 took 4% longer.
    Remembered: a launch for tensors elsewhere is alike."""
    rows, columns = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    each = config.cluster_m  # CTAs of a row of cluster tiles
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
    """The width of bands and the height of groups with which waves read least."""
    orders = [(band, height) for height in heights for band in bands]
    return min(orders, key=lambda order: _read(tiles_m, tiles_n, order[0], order[1], clusters, rows, columns))


def _read(tiles_m: int, tiles_n: int, band: int, height: int, clusters: int, rows: int, columns: int) -> int:
    """Rows of operands that waves read, each those of its tiles once, if tiles of ``rows`` x ``columns`` are walked
    in such an order."""
    total, left, wanted_m, wanted_n = 0, clusters, 0, 0  # of the wave: tiles to come, and bits for what has come
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
    """How many tiles, ``across`` wide and ``along`` long, a strip is wide of which ``together`` tiles want least."""
    widths = [1 << power for power in range(together.bit_length())]
    return min(widths, key=lambda width: width * across + ceil_div(together, width) * along)
