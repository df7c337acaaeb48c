"""Which columns of D, or rows of B, a tile has (see ``columns.cuh``)."""

from __future__ import annotations


def segments(width: int) -> tuple[int, ...]:
    """Widths of the parts that a tile's columns come in: the powers of two that ``width`` is the sum of, the widest
    first. All tiles' first parts lie before all second ones."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


def first_column(width: int, segment: int, index: int, tiles: int) -> int:
    """Where a segment of the tile at ``index`` in a row of ``tiles`` begins."""
    widths = segments(width)
    return sum(widths[:segment]) * tiles + index * widths[segment]
