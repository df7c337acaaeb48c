"""Tiles of dense GEMMs: their columns, their TMA boxes, which CTA computes which, and what is refused."""

import math
from typing import Any

import pytest
from chosen import find_config, make_params
from forced import spec_of
from house_choices import numbers, strides
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CONFIGS, PARAMS, Geometry, geometries, record, suited
from rasters import located

from deep_gemm import kernels, ops
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.launch import LaunchShape
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.base import KernelFamily, Value
from deep_gemm.kernels.families import GEMMS
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.helpers import TRANSPOSE_SCALES
from deep_gemm.kernels.hopper.edges import first_column, segments
from deep_gemm.kernels.hopper.loads import _ALL_EARLY
from deep_gemm.params import KernelParams
from deep_gemm.spec import TransposeSpec, align, ceil_div

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
    numbers: Any = values["raster"]
    tiles_m = ceil_div(m, config.block_m * config.cluster_m)
    tiles_n = ceil_div(n, config.block_n * config.cluster_n)
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
