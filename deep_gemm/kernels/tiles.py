"""Which rows and columns a tile has (see ``columns.cuh`` and ``edge_boxes.cuh``)."""

from __future__ import annotations

from ..params import GemmConfig
from ..spec import align


def segments(width: int) -> tuple[int, ...]:
    """Widths of the parts that a tile's columns come in: the powers of two that ``width`` is the sum of, the widest
    first. All tiles' first parts lie before all second ones."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


def first_column(width: int, segment: int, index: int, tiles: int) -> int:
    """Where a segment of the tile at ``index`` in a row of ``tiles`` begins."""
    widths = segments(width)
    return sum(widths[:segment]) * tiles + index * widths[segment]


def left(size: int, step: int) -> int:
    """What the last of the steps has left of ``size``: from 1 to a whole one."""
    return (size - 1) % step + 1


def last_rows(config: GemmConfig, m: int) -> int:
    """Rows of A that are loaded for the last row of tiles: those that there are, but 16 bytes of scales at least."""
    return min(align(left(m, config.block_m), 4), config.block_m)
