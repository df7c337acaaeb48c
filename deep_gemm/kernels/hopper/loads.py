"""How operands are loaded: the tensor maps of their boxes, L2 policies, and early loads. What was measured is in
docs/measurements/rules.md."""

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

    It is one block of K, or two if D is larger than B. With two blocks, the first one waits for the second. But writes
    of a large D interrupt the reads, and longer reads are better then. It is one block also if rows begin inside lines,
    since two blocks then touch three or more lines."""
    return LINE_BYTES if stride % LINE_BYTES or 2 * spec.m <= spec.k * element_bytes else 2 * LINE_BYTES


_FEW_EARLY, _ALL_EARLY = 2, 255
"""2 stages, or all (255 is more than any ring has)."""


def early_stages(config: GemmConfig, m: int, row_bytes: int) -> int:
    """How many stages of constant weights are loaded before the previous kernel has ended. It is the whole ring, or two
    stages in two cases.

    First, if D has an eighth of B's bytes or more and one row of tiles reads B. The previous kernel, if it is alike,
    then stores for a long time, and many reads would slow its stores down.

    Second, if a stage has more bytes of tokens than of weights, because tokens are loaded last."""
    much_stored = m <= config.block_m and 16 * m >= row_bytes
    return _FEW_EARLY if much_stored or config.block_n < config.block_m else _ALL_EARLY


_IN_STEP = 8
"""Blocks of K above which tiles in the same column read the same rows of B at about the same time: they start at
different times, but that is little compared with their duration."""

_EVICT_B, _EVICT_D = 1, 2
"""Bits of ``evict_first``."""

_LARGE_D = 100_000_000
"""Bytes of a large D: twice an H200's L2. A kernel that reads such a D from its beginning finds little of it in L2, and
D evicts operands that are needed again."""


def evict_first(spec: GemmSpec, order: Raster, row_bytes: int, large_d: bool) -> int:
    """The operands that are loaded or stored with evict-first, as bits.

    B has this policy if one row of tiles reads it, or if several rows read the same part of it at the same time, which
    takes enough blocks of K. B also has it if it would evict A (see `raster`), and a large D has it if ``large_d``."""
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
