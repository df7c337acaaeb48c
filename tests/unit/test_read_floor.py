"""The read floor: which CTA reads what. The arithmetic of the kernel is repeated here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import floor, run

UNITS = st.integers(1, 1 << 24)


def reads(size: int, ctas: int) -> list[tuple[int, int]]:
    """(pieces, bytes) of each CTA, as the kernel counts them."""
    piece = floor.piece_bytes(size, ctas)
    pieces = -(-size // piece)
    counts = [(pieces - cta - 1) // ctas + 1 if cta < pieces else 0 for cta in range(ctas)]
    last = size - (pieces - 1) * piece
    return [
        (count, count * piece - (piece - last if count and (pieces - 1) % ctas == cta else 0))
        for cta, count in enumerate(counts)
    ]


@given(UNITS, st.integers(1, 160))
def test_every_byte_is_read_once_and_the_work_is_even(units: int, ctas: int) -> None:
    size = units * floor.UNIT
    piece = floor.piece_bytes(size, ctas)
    assert 0 < piece <= floor.STAGE_BYTES
    assert piece % floor.UNIT == 0
    found = reads(size, ctas)
    assert sum(bytes_read for _, bytes_read in found) == size
    most = max(count for count, _ in found)
    assert most * piece < size / ctas + (most + 1) * floor.UNIT  # the CTA that reads most has its share, rounded up
    assert most <= -(-size // (ctas * floor.STAGE_BYTES))


def test_few_bytes_are_spread_over_all() -> None:
    assert reads(192 * 192, 132).count((1, 384)) == 96  # an even share would be 279 bytes, rounded up
    assert reads(132 * 16 * 1000, 132) == [(1, 16000)] * 132
    assert reads(132 * 128 * 140, 132) == [(2, 17920)] * 132


def test_a_row_has_the_floor_that_was_measured_beside_it() -> None:
    us = {"ours": 5.0, "ours_unpromised": 6.0, "tensorwise": 9.0}
    shape = GemmShape(1, 2112, 7168)
    row = run.make_row(shape, "graph", us | {"floor": 4.0}, {})
    assert (row["us_floor"], row["floor_fraction"]) == (4.0, 0.76)  # the table has the lower floor
    assert run.make_row(shape, "graph", us, {})["floor_fraction"] == 0.76
    assert run.make_row(shape, "graph", us | {"floor": 3.0}, {})["floor_fraction"] == 0.6
    assert run.make_row(GemmShape(1, 2112, 7184), "graph", us | {"floor": 4.0}, {})["floor_fraction"] == 0.8
