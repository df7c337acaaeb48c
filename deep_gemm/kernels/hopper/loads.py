"""How operands are loaded: the tensor maps of their boxes, L2 policies, and early loads."""

from __future__ import annotations

from collections.abc import Callable

from ...jit.driver.launch import Map
from ...jit.driver.tensor_map import TensorMapSpec
from ...params import GemmConfig
from ...spec import SCALE_BLOCK, GemmSpec, ceil_div
from ..gemm_features import LINE_BYTES
from ..raster import Raster


def l2_promotion(spec: GemmSpec, stride: int, element_bytes: int = 1) -> int:
    """L2 promotion: how many bytes of a row of A or B are fetched into L2 together; rows are ``stride`` bytes apart.

    It is one block of K, or two where D is larger than B. With two blocks, the first one waits for the second: with one
    block graphs of up to 64 tokens were 0 to 6% faster (H200, constant weights), and single calls with M up to 512
    mostly 1%. But writes of D interrupt the reads, and then longer reads are better: with one block 1000 x 32768 x 512
    took 9% longer and 4096 x 32768 x 512 4%.

    It is one block also where rows begin inside lines, since two blocks then touch three or more lines. Inside sectors
    two blocks took 11% longer for BF16 (16 shapes, H100) and 8% for FP8 (4 shapes). At other sectors of a line one
    block took 2.4% less for BF16 (20 shapes with six configs each: from 10% less to 4% more), and 0.6% less for FP8
    (12 shapes). Where rows begin with lines, both took the same time."""
    return LINE_BYTES if stride % LINE_BYTES or 2 * spec.m <= spec.k * element_bytes else 2 * LINE_BYTES


_FEW_EARLY, _ALL_EARLY = 2, 255
"""Numbers of stages. No ring has as many as the second."""


def early_stages(config: GemmConfig, m: int, row_bytes: int) -> int:
    """How many stages of constant weights are loaded before the previous kernel has ended. It is the whole ring, or two
    stages in two cases.

    First, where D has an eighth of B's bytes or more and one row of tiles reads B. The previous kernel, if it is alike,
    then stores for a long time, and many reads would slow its stores down. Graphs of 32 to 128 x 32768 x 512, 96 and
    128 x 24576 x 1536, and 64 x 20000 x 1024 were 4 to 10% faster with two stages on an H200. But 128 x 7168 x 2048,
    where two rows of tiles read B, was 4% slower with two stages, and 64 x 24576 x 1536, whose D is smaller, 3%.

    Second, where a stage has more bytes of tokens than of weights, because tokens are loaded last: 96 and 128 x 2112 x
    7168 were 3% faster."""
    much_stored = m <= config.block_m and 16 * m >= row_bytes
    return _FEW_EARLY if much_stored or config.block_n < config.block_m else _ALL_EARLY


_IN_STEP = 8
"""With more blocks of K than these, tiles in the same column read the same rows of B at about the same time: the
difference between their starts is small compared with their duration."""

_EVICT_B, _EVICT_D = 1, 2
"""Bits of ``evict_first``."""

_LARGE_D = 100_000_000
"""Bytes of a large D: twice an H200's L2. A kernel that reads such a D from its beginning finds little of it in L2, and
D evicts operands that are needed again. With D evicted first, and also another order of tiles, ten such shapes gained
2.8% on cuBLASLt (geometric mean; 0 to 8%), and twelve shapes whose D has 34 to 91 MB gained 0.1%."""


def evict_first(spec: GemmSpec, order: Raster, row_bytes: int, large_d: bool) -> int:
    """The operands that are loaded or stored with evict-first, as bits.

    B has this policy where one row of tiles reads it, or several rows read the same part of it at the same time.
    Otherwise such weights evict data that is needed again: on an H200 256 x 7168 x 16384 (M x N x K) took 5% longer and
    256 x 24576 x 1536 4%. With few blocks of K some tiles read B too late: with evict-first 1000 x 32768 x 512 took up
    to 11% longer. B also has this policy where it would evict A (see `raster`), and a large D if ``large_d`` allows
    it."""
    together = order.rows <= order.height and ceil_div(row_bytes, SCALE_BLOCK) > _IN_STEP
    bits = _EVICT_B if order.rows == 1 or together or order.evict_b else 0
    large = large_d and 2 * spec.m * spec.n > _LARGE_D
    return bits | (_EVICT_D if large else 0)


def left(size: int, step: int) -> int:
    """The size of the last step when ``size`` is divided into steps of ``step``: from 1 to ``step``."""
    return (size - 1) % step + 1


def operand_maps(spec: Callable[[int], TensorMapSpec], operand: str, size: int, box: int, last: int) -> tuple[Map, Map]:
    """The tensor maps of an operand's ``size`` rows: one of boxes of ``box`` rows, and one of the edge box, if ``last``
    rows of the last tile are loaded. ``spec`` makes a map for a number of rows. Both maps are the same where there is
    no edge box."""
    rest = left(last, box)
    ending = Map(spec(rest), operand)
    return (ending if rest == box or size <= box else Map(spec(box), operand)), ending
