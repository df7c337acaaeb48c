"""What the boxes of a tile bring, where it hangs over an edge and where it does not."""

from __future__ import annotations

import math

from golden_renders import make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CONFIGS, PARAMS, fp8, geometries, map_places, parameter_names, record, suited

from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.columns import first_column, segments
from deep_gemm.kernels.sm90_fp8_launch import Geometry, last_rows
from deep_gemm.params import KernelParams, SwappedConfig, align, ceil_div


def rows_loaded(first: int, edge: int, block: int, last: int) -> int:
    """Of a tile's rows of an operand, as `box.cuh` counts them."""
    return block if first + block <= edge else last if first < edge else 0


def boxes_of(rows: int, parts: int, block: int, whole: TensorMapSpec, last: TensorMapSpec) -> list[tuple[int, int]]:
    """(first row, rows) of the boxes that a cluster's CTAs bring of a tile of which ``rows`` are loaded."""
    box, found = block // parts, []
    for first in range(0, block, box):
        if first + box <= rows:
            found.append((first, whole.box[1]))
        elif first < rows:
            found.append((first, last.box[1]))
    return found


@settings(max_examples=500, deadline=None)
@given(PARAMS, geometries(), st.data())
def test_boxes_bring_the_bytes_that_the_kernel_waits_for(
    params: KernelParams, g: Geometry, data: st.DataObject
) -> None:
    """The producer of scales announces for each block of K of a stage what all three bring; one byte off, and the
    kernel hangs. Boxes end at the edge, or just behind it: those that hang over it arrive late."""
    c = fp8(params)
    g = suited(g, params)
    recorded = record(params, g)
    maps = {name: recorded.maps[place][0] for name, place in map_places(params).items() if name != "map_d"}
    numbers = {n: arg[1] for n, arg in zip(parameter_names(params), recorded.args, strict=True) if arg[0] == "u32"}
    depth = c.stage_blocks
    # A tile of these, the last two among them, and with clusters what lies past the edge.
    row = c.block_m * data.draw(st.integers(0, align(ceil_div(g.m, c.block_m), c.cluster_m) - 1))
    tiles = align(ceil_div(g.n, c.block_n), c.cluster_n)
    index = data.draw(st.integers(0, tiles - 1))
    tokens = rows_loaded(row, g.m, c.block_m, int(numbers["last_rows"]))
    # Of tokens past a tile's slices all are loaded or none; their box is small, and may hang over the edge.
    extra, upright = c.extra_tokens, c.block_m - c.extra_tokens
    has_extra = extra > 0 and tokens > upright
    boxes = boxes_of(min(tokens, upright), c.cluster_n, upright, maps["map_a"], maps["map_a_last"])
    checked = [(row, g.m, boxes)]
    if has_extra:
        assert upright % 8 == 0
        assert maps["map_a_extra"].box == (128, extra)
        assert maps["map_scale_a_extra"].box == (extra, 1)
    assert sum(size for _, size in boxes) + extra * has_extra == tokens >= min(c.block_m, max(0, g.m - row))
    weights = 0
    for segment, width in enumerate(segments(c.block_n)):
        first = first_column(c.block_n, segment, index, tiles)
        whole = maps[f"map_b_{segment}" if segment else "map_b"]
        if isinstance(c, SwappedConfig):
            existing = rows_loaded(first, g.n, width, int(numbers["last_columns"]))
        else:
            existing = min(width, max(0, g.n - first))  # as `TileColumns` counts them
        boxes = boxes_of(existing, c.cluster_m, width, whole, maps["map_b_last"])
        assert sum(size for _, size in boxes) == existing
        weights += existing
        checked.append((first, g.n, boxes))
    brought = 0
    for first, edge, boxes in checked:
        for begin, size in boxes:
            assert begin % 8 == 0  # on a swizzle atom of eight rows; else later rows would be permuted differently
            assert depth > 1 or first + begin + size < edge + 4
        brought += sum(size for _, size in boxes) * 128 * depth
    brought += extra * 128 * has_extra
    if tokens:
        box = maps["map_scale_a"] if tokens >= upright else maps["map_scale_a_last"]
        assert box.box == (min(tokens, upright), depth)
        brought += (math.prod(box.box) + extra * has_extra) * 4
    assert brought == (weights * 128 + tokens * (128 + 4)) * depth
    # A box of several blocks is packed block after block: the next begins where the kernel looks for it.
    operands = ("map_a", "map_b", "map_a_last", "map_b_last")
    assert depth == 1 or [maps[name].box[1] for name in operands] == [c.block_m, c.block_n] * 2


def test_tokens_past_a_tiles_slices_are_all_loaded_or_none() -> None:
    """As many as are announced: of a tile whose last ones are missing, the box brings zeros for them."""
    for config in CONFIGS:
        if extra := config.extra_tokens:
            upright = config.block_m - extra
            for left in range(1, config.block_m + 1):
                loaded = align(left, 4) if left <= upright else config.block_m
                assert last_rows(config, config.block_m + left) == loaded


def test_one_map_is_made_where_no_tile_is_whole() -> None:
    """Each costs the host a microsecond, and a call with few tokens has no other."""
    for config in CONFIGS:
        few = (config.block_m - config.extra_tokens) // config.cluster_n - 1
        g = Geometry(few, 1024, 896, 896, 896, 1024, 256, (8, 1))
        params = make_params(config)
        maps, places = record(params, g).maps, map_places(params)
        assert maps[places["map_a"]] == maps[places["map_a_last"]]
        assert maps[places["map_scale_a"]] == maps[places["map_scale_a_last"]]
