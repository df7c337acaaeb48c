"""Division by numbers that are known before, and the order of tiles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rasters import located, quotient

from deep_gemm.kernels.raster import Raster, divisor

NUMBERS = st.one_of(st.integers(0, 1 << 12), st.integers(0, (1 << 31) - 1))


@settings(max_examples=2000, deadline=None)
@given(NUMBERS, NUMBERS)
def test_a_divisor_divides_every_number_below_two_to_the_31(x: int, value: int) -> None:
    value = max(1, value)
    assert quotient(x, divisor(value)) == x // value
    # Next to multiples is where a rounded factor would show.
    for near in (x // value * value - 1, x // value * value):
        if near >= 0:
            assert quotient(near, divisor(value)) == near // value


@pytest.mark.parametrize("value", [1, 2, 3, 7, 128, (1 << 30) - 1, 1 << 30, (1 << 31) - 1])
def test_a_divisor_divides_the_largest_number(value: int) -> None:
    assert quotient((1 << 31) - 1, divisor(value)) == ((1 << 31) - 1) // value


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 90))
def test_bands_hold_every_tile_once_m_first(rows: int, columns: int, band: int) -> None:
    order = Raster(rows, columns, min(band, columns))
    found = [located(order.arguments, index, columns) for index in range(rows * columns)]
    expected = []
    for first in range(0, columns, order.band):
        width = min(order.band, columns - first)
        expected += [(row, first + column) for row in range(rows) for column in range(width)]
    assert found == expected
