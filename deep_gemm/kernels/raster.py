"""In which order a launch walks its tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..params import FP8Config, ceil_div


@dataclass(frozen=True)
class Raster:
    """Bands of ``band`` cluster tiles along n, the last of what is left, through all ``rows`` along m; inside a band m
    first (see ``raster.cuh``)."""

    rows: int
    columns: int
    band: int

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """For the kernel: what it divides by, a whole band's tiles and the columns of a whole and of the last band,
        each with the numbers that ``divisor`` gives."""
        last = self.columns - (ceil_div(self.columns, self.band) - 1) * self.band
        return (*divisor(self.band * self.rows), *divisor(self.band), *divisor(last))


def divisor(value: int) -> tuple[int, int, int]:
    """``value``, and a factor and a shift that divide any x < 2**31 by it: (2 * x * factor >> 32) >> shift. From
    Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994."""
    shift = (value - 1).bit_length()
    return value, ceil_div(1 << (31 + shift), value), shift


@functools.lru_cache(maxsize=1024)
def raster(config: FP8Config, m: int, n: int, num_sms: int, members: int = 1) -> Raster:
    """The order for a launch whose CTAs are ``members`` below each other at a time. A wave of C clusters that covers w
    columns of tiles reads w B-tiles and C / w A-tiles: least bytes at w = sqrt(C * cluster rows / cluster columns).
    Bands are made equally wide, so that the last is not a sliver. Remembered: a launch for tensors elsewhere is alike.
    """
    rows, columns = config.block_m * config.cluster_m * members, config.block_n * config.cluster_n
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    clusters = min(num_sms * config.ctas_per_sm // (config.cluster_size * members), tiles_m * tiles_n)
    best = max(1.0, math.sqrt(clusters * rows / columns), clusters / max(tiles_m, 1))
    bands = max(1, round(tiles_n / best))
    return Raster(tiles_m, tiles_n, max(1, ceil_div(tiles_n, bands)))
