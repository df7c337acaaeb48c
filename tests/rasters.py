"""Where kernels find their tiles, in their own arithmetic."""

from __future__ import annotations


def quotient(x: int, numbers: tuple[int, ...]) -> int:
    """`Divisor::quotient`, with 32 bits as there."""
    _, magic, shift = numbers
    assert 0 <= x < 1 << 31
    assert 0 < magic < 1 << 32
    return ((x * 2 & 0xFFFFFFFF) * magic >> 32) >> shift


def located(numbers: tuple[int, ...], index: int, columns: int) -> tuple[int, int]:
    """`Raster::locate`: (row, column) of a tile, from the numbers that a launch passes."""
    strip, band, last = numbers[:3], numbers[3:6], numbers[6:]
    number = quotient(index, strip)
    inside, first = index - number * strip[0], number * band[0]
    width = band if first + band[0] <= columns else last
    row = quotient(inside, width)
    return row, first + inside - row * width[0]
