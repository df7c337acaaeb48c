"""The columns of tiles: each column of D is in one tile, and no segment mixes scales."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.kernels.hopper.edges import first_column, segments
from deep_gemm.spec import ceil_div

WIDTHS = st.integers(1, 16).map(lambda x: 16 * x)


def test_segments_are_powers_of_two_the_widest_first() -> None:
    assert [segments(width) for width in (16, 96, 112, 128, 240, 256)] == [
        (16,),
        (64, 32),
        (64, 32, 16),
        (128,),
        (128, 64, 32, 16),
        (256,),
    ]


@given(WIDTHS, st.integers(1, 3000), st.integers(0, 1))
def test_every_column_is_in_one_tile(width: int, n: int, spare: int) -> None:
    """Also if a cluster adds a tile beyond the last column."""
    tiles = ceil_div(n, width) + spare
    found = []
    for index in range(tiles):
        for number, size in enumerate(segments(width)):
            first = first_column(width, number, index, tiles)
            found += range(first, min(first + size, n))
    assert sorted(found) == list(range(n))


@given(WIDTHS, st.integers(0, 1000), st.integers(1, 1000))
def test_no_segment_straddles_a_border_of_scales(width: int, index: int, more: int) -> None:
    """A segment of 256 columns begins on such a border and has two scales."""
    for number, size in enumerate(segments(width)):
        first = first_column(width, number, index, index + more)
        assert first % size == 0
        assert first // 128 == (first + min(size, 128) - 1) // 128
