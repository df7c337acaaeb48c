"""Grouped GEMMs: the table of groups and the order of tiles, in the arithmetic of ``groups.cuh``, against loops."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rasters import located, quotient

from deep_gemm import ops
from deep_gemm.arch import SM90
from deep_gemm.kernels import groups
from deep_gemm.kernels.families import HALF_K_GROUPED
from deep_gemm.spec import GemmSpec, ceil_div

STRIP, CHUNK = 16, 256
BLOCKS_M, BLOCKS_N = st.sampled_from([64, 128, 256]), st.sampled_from([64, 128, 192, 256])


@dataclass
class Table:
    """`GroupTable`: the words in shared memory. ``last`` is a segment's group, or the end of its rows. With labels,
    ``used`` is the first row after the last one that is no padding."""

    begin: list[int]
    row: list[int]
    last: list[int]
    used: list[int]

    def segment(self, target: int) -> int:
        """The last segment that begins at a row of tiles or before."""
        found, step = 0, len(self.row) // 2
        while step > 0:
            if self.begin[found + step] <= target:
                found += step
            step //= 2
        return found


def list_groups(form: str, layout: Sequence[int], rows: int, block_m: int, alignment: int) -> Table:
    """`GroupTable::list_groups`, 32 groups at a time."""
    size = groups.segments(form, len(layout))
    table = Table([0] * (size + 1), [0] * size, [0] * size, [])
    total = before = 0
    for first in range(0, size, 32):
        given = [layout[group] if group < len(layout) else before for group in range(first, first + 32)]
        ahead = [before, *given[:-1]]
        before = given[31]
        for lane in range(32):
            group = first + lane
            if form == "k":
                row, end = 0, max(given[lane], 0)
            elif form == "psum":
                row, end = ceil_div(max(ahead[lane], 0), alignment) * alignment, min(max(given[lane], 0), rows)
            else:
                row = group * rows
                end = row + min(max(given[lane], 0), rows)
            table.begin[group], table.row[group], table.last[group] = total, row, end
            total += ceil_div(end - row, block_m) if group < len(layout) and row < end else 0
    table.begin[size] = total
    return table


def find_runs(labels: Sequence[int], block_m: int, of_groups: int, used: Sequence[int] = ()) -> Table | None:
    """`GroupTable::find_runs` on the label of each row of tiles, and its ``used`` rows; None where it traps."""
    used = used or [block_m] * len(labels)
    size = groups.segments("contiguous", of_groups)
    table = Table([0] * (size + 1), [0] * size, [0] * size, [0] * size)
    segments, total, before = 0, 0, -1
    for first in range(0, len(labels), CHUNK):
        chunk = labels[first : first + CHUNK]
        for part in range(0, len(chunk), 32):
            lanes = [chunk[part + lane] if part + lane < len(chunk) else -1 for lane in range(32)]
            ahead = [before, *lanes[:-1]]
            before = lanes[31]
            starts = [label >= 0 and label != previous for label, previous in zip(lanes, ahead, strict=True)]
            for lane in range(32):
                if starts[lane]:
                    segment = segments + sum(starts[:lane])
                    if segment >= size:
                        return None
                    table.begin[segment] = total + sum(label >= 0 for label in lanes[:lane])
                    table.row[segment] = (first + part + lane) * block_m
                    table.last[segment] = lanes[lane]
                if lanes[lane] >= 0 and (lane == 31 or lanes[lane + 1] != lanes[lane]):
                    own = segments + sum(starts[: lane + 1]) - 1
                    table.used[own] = (first + part + lane) * block_m + used[first + part + lane]
            segments += sum(starts)
            total += sum(label >= 0 for label in lanes)
    table.begin[segments:] = [total] * (size + 1 - segments)
    return table


def divided(x: float, y: int, ulps: int) -> int:
    """A quotient of floats that is wrong by a few units in its last place, as that of ``__fdividef`` may be."""
    bits: int = struct.unpack("I", struct.pack("f", x / y))[0]
    return int(struct.unpack("f", struct.pack("I", max(bits + ulps, 0)))[0])


def tile(order: Sequence[int], table: Table, block_m: int, block_n: int, index: int) -> tuple[int, int, int]:
    """`GroupedScheduler::locate`: row, column and segment."""
    columns, column, strip = order[0], tuple(order[3:6]), tuple(order[6:9])
    segment = table.segment(quotient(index, column))
    before, height = table.begin[segment], table.begin[segment + 1] - table.begin[segment]
    in_segment = index - before * columns
    number = quotient(in_segment, strip)
    in_strip, above = in_segment - number * strip[0], number * STRIP
    left = height - above
    if left >= STRIP:
        x = in_strip >> 4
    else:
        found = {divided(in_strip + 0.5, left, ulps) for ulps in (-2, 0, 2)}
        assert len(found) == 1, f"{in_strip} / {left}"
        x = found.pop()
    return table.row[segment] + (above + in_strip - x * min(left, STRIP)) * block_m, x * block_n, segment


def check_tiles(table: Table, block_m: int, block_n: int, n: int, wanted: list[tuple[int, int, int]]) -> None:
    """Each tile is found once, in the order that is documented. ``wanted`` are the first row, the rows of tiles, and
    the group or the end of each segment that has any."""
    order = groups.order(HALF_K_GROUPED.config(block_m, block_n), n, True, 0)
    columns = ceil_div(n, block_n)
    expected = [
        (row + y * block_m, column * block_n, last)
        for row, height, last in wanted
        for top in range(0, height, STRIP)
        for column in range(columns)
        for y in range(top, min(height, top + STRIP))
    ]
    found = []
    for index in range(table.begin[-1] * order[0]):
        row, column, segment = tile(order, table, block_m, block_n, index)
        found.append((row, column, table.last[segment]))
    assert found == expected


def padding_rows(table: Table, rows: int, block_m: int) -> list[int]:
    """`zero_padding`: the rows that it writes."""
    found: list[int] = []
    total, start, before, segment = table.begin[-1], 0, 0, 0
    while start < rows:
        past = before == total
        to = rows if past else min(table.row[segment], rows)
        found += range(start, to)
        if past:
            break
        after = table.begin[segment + 1]
        start, before, segment = to + (after - before) * block_m, after, segment + 1
    return found


GROUPS = st.one_of(st.integers(1, 5), st.integers(30, 70))
"""A warp looks at 32 together."""


def sizes(rng: random.Random, count: int, least: int, most: int) -> list[int]:
    """Sizes of groups, a third of them empty."""
    return [rng.choice((0, rng.randint(least, most), rng.randint(least, 64))) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), GROUPS, st.integers(1, 600), BLOCKS_M, BLOCKS_N, st.data())
def test_masked_groups_have_each_tile_once(
    rng: random.Random, count: int, rows: int, m: int, n: int, data: st.DataObject
) -> None:
    """Counts below zero or above the room of a group are those nearest to them."""
    counts = sizes(rng, count, -2, 700)
    table = list_groups("masked", counts, rows, m, 1)
    exist = [min(max(count, 0), rows) for count in counts]
    wanted = [
        (group * rows, ceil_div(count, m), group * rows + count) for group, count in enumerate(exist) if count > 0
    ]
    check_tiles(table, m, n, data.draw(st.integers(1, 6 * n)), wanted)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), GROUPS, st.integers(1, 3), BLOCKS_M, BLOCKS_N, st.data())
def test_ends_have_each_tile_once(
    rng: random.Random, count: int, times: int, m: int, n: int, data: st.DataObject
) -> None:
    """Ends are not aligned, groups are empty, and the last rows may be cut off."""
    counts = sizes(rng, count, 0, rng.choice((200, 3000)))
    alignment, ends, starts, at = times * m, [], [], 0
    for count in counts:
        starts.append(at)
        ends.append(at + count)
        at = ceil_div(at + count, alignment) * alignment
    rows = max(1, data.draw(st.sampled_from([ends[-1], at, at + 70, ends[-1] - 1])))
    table = list_groups("psum", ends, rows, m, alignment)
    cut = [(start, min(end, rows)) for start, end in zip(starts, ends, strict=True)]
    wanted = [(start, ceil_div(end - start, m), end) for start, end in cut if start < end]
    check_tiles(table, m, n, data.draw(st.integers(1, 3 * n)), wanted)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), GROUPS, st.sampled_from([1, 128]))
def test_parts_of_k_follow_one_another(rng: random.Random, count: int, unit: int) -> None:
    depths = sizes(rng, count, 0, 900)
    table = list_groups("k", depths, 0, unit, 1)
    blocks = [ceil_div(depth, unit) for depth in depths]
    assert table.begin[: count + 1] == [sum(blocks[:group]) for group in range(count + 1)]
    assert table.begin[-1] == sum(blocks)


RUNS = st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(RUNS, BLOCKS_M, BLOCKS_N, st.data())
def test_labels_have_each_tile_once_and_padding_the_rest(
    runs: list[tuple[int, bool]], m: int, n: int, data: st.DataObject
) -> None:
    """Runs of rows of tiles with one label, and of padding, beyond the rows that are looked at together."""
    labels = [-1 if padding else group for group, (length, padding) in enumerate(runs) for _ in range(length)]
    assume(labels)
    used = [data.draw(st.integers(1, m)) for _ in labels[:4]] + [m] * len(labels[4:])
    table = find_runs(labels, m, len(runs), used)
    assert table is not None
    ends = [
        place * m + used[place]
        for place, label in enumerate(labels)
        if label >= 0 and [*labels, -1][place + 1] != label
    ]
    assert table.used[: len(ends)] == ends
    wanted: list[tuple[int, int, int]] = []
    for place, label in enumerate(labels):
        if label >= 0 and place > 0 and labels[place - 1] == label:
            row, height, _ = wanted[-1]
            wanted[-1] = (row, height + 1, label)
        elif label >= 0:
            wanted.append((place * m, 1, label))
    check_tiles(table, m, n, data.draw(st.integers(1, 3 * n)), wanted)
    rows = len(labels) * m - data.draw(st.integers(0, m - 1))
    assert padding_rows(table, rows, m) == [row for row in range(rows) if labels[row // m] < 0]


def test_padding_inside_groups_fills_the_table() -> None:
    """Two runs of each of many groups fit, and one more does not."""
    labels = [label for group in range(16) for label in (group, -1, group)]
    table = find_runs(labels, 64, 16)
    assert table is not None
    assert len(table.row) == 32
    assert table.begin == list(range(33))
    assert padding_rows(table, 48 * 64, 64) == [row for row in range(48 * 64) if labels[row // 64] < 0]
    assert find_runs([*labels, -1, 15], 64, 16) is None


@pytest.mark.parametrize("left", range(1, STRIP))
@pytest.mark.parametrize("columns", [1, 2, 3, 1000, 4097, 1 << 18])
def test_columns_in_a_short_strip_are_exact(left: int, columns: int) -> None:
    """``__fdividef`` is wrong by two units in the last place at most. Up to 2**18 columns that changes no column."""
    for column in {0, 1 % columns, columns // 2, columns - 1}:
        for y in {0, left - 1}:
            exact = Fraction(2 * (column * left + y) + 1, 2 * left)
            assert struct.unpack("f", struct.pack("f", column * left + y + 0.5))[0] == column * left + y + 0.5
            top = 0
            while Fraction(2) ** (top + 1) <= exact:
                top += 1
            off = 2 * Fraction(2) ** (top - 23)
            assert int(exact - off) == int(exact + off) == column


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 20), st.sampled_from([3, 132]))
def test_along_k_each_matrix_has_each_tile_once(m: int, n: int, count: int, num_sms: int) -> None:
    """From the numbers of a launch. The matrices follow one another, all with the same order of tiles."""
    kernel, config = HALF_K_GROUPED, HALF_K_GROUPED.config(128, 128)
    m, n = m, 8 * n
    spec = ops.spec(m, n, 4096, num_sms, "k_grouped_bf16_gemm_tn_contiguous", groups=count)
    strides = {"a": (1, 2048), "b": (1, 8 * 1500), "d": (m * n, n, 1), "c": (m * n, n, 1)}
    launch, values = kernel.values(kernel.params(spec, config, SM90), spec, strides, {}, pdl=False, constant=False)
    numbers = values["raster"]
    assert isinstance(numbers, list)
    tiles = ceil_div(m, 128) * ceil_div(n, 128)
    assert numbers[0] == tiles
    assert launch.grid == (min(tiles * count, num_sms), 1, 1)
    inside = [located(tuple(numbers[3:]), index) for index in range(tiles)]
    assert sorted(inside) == [(y, x) for y in range(ceil_div(m, 128)) for x in range(ceil_div(n, 128))]
    for index in (0, tiles - 1, tiles * count // 2, tiles * count - 1):
        assert quotient(index, tuple(numbers[:3])) == index // tiles


def grouped_spec(form: str, m: int, k: int, count: int, expected_m: int = 0) -> GemmSpec:
    """The spec of an FP8 call with groups along M."""
    return ops.spec(m, 6144, k, 132, f"m_grouped_fp8_gemm_nt_{form}", groups=count, expected_m=expected_m)


@pytest.mark.parametrize(
    ("groups_and_rows", "k", "skips"),
    [((64, 306), 7168, False), ((64, 306), 3072, True), ((32, 192), 7168, True), ((8, 4096), 2048, False)],
)
def test_padding_is_skipped_where_that_pays(groups_and_rows: tuple[int, int], k: int, skips: bool) -> None:
    """Few tiles for each CTA; or low groups, and columns of B that stay in L2. Otherwise CTAs only drift apart."""
    count, rows = groups_and_rows
    spec = grouped_spec("masked", 4096, k, count, rows)
    assert groups.skips_padding(spec, HALF_K_GROUPED.config(128, 256)) is skips
    contiguous = grouped_spec("contiguous", count * rows, k, count)
    assert groups.skips_padding(contiguous, HALF_K_GROUPED.config(128, 256)) is skips


@pytest.mark.parametrize(
    ("form", "count", "rows", "k", "evicted"),
    [
        ("masked", 6, 20, 2048, 1),
        ("masked", 6, 20, 7168, 0),  # 264 MB
        ("masked", 32, 20, 2048, 0),
        ("masked", 6, 100, 2048, 0),  # two rows of tiles read B
        ("contiguous", 6, 20, 2048, 0),
    ],
)
def test_weights_that_are_read_once_leave_l2_first(form: str, count: int, rows: int, k: int, evicted: int) -> None:
    spec = grouped_spec(form, 4096, k, count, rows)
    assert groups.evict_first(spec, HALF_K_GROUPED.config(64, 128)) == evicted
