"""Tiles of GEMMs: their columns, their TMA boxes, which CTA computes which, in which order, and what is refused."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from chosen import find_config, make_params
from forced import spec_of
from house_choices import numbers, strides
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CONFIGS, PARAMS, Geometry, geometries, record, suited
from rasters import located, quotient

from deep_gemm import kernels, ops
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.launch import LaunchShape
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels import groups
from deep_gemm.kernels.base import KernelFamily, Value
from deep_gemm.kernels.families import B16_K_GROUPED, GEMMS
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.helpers import TRANSPOSE_SCALES
from deep_gemm.kernels.hopper.edges import first_column, segments
from deep_gemm.kernels.hopper.loads import _ALL_EARLY
from deep_gemm.kernels.raster import KEPT_BYTES, Raster, _read, divisor, raster
from deep_gemm.params import GemmConfig, KernelParams
from deep_gemm.spec import GemmSpec, TransposeSpec, align, ceil_div

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


def rows_loaded(first: int, edge: int, block: int, last: int) -> int:
    """How many of a tile's rows are loaded, as the device code counts them."""
    return block if first + block <= edge else last if first < edge else 0


def boxes_of(rows: int, parts: int, block: int, whole: TensorMapSpec, last: TensorMapSpec) -> list[tuple[int, int]]:
    """(first row, rows) of the boxes that a cluster's CTAs load for a tile of which ``rows`` are loaded."""
    box, found = block // parts, []
    for first in range(0, block, box):
        if first + box <= rows:
            found.append((first, whole.box[1]))
        elif first < rows:
            found.append((first, last.box[1]))
    return found


@settings(max_examples=200, deadline=None)
@given(PARAMS, geometries(), st.data())
def test_boxes_bring_the_bytes_that_the_kernel_waits_for(
    params: KernelParams, g: Geometry, data: st.DataObject
) -> None:
    """The producer of scales announces the bytes of all three loads of a stage; one byte off, and the kernel hangs.
    Boxes end at the edge or just behind it: boxes that reach beyond it arrive late."""
    c = params.gemm
    g = suited(g, params)
    recorded = record(params, g)
    maps = {name: spec for name, (spec, _) in recorded.maps.items()}
    last_rows, last_columns = (int(recorded.args[name][1]) for name in ("last_rows", "last_columns"))  # type: ignore[arg-type]
    # Some tiles, among them the last two and, with clusters, tiles past the edge.
    row = c.block_m * data.draw(st.integers(0, align(ceil_div(g.m, c.block_m), c.cluster_m) - 1))
    tiles = align(ceil_div(g.n, c.block_n), c.cluster_n)
    index = data.draw(st.integers(0, tiles - 1))
    tokens = rows_loaded(row, g.m, c.block_m, last_rows)
    boxes = boxes_of(tokens, c.cluster_n, c.block_m, maps["map_a"], maps["map_a_last"])
    checked = [(row, g.m, boxes)]
    assert sum(size for _, size in boxes) == tokens >= min(c.block_m, max(0, g.m - row))
    weights = 0
    for segment, width in enumerate(segments(c.block_n)):
        first = first_column(c.block_n, segment, index, tiles)
        whole = maps[f"map_b_{segment}" if segment else "map_b"]
        if c.swap_ab:
            existing = rows_loaded(first, g.n, width, last_columns)
        else:
            existing = min(width, max(0, g.n - first))  # as `TileColumns` counts them
        boxes = boxes_of(existing, c.cluster_m, width, whole, maps["map_b_last"])
        assert sum(size for _, size in boxes) == existing
        weights += existing
        checked.append((first, g.n, boxes))
    brought = 0
    for first, edge, boxes in checked:
        for begin, size in boxes:
            assert begin % 8 == 0  # a swizzle atom has eight rows
            assert first + begin + size < edge + 4
        brought += sum(size for _, size in boxes) * 128
    if tokens:
        box = maps["map_scale_a"] if tokens == c.block_m else maps["map_scale_a_last"]
        assert box.box == (tokens, 1)
        brought += math.prod(box.box) * 4
    assert brought == weights * 128 + tokens * (128 + 4)


def test_one_map_is_made_where_no_tile_is_whole() -> None:
    """Each map takes the host a microsecond, and a call with few tokens needs only one."""
    for config in CONFIGS:
        maps = record(make_params(config), Geometry(config.block_m // config.cluster_n - 1, 1024, 896)).maps
        assert maps["map_a"] == maps["map_a_last"]
        assert maps["map_scale_a"] == maps["map_scale_a_last"]


DENSE = [family for family in GEMMS if family.groupings == ("none",)]


def launched(
    params: KernelParams, m: int, n: int, k: int, num_sms: int = 132, pdl: bool = False, constant: bool = False
) -> tuple[LaunchShape, dict[str, Value]]:
    spec = spec_of(params, m, n, k, num_sms)
    return kernels.get(params.kernel).values(params, spec, strides(spec), numbers(spec), pdl, constant)  # type: ignore[return-value]


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["tma", "direct"]), *(st.integers(1, most) for most in (2500, 5000, 160)))
def test_every_tile_is_walked_once(
    family: GemmFamily, data: st.DataObject, store: str, m: int, n: int, num_sms: int
) -> None:
    config = data.draw(st.sampled_from(family.legal(SM90)))
    params = make_params(config, store)
    num_sms = max(num_sms, config.cluster_size)
    n = n if config.persistent or store == "direct" else align(n, 8)
    shape, values = launched(params, m, n, 128, num_sms)
    tiles_m = ceil_div(m, config.block_m * config.cluster_m)
    tiles_n = ceil_div(n, config.block_n * config.cluster_n)
    if "raster" not in values:  # a tile has all rows of D, and its columns follow from the CTA's number
        assert (shape.grid[0], shape.cluster) == (tiles_n, (1, 1, 1))
        return
    numbers: Any = values["raster"]
    assert shape.grid[0] % config.cluster_size == 0 < shape.grid[0]
    assert (shape.grid[1:], shape.cluster) == ((1, 1), (config.cluster_size, 1, 1))
    if config.persistent:
        assert shape.grid[0] <= num_sms * config.ctas_per_sm
    else:
        assert shape.grid[0] == tiles_m * tiles_n * config.cluster_size
    # As `TileScheduler` finds them.
    clusters = shape.grid[0] // config.cluster_size
    walked = [
        located(numbers, index) for cluster in range(clusters) for index in range(cluster, tiles_m * tiles_n, clusters)
    ]
    assert len(walked) == tiles_m * tiles_n
    assert set(walked) == {(i, j) for i in range(tiles_m) for j in range(tiles_n)}


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
def test_small_products_leave_sms_alone(family: GemmFamily) -> None:
    """One tile launches one cluster, however many SMs there are."""
    for config in family.legal(SM90):
        shape, _ = launched(make_params(config), 1, 16, 128)
        assert shape.grid[0] == config.cluster_size


@pytest.mark.parametrize("family", [x for x in DENSE if SM90.name in x.archs], ids=lambda family: family.name)
def test_constant_weights_are_read_early_only_by_a_programmatic_launch(family: GemmFamily) -> None:
    for config in family.configs(SM90):
        for pdl, constant in ((True, True), (True, False), (False, True)):
            _, values = launched(make_params(config), 7, 1000, 896, pdl=pdl, constant=constant)
            assert (values["early_stages"] > 0) is (pdl and constant)  # type: ignore[operator]


def test_no_ring_is_longer_than_what_means_all_of_it() -> None:
    assert max(config.num_stages for family in GEMMS for config in family.legal(SM90)) < _ALL_EARLY


def test_ctas_of_one_tile_copy_whole_pieces_of_d() -> None:
    config = find_config(block_m=128, block_n=128, persistent=False)
    with pytest.raises(InvalidInputError, match="multiple of 8, but N is 1003"):
        launched(make_params(config), 7, 1003, 896)
    launched(make_params(config, "direct"), 7, 1003, 896)
    launched(make_params(config), 7, 1000, 896)


@pytest.mark.parametrize("family", kernels.registry().values(), ids=lambda family: family.name)
def test_a_spec_of_another_kind_is_refused(family: KernelFamily) -> None:
    other = ops.spec(8, 8, 128, 132) if family is TRANSPOSE_SCALES else TransposeSpec(8, 8)
    assert family.refuses(other)


def test_launching_it_all_the_same_is_an_error() -> None:
    (params,) = TRANSPOSE_SCALES.cases()
    with pytest.raises(TypeError, match="but it transposes"):
        TRANSPOSE_SCALES.launch_plan(params, ops.spec(8, 8, 128, 132), {})


NUMBERS = st.one_of(st.integers(0, 1 << 12), st.integers(0, (1 << 31) - 1))


@settings(max_examples=500, deadline=None)
@given(NUMBERS, NUMBERS)
def test_a_divisor_divides_every_number_below_two_to_the_31(x: int, value: int) -> None:
    value = max(1, value)
    assert quotient(x, divisor(value)) == x // value
    # An error of a rounded factor shows next to multiples.
    for near in (x // value * value - 1, x // value * value):
        if near >= 0:
            assert quotient(near, divisor(value)) == near // value


@pytest.mark.parametrize("value", [1, 2, 3, 7, 128, (1 << 30) - 1, 1 << 30, (1 << 31) - 1])
def test_a_divisor_divides_the_largest_number(value: int) -> None:
    assert quotient((1 << 31) - 1, divisor(value)) == ((1 << 31) - 1) // value


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))
def test_bands_and_groups_hold_every_tile_once_m_first(rows: int, columns: int, band: int, height: int) -> None:
    order = Raster(rows, columns, min(band, columns), min(height, rows))
    found = [located(order.arguments, index) for index in range(rows * columns)]
    expected = []
    for first in range(0, columns, order.band):
        for above in range(0, rows, order.height):
            expected += [
                (row, column)
                for column in range(first, min(columns, first + order.band))
                for row in range(above, min(rows, above + order.height))
            ]
    assert found == expected


def chosen(block_m: int, block_n: int, cluster: tuple[int, int, int] = (1, 1, 1)) -> GemmConfig:
    cluster_m, cluster_n, cluster_k = cluster
    return find_config(block_m=block_m, block_n=block_n, cluster_m=cluster_m, cluster_n=cluster_n, cluster_k=cluster_k)


def wanted(order: Raster, first: int, count: int) -> tuple[int, int]:
    """How many rows and columns of tiles the ``count`` tiles from ``first`` on touch."""
    places = [located(order.arguments, index) for index in range(first, first + count)]
    return len({row for row, _ in places}), len({column for _, column in places})


@pytest.mark.parametrize(
    ("config", "m", "height"),
    [
        (chosen(128, 128), 128, 1),
        (chosen(128, 128), 512, 4),
        (chosen(256, 96), 1300, 6),  # all rows in one group, rather than four and two
        (chosen(128, 128), 4096, 4),
        (chosen(128, 128, (2, 1, 1)), 4096, 2),  # CTAs of a cluster are neighbours already
    ],
)
def test_neighbours_want_few_distinct_operands(config: GemmConfig, m: int, height: int) -> None:
    order = raster(config, m, 40960, 16384, 132)  # too many waves to count the reads of each
    assert order.height == height
    # 16 neighbours, about as many as share a path to L2, read 8 or 9 tiles of operands if there are enough rows.
    if order.rows * config.cluster_m >= 4 and (config.block_m, config.block_n) == (128, 128):
        each = config.cluster_m
        for index in range(0, order.rows * order.columns - 16 // each, 16 // each):
            rows, columns = wanted(order, index, 16 // each)
            assert rows * each + columns <= 13


@pytest.mark.parametrize(
    ("block_m", "block_n", "wide", "high"),
    [(128, 128, 4, 4), (256, 128, 4, 2), (128, 256, 2, 4), (192, 128, 4, 4), (64, 256, 2, 8)],
)
def test_where_an_operand_stays_the_other_is_gone_through_once(
    block_m: int, block_n: int, wide: int, high: int
) -> None:
    """In strips of the width at which 16 neighbours read the fewest bytes."""
    config = replace(chosen(128, 128), block_m=block_m, block_n=block_n)
    down = raster(config, 2000, 24000, 4096, 132)
    assert (down.band, down.height, down.evict_b) == (wide, 1, False)
    assert all(sorted(wanted(down, at, 16)) <= [wide, 16 // wide + 1] for at in range(0, 16 * (down.rows // 4), 16))
    across = raster(config, 24000, 2000, 4096, 132)
    assert (across.band, across.height, across.evict_b) == (across.columns, high, False)
    rows = [located(across.arguments, index)[0] for index in range(across.rows * across.columns)]
    assert all(after // high >= before // high for before, after in itertools.pairwise(rows))


@pytest.mark.parametrize(
    ("m", "n", "k", "strips"),
    [
        (2000, 24000, 14848, True),  # 30 MB of A
        (2000, 24000, 15104, False),
        (4096, 24000, 7168, False),  # a wave reads too much of B to keep both, and too little for evict-first
        (24000, 4000, 5632, True),  # 30 MB, including what a wave reads of A
        (24000, 4000, 5760, False),
        (1536, 24000, 4096, False),  # few rows of tiles, which one group holds
        (2048, 2048, 4096, False),  # one wave
        (2048, 2304, 4096, True),
    ],
)
def test_strips_are_for_operands_that_stay_and_for_waves_that_follow(m: int, n: int, k: int, strips: bool) -> None:
    order = raster(chosen(256, 128), m, n, k, 132)
    assert ((order.band, order.height) in ((4, 1), (order.columns, 2))) == strips


def reads(rows: int, columns: int, clusters: int, order: Raster, high: int, wide: int) -> int:
    """The rows of operands that waves of ``clusters`` read; a wave reads the rows of its tiles once."""
    total = 0
    for first in range(0, rows * columns, clusters):
        in_rows, in_columns = wanted(order, first, min(clusters, rows * columns - first))
        total += in_rows * high + in_columns * wide
    return total


@settings(max_examples=100, deadline=None)
@given(*(st.integers(1, most) for most in (30, 30, 30, 6, 140)), st.sampled_from([(256, 256), (128, 176)]))
def test_what_waves_read_is_counted(
    rows: int, columns: int, band: int, height: int, clusters: int, size: tuple[int, int]
) -> None:
    order = Raster(rows, columns, min(band, columns), min(height, rows))
    assert _read(rows, columns, order.band, order.height, clusters, *size) == reads(
        rows, columns, clusters, order, *size
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "megabytes"),
    [
        (4096, 7168, 16384, 570),
        (8192, 7168, 16384, 1070),
        (8192, 8192, 8192, 612),
        (8192, 4096, 7168, 261),
        (2506, 8384, 15232, 378),  # bands narrower than the formula's
    ],
)
def test_waves_read_little_where_neither_operand_stays(m: int, n: int, k: int, megabytes: int) -> None:
    """For comparison: bands of equal width and groups of four rows read 612, 1200, 679, 286 and 417 MB."""
    order = raster(chosen(256, 128, (1, 2, 1)), m, n, k, 132)
    assert reads(order.rows, order.columns, 66, order, 256, 256) * k / 1e6 == pytest.approx(megabytes, abs=1)


@settings(max_examples=100, deadline=None)
@given(st.integers(600, 9000), st.integers(600, 9000), st.sampled_from([(256, 128), (128, 192)]))
def test_no_order_that_is_counted_reads_less(m: int, n: int, block: tuple[int, int]) -> None:
    config = chosen(*block, (1, 2, 1))
    order = raster(config, m, n, 60000, 132)  # K so large that no operand stays in L2
    tiles = order.rows * order.columns
    if 66 < tiles <= 16 * 66 and order.rows > 6:
        size = config.block_m, config.block_n * 2
        best = min(max(math.isqrt(66 * size[0] // size[1]), 66 // order.rows), order.columns)
        for height in (1, 2, 4):
            other = replace(order, band=best, height=min(height, order.rows))
            assert reads(order.rows, order.columns, 66, order, *size) <= reads(
                order.rows, order.columns, 66, other, *size
            )


def test_one_wave_is_walked_as_neighbours_want_it() -> None:
    """A single wave reads the same in any order."""
    order = raster(chosen(128, 128), 1024, 2048, 16384, 132)
    assert (order.rows * order.columns, order.band, order.height) == (128, 16, 4)


@pytest.mark.parametrize("config", [chosen(128, 192, (1, 2, 1)), chosen(128, 128, (2, 1, 1))])
def test_clusters_are_neighbours_already(config: GemmConfig) -> None:
    order = raster(config, 4000, 24000, 4096, 132)
    across = config.cluster_n * config.block_n * order.band
    assert (order.height, across) == (1, 768 if config.cluster_n > 1 else 512)


@settings(max_examples=150, deadline=None)
@given(*(st.integers(1, 40000) for _ in range(3)), st.sampled_from([(128, 128), (256, 128), (256, 96)]))
def test_what_leaves_is_what_does_not_fit_beside_what_stays(m: int, n: int, k: int, block: tuple[int, int]) -> None:
    order = raster(chosen(*block), m, n, k, 132)
    if order.evict_b:
        assert m <= n
        assert m * k <= KEPT_BYTES < (m + n) * k


STRIP = 16
"""Rows of tiles that are gone through together, column by column."""


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 18), st.sampled_from([64, 128, 192, 256]), st.integers(0, (1 << 31) - 1))
def test_a_launch_has_the_numbers_that_locate_a_tile(n: int, block_n: int, index: int) -> None:
    """`GroupedScheduler::locate` divides by the columns, and by the tiles of a strip. What it makes of them is shown by
    results on a GPU: see gpu/test_m_grouped_gpu.py and the mutations of groups."""
    order = groups.order(B16_K_GROUPED.config(128, block_n), n, True, 0)
    columns = ceil_div(n, block_n)
    assert order[0] == columns
    assert quotient(index, tuple(order[4:7])) == index // columns
    assert quotient(index, tuple(order[7:10])) == index // (STRIP * columns)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 20), st.sampled_from([3, 132]))
def test_along_k_each_matrix_has_each_tile_once(m: int, n: int, count: int, num_sms: int) -> None:
    """From the numbers of a launch. The matrices follow one another, all with the same order of tiles."""
    kernel, config = B16_K_GROUPED, B16_K_GROUPED.config(128, 128)
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
def test_padding_of_masked_groups_is_skipped_where_that_pays(
    groups_and_rows: tuple[int, int], k: int, skips: bool
) -> None:
    """Few tiles for each CTA; or low groups, and columns of B that stay in L2. Otherwise CTAs only drift apart."""
    count, rows = groups_and_rows
    spec = grouped_spec("masked", 4096, k, count, rows)
    assert groups.skips_padding(spec, B16_K_GROUPED.config(128, 256)) is skips


@pytest.mark.parametrize("form", ["contiguous", "contiguous_psum"])
@pytest.mark.parametrize(
    ("count", "rows", "k", "skips"),
    [
        (32, 128, 7168, True),
        (32, 256, 7168, False),
        (32, 256, 4096, False),
        (32, 256, 1024, True),
        (8, 1024, 1024, False),
    ],
)
def test_other_padding_is_skipped_where_that_pays(form: str, count: int, rows: int, k: int, skips: bool) -> None:
    """One row of tiles for most groups; or low groups, and few bytes of B that CTAs read at a time."""
    spec = grouped_spec(form, count * rows, k, count)
    assert groups.skips_padding(spec, B16_K_GROUPED.config(128, 256)) is skips


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40), st.sampled_from(["contiguous", "contiguous_psum"]))
def test_padded_rows_are_not_padded_again(sizes: list[int], form: str) -> None:
    """High tiles are as many as there are. Of low ones no more than two for each high one are expected."""
    tiles = sum(ceil_div(size, 128) for size in sizes)
    spec = replace(grouped_spec(form, tiles * 128, 512, len(sizes)), alignment=128)
    high, low = (groups.expected(spec, B16_K_GROUPED.config(height, 128)).m for height in (128, 64))
    assert high == tiles * 128
    assert high // 2 <= low <= high


@pytest.mark.parametrize(
    ("form", "count", "rows", "k", "evicted"),
    [
        ("masked", 6, 20, 2048, 1),
        ("masked", 6, 20, 7168, 0),  # 264 MB
        ("masked", 32, 20, 2048, 0),
        ("masked", 6, 100, 2048, 0),  # two rows of tiles read B
        ("contiguous", 6, 20, 2048, 4),  # of each CTA's first tile
        ("contiguous_psum", 6, 1000, 2048, 4),
        ("contiguous", 6, 20, 7168, 0),
    ],
)
def test_few_weights_leave_l2_first(form: str, count: int, rows: int, k: int, evicted: int) -> None:
    spec = grouped_spec(form, 4096, k, count, rows)
    assert groups.evict_first(spec, B16_K_GROUPED.config(64, 128)) == evicted


@pytest.mark.parametrize(
    ("form", "rows", "ahead", "high"),
    [
        ("masked", 20, 4, 1),
        ("masked", 200, 0, 2),  # nothing is prefetched
        ("contiguous", 384, 4, 3),
        ("contiguous_psum", 640, 4, 5),
        ("contiguous", 64, 4, 1),  # as many rows of tiles as half of the groups
    ],
)
def test_weights_are_prefetched_of_the_tile_that_a_cta_has_first(form: str, rows: int, ahead: int, high: int) -> None:
    """If all groups have as many rows of tiles, ``high``."""
    spec = grouped_spec(form, 8 * rows if form != "masked" else 4096, 2048, 8, rows)
    config = B16_K_GROUPED.config(128, 128)
    assert groups.blocks_ahead(spec, config) == ahead
    columns, pace = ceil_div(spec.n, 128), groups.pace(spec, config)
    for cta in range(132):
        group, inside = divmod(cta, high * columns)
        assert cta * pace >> 16 == group * columns + inside // high
