"""The raster of the device code, in the same arithmetic."""


def quotient(x: int, numbers: tuple[int, ...]) -> int:
    """`Divisor::quotient`, with 32 bits as there."""
    _, magic, shift = numbers
    assert 0 <= x < 1 << 31
    assert 0 < magic < 1 << 32
    return ((x * 2 & 0xFFFFFFFF) * magic >> 32) >> shift


def located(numbers: tuple[int, ...], index: int) -> tuple[int, int]:
    """`Raster::locate`: (row, column) of a tile, from the numbers that a launch passes."""
    rows, columns, band = numbers[:3]
    last_height, height, strip, group, last_group = (numbers[at : at + 3] for at in range(3, 18, 3))
    if band == columns and last_height[0] == rows:
        column = quotient(index, last_height)
        return index - column * rows, column
    number = quotient(index, strip)
    first, in_band = number * band, index - number * strip[0]
    of_group = group if first + band <= columns else last_group
    top = quotient(in_band, of_group)
    in_group, above = in_band - top * of_group[0], top * height[0]
    of_column = height if above + height[0] <= rows else last_height
    right = quotient(in_group, of_column)
    return above + in_group - right * of_column[0], first + right
