"""What a launch of the FP8 GEMM and of the transposing kernel passes to the driver, for random geometries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from golden_renders import FAMILIES, find_config, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import (
    AT,
    CONFIGS,
    PARAMS,
    SIZES,
    UNSWAPPED,
    encoder,
    fp8,
    geometries,
    launch_at,
    map_places,
    maps_output,
    parameter_names,
    parameters,
    record,
    suited,
)
from rasters import located

from deep_gemm import arch, kernels
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.launch import Arg, placed
from deep_gemm.kernels import transpose_scales
from deep_gemm.kernels.columns import segments
from deep_gemm.kernels.raster import divisor, raster
from deep_gemm.kernels.sm90_fp8_launch import _ALL_EARLY, Geometry, _early_stages
from deep_gemm.kernels.stream_k import Stream, stream
from deep_gemm.params import FP8Config, KernelParams, SwappedConfig, align, ceil_div

ELEMENT_BYTES = {"u8": 1, "bf16": 2, "f32": 4}


@settings(max_examples=500, deadline=None)
@given(PARAMS, geometries())
def test_tensor_maps_are_within_the_limits_of_the_hardware(params: KernelParams, g: Geometry) -> None:
    g = suited(g, params)
    maps = record(params, g).maps
    places = map_places(params)
    config, swapped = fp8(params), isinstance(params.config, SwappedConfig)
    extras = 2 if config.extra_tokens else 0  # of tokens past a tile's slices, and of their scales
    assert len(places) == (6 if swapped else 7 + len(segments(config.block_n)) - 1 + extras)
    assert sorted(maps) == sorted(places[name] for name in places if name != "map_d" or maps_output(params))
    for spec, address in maps.values():
        size = ELEMENT_BYTES[spec.dtype]
        assert len(spec.dims) == len(spec.box) == len(spec.strides) + 1
        assert all(1 <= length <= 1 << 32 for length in spec.dims)
        assert all(1 <= length <= 256 for length in spec.box)
        assert all(stride % 16 == 0 and stride < 1 << 40 for stride in spec.strides)
        assert spec.box[0] * size % 16 == 0
        assert spec.swizzle == 0 or spec.box[0] * size == spec.swizzle
        assert address % 16 == 0
        # Rows do not overlap; blocks of K, where they are a dimension of their own, lie inside them.
        row = spec.dims[0] * size if len(spec.dims) == 2 else spec.strides[1] * spec.dims[2]
        assert spec.strides[0] >= row


@settings(max_examples=500, deadline=None)
@given(PARAMS, geometries())
def test_tensor_maps_are_of_the_right_tensors(params: KernelParams, g: Geometry) -> None:
    g = suited(g, params)
    maps = record(params, g).maps
    blocks = ceil_div(g.k, 128)
    places = map_places(params)
    of_a, of_b = (g.m, g.stride_a, AT.a), (g.n, g.stride_b, AT.b)
    named = {name: of_a if name.startswith("map_a") else of_b for name in places if name.startswith(("map_a", "map_b"))}
    for name, (rows, stride, address) in named.items():
        spec, at = maps[places[name]]
        assert at == address
        assert (spec.dtype, spec.swizzle) == ("u8", 128)  # wgmma reads rows of 128 swizzled bytes
        if fp8(params).stage_blocks == 1:
            assert (spec.dims, spec.strides) == ((g.k, rows), (stride,))
        else:
            assert (spec.dims, spec.strides) == ((128, rows, g.k // 128), (stride, 128))
    for spec, at in (maps[places[name]] for name in places if name.startswith("map_scale_a")):
        assert (spec.dtype, spec.dims, spec.strides, at) == ("f32", (g.m, blocks), (4 * g.stride_sfa,), AT.sfa)
    if maps_output(params):
        d, at = maps[places["map_d"]]
        assert (d.dims, d.strides, at) == ((g.n, g.m), (2 * g.stride_d,), AT.d)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([config for config in UNSWAPPED if config.persistent]), geometries())
def test_stores_are_cut_as_the_kernel_cuts_its_staging_area(config: FP8Config, g: Geometry) -> None:
    params = make_params(config)
    d = record(params, g).maps[map_places(params)["map_d"]][0]
    finished = config.block_n // config.k_shares  # by a consumer
    columns = 64 if finished % 64 == 0 else 32 if finished % 32 == 0 else 16
    assert d.box == (columns, 64)
    assert d.swizzle == 2 * columns


@settings(max_examples=50, deadline=None)
@given(PARAMS)
def test_what_a_cta_begins_with_shares_a_line_of_constants(params: KernelParams) -> None:
    """Lines have 64 bytes. Parameters begin at 0x210 of sm_90's bank: the first line has room for twelve numbers."""
    g = suited(Geometry(300, 1000, 896, 896, 896, 1000, 300, (7, 1)), params)
    names, recorded = parameter_names(params), record(params, g)
    assert names[:7] == ["m", "n", "k", "last_rows", "last_columns", "early_stages", "raster"]
    config = fp8(params)
    order = raster(config, g.m, g.n, g.k, 132, stream(config, g.m, g.n, g.k, 132).members if config.stream_k else 1)
    last_height = order.rows - (ceil_div(order.rows, order.height) - 1) * order.height
    kind, numbers = recorded.args[6]
    assert kind == "u32s"
    assert isinstance(numbers, tuple)
    assert numbers[:6] == (order.rows, order.columns, order.band, *divisor(last_height))


def test_ctas_of_one_tile_copy_whole_pieces_of_d() -> None:
    config = next(config for config in UNSWAPPED if not config.persistent)
    g = Geometry(7, 1003, 896, 896, 896, 1008, 8, (8, 1))
    with pytest.raises(InvalidInputError, match="multiple of 8, but N is 1003"):
        record(make_params(config), g)
    record(make_params(config, "direct"), g)
    record(make_params(config), replace(g, n=1000))


@settings(max_examples=200, deadline=None)
@given(PARAMS, geometries())
def test_rows_come_into_l2_by_two_blocks_of_k_where_d_is_larger_than_b_and_sectors_are_whole(
    params: KernelParams, g: Geometry
) -> None:
    g = suited(g, params)
    maps = record(params, g).maps.values()
    for address, stride in ((AT.a, g.stride_a), (AT.b, g.stride_b)):
        promoted = {spec.l2_promotion for spec, at in maps if at == address}
        assert promoted == {256 if 2 * g.m * g.n > g.n * g.k and stride % 32 == 0 else 128}


def walk(config: FP8Config, g: Geometry, clusters: int, numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cluster tiles (along m, along n) in the order of all clusters, as `TileScheduler` finds them."""
    tiles_m = ceil_div(g.m, config.block_m * config.cluster_m)
    tiles_n = ceil_div(g.n, config.block_n * config.cluster_n)
    return [
        located(numbers, index) for cluster in range(clusters) for index in range(cluster, tiles_m * tiles_n, clusters)
    ]


@settings(max_examples=400, deadline=None)
@given(PARAMS, st.integers(1, 2500), st.integers(1, 5000), st.integers(1, 160))
def test_every_tile_is_walked_once(params: KernelParams, m: int, n: int, num_sms: int) -> None:
    config = fp8(params)
    num_sms = max(num_sms, config.cluster_size)
    g = suited(Geometry(m, n, 128, 128, 128, align(n, 8), align(m, 4), (1, 1)), params)
    n = g.n  # a multiple of 8 where it must be one
    recorded = record(params, g, num_sms)
    shape, arguments = recorded.shape, dict(zip(parameter_names(params), recorded.args, strict=True))
    assert shape.grid[0] % config.cluster_size == 0
    assert config.cluster_size <= shape.grid[0]
    if config.persistent:
        assert shape.grid[0] <= num_sms * config.ctas_per_sm
    assert shape.grid[1:] == (1, 1)
    assert shape.cluster == (config.cluster_size, 1, 1)
    numbers = arguments["raster"][1]
    band = numbers[2]
    tiles_m = ceil_div(m, config.block_m * config.cluster_m)
    tiles_n = ceil_div(n, config.block_n * config.cluster_n)
    assert config.persistent or shape.grid[0] == tiles_m * tiles_n * config.cluster_size
    assert 1 <= band <= tiles_n
    if config.stream_k:
        walked = stream_places(stream(config, m, n, 128, num_sms), numbers)
    else:
        walked = walk(config, g, shape.grid[0] // config.cluster_size, numbers)
    assert len(walked) == tiles_m * tiles_n
    assert set(walked) == {(i, j) for i in range(tiles_m) for j in range(tiles_n)}


def stream_places(dealt: Stream, numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where `StreamScheduler` finds the tiles of a launch, for every member of a group."""
    found = []
    for tile in range(dealt.rows * dealt.columns):
        row, column = located(numbers, tile)
        found += [(row * dealt.members + member, column) for member in range(dealt.members)]
    return found


def test_bands_are_equally_wide() -> None:
    """A last band of one column would read all of A for little."""
    for config in CONFIGS:
        for n in (576, 2112, 7168, 24576):
            tiles = ceil_div(n, config.block_n * config.cluster_n)
            band = raster(config, 200_000, n, 16384, 132).band  # too many waves to count what each reads
            assert tiles - (ceil_div(tiles, band) - 1) * band >= band - ceil_div(tiles, band), (config, n)


TYPES = {
    "const __grid_constant__ TensorMap": bytes,
    "const __grid_constant__ Raster": "u32s",
    "i64": "i64",
    "u32": "u32",
}


def check_types(params: KernelParams, args: list[Arg]) -> None:
    declared = [TYPES.get(kind, "ptr" if kind.endswith("*") else kind) for kind, _ in parameters(params)]
    assert declared == [bytes if isinstance(arg, bytes) else arg[0] for arg in args]


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=["unswapped", "swapped"])
def test_arguments_are_the_parameters_of_the_kernel(config: FP8Config, store: str) -> None:
    g = Geometry(200, 1000, 912, 928, 960, 1016, 208, (8, 1))
    params = make_params(config, store)
    recorded = record(params, g)
    check_types(params, recorded.args)
    values = {
        name: arg[1]
        for name, arg in zip(parameter_names(params), recorded.args, strict=True)
        if not isinstance(arg, bytes)
    }
    del values["last_rows"], values["last_columns"], values["raster"]
    assert values == {
        "scale_b": AT.sfb,
        "scale_b_stride_n": 8,
        "scale_b_stride_k": 1,
        "d": AT.d,
        "d_stride": 1016,
        "m": 200,
        "n": 1000,
        "k": 912,
        "early_stages": 0,
        "leave_first": 0,
    }


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=["unswapped", "swapped"])
def test_constant_weights_are_read_early_only_by_a_programmatic_launch(config: FP8Config) -> None:
    g = Geometry(7, 1000, 896, 896, 896, 1000, 8, (7, 1))
    params = make_params(config)
    place, early = parameter_names(params).index("early_stages"), _early_stages(config, g.m, g.k)
    assert early > 0
    with encoder():
        for pdl, constant, passed in ((True, True, early), (True, False, 0), (False, True, 0)):
            assert launch_at(params, g, AT, 132, pdl, constant)[1][place] == ("u32", passed)


def test_no_ring_is_longer_than_what_means_all_of_it() -> None:
    assert max(config.num_stages for kernel in FAMILIES for config in kernel.configs(arch.SM90)) < _ALL_EARLY


@pytest.mark.parametrize(
    ("m", "k", "tile", "early"),
    [
        (64, 1024, (64, 128), 2),  # D has an eighth of B's bytes
        (64, 1040, (64, 128), _ALL_EARLY),
        (65, 1024, (64, 128), _ALL_EARLY),  # two rows of tiles
        (8, 7168, (8, 64), _ALL_EARLY),
        (64, 7168, (64, 64), _ALL_EARLY),
        (64, 7168, (64, 32), 2),  # a stage has more bytes of tokens than of weights
    ],
)
def test_few_stages_come_early_where_the_previous_kernel_has_more_to_do_than_loads(
    m: int, k: int, tile: tuple[int, int], early: int
) -> None:
    assert _early_stages(find_config(block_m=tile[0], block_n=tile[1]), m, k) == early


def leave_first(params: KernelParams, g: Geometry) -> object:
    """Bits: 1 for B, 2 for D."""
    kind, bits = dict(zip(parameter_names(params), record(params, g).args, strict=True))["leave_first"]
    assert kind == "u32"
    return bits


def test_weights_leave_l2_first_where_all_that_read_them_do_so_at_one_time() -> None:
    for config in CONFIGS:
        rows, most = config.block_m * config.cluster_m, 6 // config.cluster_m  # of cluster tiles that are one group
        # With up to eight blocks of K, readers are not in step.
        for m, k, once in (
            (1, 896, 1),
            (rows * most, 1152, 1),
            (rows * most, 1024, most == 1),
            (rows * most + 1, 1152, 0),
        ):
            g = Geometry(m, 1000, k, k, k, 1000, align(m, 4), (ceil_div(k, 128), 1))
            assert leave_first(make_params(config), g) == once


TMA = 2
"""D, by kernels that leave it to TMA."""
WIDE = find_config(block_m=256, block_n=128)


@pytest.mark.parametrize(
    ("config", "shape", "leaves"),
    [
        (WIDE, (8192, 7168, 16384), TMA),  # neither operand stays
        (WIDE, (1893, 30176, 12800), TMA | 1),  # 24 MB of A stay if B goes by
        (WIDE, (30176, 1896, 12800), TMA),
        (WIDE, (4096, 4096, 7168), 0),  # a wave reads little
        (WIDE, (3921, 26816, 2176), TMA),  # what a wave reads stays
        (WIDE, (4096, 12200, 1024), 0),  # some of D is there when it is read
        (WIDE, (4096, 12208, 1024), TMA),
        (replace(WIDE, persistent=False), (4096, 12208, 1024), 0),
        (find_config(block_m=256, block_n=128, stream_k=True), (1893, 30176, 12800), TMA),
    ],
)
def test_what_would_push_out_what_is_needed_again_leaves_l2_first(
    config: FP8Config, shape: tuple[int, int, int], leaves: int
) -> None:
    m, n, k = shape
    g = Geometry(m, n, k, k, k, n, align(m, 4), (ceil_div(k, 128), 1))
    for store, found in (("tma", leaves), ("direct", leaves & ~TMA)):
        assert leave_first(make_params(config, store), g) == found


@pytest.mark.parametrize("pdl", [False, True])
def test_the_shape_of_a_launch(pdl: bool) -> None:
    g = Geometry(200, 1000, 896, 896, 896, 1000, 200, (8, 1))
    for config in CONFIGS:
        params = make_params(config)
        shape = record(params, g, pdl=pdl).shape
        assert shape.block == 128 * (config.num_consumers + 1) <= 1024
        assert shape.dynamic_shared == kernels.get(params.kernel).shared_bytes(params)
        assert shape.pdl is pdl


def test_blocks_of_k_in_a_stage_must_be_whole() -> None:
    g = Geometry(7, 1000, 912, 912, 912, 1000, 8, (8, 1))
    config = next(c for c in CONFIGS if getattr(c, "stage_blocks", 1) > 1)
    with pytest.raises(InvalidInputError, match="multiple of 128, but K is 912"):
        record(make_params(config), g)


def test_small_products_leave_sms_alone() -> None:
    """One tile is one cluster, however many SMs there are."""
    for config in CONFIGS:
        g = Geometry(1, 16, 128, 128, 128, 16, 4, (1, 1))
        assert record(make_params(config), g).shape.grid[0] == config.cluster_size


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), SIZES, st.integers(1, 500))
def test_transposing_covers_rows_and_columns(batch: int, rows: int, columns: int) -> None:
    strides = (rows * columns, columns, 1)
    shape, parameters = transpose_scales.launch((batch, rows, columns), strides, False)
    args = placed(parameters, {"source": 0x100, "target": 0x200})
    params = transpose_scales.make_params(arch.SM90)
    values = {name: arg[1] for name, arg in zip(parameter_names(params), args, strict=True)}
    assert values == {
        "input": 0x100,
        "output": 0x200,
        "rows": rows,
        "columns": columns,
        "stride_row": columns,
        "stride_column": 1,
        "stride_batch": rows * columns,
        "padded_rows": align(rows, 4),
    }
    fields = transpose_scales.KERNEL.fields(params)
    across = ceil_div(columns, 32)
    assert shape.grid == (math.ceil(align(rows, 4) / int(fields["tile_rows"])) * across * batch, 1, 1)
    assert shape.block == fields["num_threads"]


def test_arguments_of_the_transposing_kernel() -> None:
    params = transpose_scales.make_params(arch.SM90)
    parameters = transpose_scales.launch((1, 7, 9), (63, 9, 1), False)[1]
    check_types(params, placed(parameters, {"source": 0x100, "target": 0x200}))
