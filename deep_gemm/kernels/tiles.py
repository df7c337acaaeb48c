"""The rows and columns of a tile (see ``columns.cuh`` and ``edge_boxes.cuh``)."""

from __future__ import annotations

from ..params import GemmConfig
from ..spec import align


def segments(width: int) -> tuple[int, ...]:
    """Widths of the segments of a tile's columns: the powers of two whose sum is ``width``, widest first. The first
    segments of all tiles lie before all second segments."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


def first_column(width: int, segment: int, index: int, tiles: int) -> int:
    """The first column of a segment of tile ``index`` in a row of ``tiles``."""
    widths = segments(width)
    return sum(widths[:segment]) * tiles + index * widths[segment]


def left(size: int, step: int) -> int:
    """The size of the last step when ``size`` is divided into steps of ``step``: from 1 to ``step``."""
    return (size - 1) % step + 1


def last_rows(config: GemmConfig, m: int) -> int:
    """Rows of A that are loaded for the last row of tiles: those that exist, rounded up to 16 bytes of scales."""
    return min(align(left(m, config.block_m), 4), config.block_m)
