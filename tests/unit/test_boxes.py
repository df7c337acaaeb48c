"""The TMA boxes of a tile, inside the matrix and at its edges."""

from __future__ import annotations

import math

from chosen import make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CONFIGS, PARAMS, Geometry, geometries, record, suited

from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.hopper.edges import first_column, segments
from deep_gemm.params import KernelParams
from deep_gemm.spec import align, ceil_div


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
