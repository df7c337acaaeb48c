"""How operands are loaded: the maps of their boxes, what L2 is told of them, and what comes early."""

from __future__ import annotations

from collections.abc import Callable

from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import GemmConfig
from ..spec import SCALE_BLOCK, GemmSpec, ceil_div
from .raster import Raster
from .tiles import left

BARRIER_BYTES = 16
"""A full and an empty mbarrier."""

SECTOR_BYTES = 32
"""What L2 reads and writes at a time."""


def l2_promotion(spec: GemmSpec, stride: int, element_bytes: int = 1) -> int:
    """How many bytes of a row of A or B, ``stride`` bytes from the next, come into L2 together: a block of K, or where
    D is larger than B, two. Two at once keep what is wanted first waiting for what is wanted later: graphs of up to 64
    tokens were 0 to 6% faster with one (H200, promised weights), single calls with M up to 512 mostly 1%. But what D's
    writes interrupt is read better in long pieces: 1000 x 32768 x 512 took 9% longer with one, 4096 x 32768 x 512 4%.
    Not so where rows begin inside sectors: of twelve such shapes none lost more than 1% by one, and where many SMs ask
    for the same rows it is much better (6922 x 1280 x 3440 57.4 -> 52.4 us, 3465 x 1088 x 2960 29.2 -> 26.2)."""
    inside_sectors = stride % SECTOR_BYTES > 0
    return SCALE_BLOCK if inside_sectors or 2 * spec.m <= spec.k * element_bytes else 2 * SCALE_BLOCK


_FEW_EARLY, _ALL_EARLY = 2, 255
"""Stages; no ring has so many."""


def early_stages(config: GemmConfig, m: int, row_bytes: int) -> int:
    """How many stages of constant weights are loaded before the previous kernel has ended: the whole ring, but few
    where that one has more to do than loads. Where D has an eighth of B's bytes or more, all SMs store for long, and
    who reads much meanwhile slows them down: graphs of 32 to 128 x 32768 x 512, 96 and 128 x 24576 x 1536 and 64 x
    20000 x 1024 were 4 to 10% faster with few on an H200. But only where one row of tiles reads B: 128 x 7168 x 2048,
    which two read at a time, was 4% slower, and 64 x 24576 x 1536, whose D is smaller, 3%. Few, too, where a stage has
    more bytes of tokens, which come last, than of weights: 96 and 128 x 2112 x 7168 were 3% faster."""
    much_stored = m <= config.block_m and 16 * m >= row_bytes
    return _FEW_EARLY if much_stored or config.block_n < config.block_m else _ALL_EARLY


_IN_STEP = 8
"""With more blocks of K than these, tiles take so much longer than their starts differ that those below each other
read the same rows of B at one time."""

_EVICT_B, _EVICT_D = 1, 2
"""Bits of ``evict_first``."""

_LARGE_D = 100_000_000
"""Bytes, twice an H200's L2: of such a D little would be left for who reads it from its beginning, and what it pushes
out meanwhile is needed. With D evicted first, and tiles in another order too, ten such shapes gained 2.8% on cuBLASLt
by geometric mean, at least 0 and at most 8, and twelve whose D has 34 to 91 MB 0.1%."""


def evict_first(spec: GemmSpec, order: Raster, row_bytes: int, large_d: bool) -> int:
    """What is loaded or stored with evict-first. B where one row of tiles reads it, or several that read the same rows
    of it at one time: kept, such weights push out what is needed again: M x N x K of 256 x 7168 x 16384 took 5% longer
    on an H200, 256 x 24576 x 1536 4%. With few blocks of K some reader comes too late: 1000 x 32768 x 512 took up to
    11% longer where they were let go. B also where it would push out A (see `raster`). And a large D, if ``large_d``
    allows it."""
    together = order.rows <= order.height and ceil_div(row_bytes, SCALE_BLOCK) > _IN_STEP
    bits = _EVICT_B if order.rows == 1 or together or order.evict_b else 0
    large = large_d and 2 * spec.m * spec.n > _LARGE_D
    return bits | (_EVICT_D if large else 0)


def operand_maps(spec: Callable[[int], TensorMapSpec], operand: str, size: int, box: int, last: int) -> tuple[Map, Map]:
    """The maps of an operand's ``size`` rows by what ``spec`` says of the rows of a box: for boxes of ``box``, and for
    the last one, if ``last`` rows of the last tile are loaded. One map is both where no box is another."""
    rest = left(last, box)
    ending = Map(spec(rest), operand)
    return (ending if rest == box or size <= box else Map(spec(box), operand)), ending
