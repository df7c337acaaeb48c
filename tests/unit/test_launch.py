"""The arguments of launches of the FP8 GEMMs and of the transposing kernel, for random geometries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from chosen import FAMILIES, SWAPPED, find_config, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import (
    AT,
    CONFIGS,
    PARAMS,
    SIZES,
    UPRIGHT,
    Geometry,
    fp8,
    geometries,
    is_persistent,
    map_names,
    maps_output,
    parameter_names,
    record,
    suited,
)
from rasters import located

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.launch import placed
from deep_gemm.kernels import copy_rows, transpose_scales
from deep_gemm.kernels.loads import _ALL_EARLY, early_stages
from deep_gemm.kernels.raster import raster
from deep_gemm.kernels.tiles import segments
from deep_gemm.params import FP8Config, KernelParams, SwappedConfig, UprightConfig
from deep_gemm.spec import CopySpec, TransposeSpec, align, ceil_div

ELEMENT_BYTES = {"u8": 1, "bf16": 2, "f32": 4}


@settings(max_examples=150, deadline=None)
@given(PARAMS, geometries())
def test_tensor_maps_are_of_the_right_tensors_and_within_the_limits_of_the_hardware(
    params: KernelParams, g: Geometry
) -> None:
    g = suited(g, params)
    maps, names = record(params, g).maps, map_names(params)
    swapped = isinstance(params.config, SwappedConfig)
    assert len(names) == (6 if swapped else 7 + len(segments(fp8(params).block_n)) - 1)
    assert maps.keys() == {name for name in names if name != "map_d" or maps_output(params)}
    for name, (spec, address) in maps.items():
        size = ELEMENT_BYTES[spec.dtype]
        assert spec.swizzle == 0 or spec.box[0] * size == spec.swizzle
        assert spec.strides[0] >= spec.dims[0] * size  # rows do not overlap
        if name.startswith("map_scale_a"):
            of = "f32", (g.m, ceil_div(g.k, 128)), (4 * g.stride_sfa,), AT["sfa"]
        elif name == "map_d":
            of = "bf16", (g.n, g.m), (2 * g.stride_d,), AT["d"]
        elif name.startswith("map_a"):
            of = "u8", (g.k, g.m), (g.stride_a,), AT["a"]
        else:
            of = "u8", (g.k, g.n), (g.stride_b,), AT["b"]
        assert (spec.dtype, spec.dims, spec.strides, address) == of
        if spec.dtype == "u8":
            assert spec.swizzle == 128  # wgmma reads rows of 128 swizzled bytes
            # Where D is larger than B and rows begin with lines, L2 promotion loads two blocks of K together.
            promoted = 256 if 2 * g.m * g.n > g.n * g.k and spec.strides[0] % 128 == 0 else 128
            assert spec.l2_promotion == promoted


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([config for config in UPRIGHT if config.persistent]))
def test_stores_are_cut_as_the_kernel_cuts_its_staging_area(config: UprightConfig) -> None:
    d, _ = record(make_params(config), Geometry(300, 1000, 896)).maps["map_d"]
    finished = config.block_n // config.k_splits  # by a consumer
    columns = 64 if finished % 64 == 0 else 32 if finished % 32 == 0 else 16
    assert d.box == (columns, 64)
    assert d.swizzle == 2 * columns


def test_what_a_cta_begins_with_shares_a_line_of_constants() -> None:
    """Lines of constant memory have 64 bytes. Parameters begin at 0x210 of sm_90's bank, so the first line has room for
    twelve numbers."""
    for config in (UPRIGHT[0], CONFIGS[-1]):
        names = parameter_names(make_params(config))
        assert names[:7] == ["m", "n", "k", "last_rows", "last_columns", "early_stages", "raster"]


def test_ctas_of_one_tile_copy_whole_pieces_of_d() -> None:
    config = next(config for config in UPRIGHT if not config.persistent)
    g = Geometry(7, 1003, 896)
    with pytest.raises(InvalidInputError, match="multiple of 8, but N is 1003"):
        record(make_params(config), g)
    record(make_params(config, "direct"), g)
    record(make_params(config), replace(g, n=1000))


@settings(max_examples=150, deadline=None)
@given(PARAMS, st.integers(1, 2500), st.integers(1, 5000), st.integers(1, 160))
def test_every_tile_is_walked_once(params: KernelParams, m: int, n: int, num_sms: int) -> None:
    config = fp8(params)
    num_sms = max(num_sms, config.cluster_size)
    g = suited(Geometry(m, n, 128), params)
    recorded = record(params, g, num_sms)
    shape = recorded.shape
    assert shape.grid[0] % config.cluster_size == 0
    assert config.cluster_size <= shape.grid[0]
    assert shape.grid[1:] == (1, 1)
    assert shape.cluster == (config.cluster_size, 1, 1)
    numbers = recorded.args["raster"][1]
    assert isinstance(numbers, tuple)
    tiles_m = ceil_div(m, config.block_m * config.cluster_m)
    tiles_n = ceil_div(g.n, config.block_n * config.cluster_n)
    if is_persistent(config):
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


def test_bands_are_equally_wide() -> None:
    """A last band of one column would read all of A for little work."""
    for config in CONFIGS:
        for n in (576, 2112, 7168, 24576):
            tiles = ceil_div(n, config.block_n * config.cluster_n)
            band = raster(config, 200_000, n, 16384, 132).band  # too many waves to count the reads of each
            assert tiles - (ceil_div(tiles, band) - 1) * band >= band - ceil_div(tiles, band), (config, n)


TYPES = {"TensorMap": bytes, "Raster": "u32s", "i64": "i64", "u32": "u32"}


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("config", [UPRIGHT[0], CONFIGS[-1]], ids=["upright", "swapped"])
def test_arguments_have_the_types_and_values_of_the_kernels_parameters(config: FP8Config, store: str) -> None:
    params = make_params(config, store)
    args = record(params, Geometry(200, 1000, 912, 928, 960, 1016, 208, (8, 1))).args
    declared = kernels.get(params.kernel).arguments(params)
    for argument in declared:
        arg = args[argument.name]
        assert TYPES.get(argument.ctype, "ptr") == (bytes if isinstance(arg, bytes) else arg[0])
    values = {name: arg[1] for name, arg in args.items() if not isinstance(arg, bytes)}
    del values["last_rows"], values["last_columns"], values["raster"]
    assert values == {
        "scale_b": AT["sfb"],
        "scale_b_stride_n": 8,
        "scale_b_stride_k": 1,
        "d": AT["d"],
        "d_stride": 1016,
        "m": 200,
        "n": 1000,
        "k": 912,
        "early_stages": 0,
        "evict_first": 0,
    }


@pytest.mark.parametrize("config", [UPRIGHT[0], CONFIGS[-1]], ids=["upright", "swapped"])
def test_constant_weights_are_read_early_only_by_a_programmatic_launch(config: FP8Config) -> None:
    g, params = Geometry(7, 1000, 896), make_params(config)
    early = early_stages(config, g.m, g.k)
    assert early > 0
    for pdl, constant, passed in ((True, True, early), (True, False, 0), (False, True, 0)):
        assert record(params, g, pdl=pdl, constant=constant).args["early_stages"] == ("u32", passed)


def test_no_ring_is_longer_than_what_means_all_of_it() -> None:
    assert max(config.num_stages for kernel in FAMILIES for config in kernel.legal(SM90)) < _ALL_EARLY


@pytest.mark.parametrize(
    ("m", "k", "tile", "early"),
    [
        (64, 1024, (64, 128), 2),  # D has an eighth of B's bytes
        (64, 1040, (64, 128), _ALL_EARLY),
        (65, 1024, (64, 128), _ALL_EARLY),  # there are two rows of tiles
        (8, 7168, (8, 64), _ALL_EARLY),
        (64, 7168, (64, 64), _ALL_EARLY),
        (64, 7168, (64, 32), 2),  # a stage has more bytes of tokens than of weights
    ],
)
def test_few_stages_come_early_where_the_previous_kernel_has_more_to_do_than_loads(
    m: int, k: int, tile: tuple[int, int], early: int
) -> None:
    family = FAMILIES[0] if tile[0] >= 64 else SWAPPED
    assert early_stages(find_config(family, block_m=tile[0], block_n=tile[1]), m, k) == early


def evict_first(params: KernelParams, g: Geometry) -> object:
    """Which operands are evict-first, as bits: 1 for B, 2 for D."""
    kind, bits = record(params, g).args["evict_first"]
    assert kind == "u32"
    return bits


def test_weights_leave_l2_first_where_all_that_read_them_do_so_at_one_time() -> None:
    for config in CONFIGS:
        rows, most = config.block_m * config.cluster_m, 6 // config.cluster_m  # cluster tiles in one group
        # With up to eight blocks of K, CTAs do not read in step.
        for m, k, once in (
            (1, 896, 1),
            (rows * most, 1152, 1),
            (rows * most, 1024, most == 1),
            (rows * most + 1, 1152, 0),
        ):
            assert evict_first(make_params(config), Geometry(m, 1000, k)) == once


TMA = 2
"""Evict-first for D, by kernels that store it with TMA."""
WIDE = find_config(block_m=256, block_n=128)


@pytest.mark.parametrize(
    ("config", "shape", "leaves"),
    [
        (WIDE, (8192, 7168, 16384), TMA),  # neither operand stays
        (WIDE, (1893, 30176, 12800), TMA | 1),  # 24 MB of A stay in L2 if B is evict-first
        (WIDE, (30176, 1896, 12800), TMA),
        (WIDE, (4096, 4096, 7168), 0),  # a wave reads little
        (WIDE, (3921, 26816, 2176), TMA),  # what a wave reads stays
        (WIDE, (4096, 12200, 1024), 0),  # part of D is still in L2 when it is read
        (WIDE, (4096, 12208, 1024), TMA),
        (replace(WIDE, persistent=False), (4096, 12208, 1024), 0),  # type: ignore[call-arg]
    ],
)
def test_what_would_push_out_what_is_needed_again_leaves_l2_first(
    config: FP8Config, shape: tuple[int, int, int], leaves: int
) -> None:
    for store, found in (("tma", leaves), ("direct", leaves & ~TMA)):
        assert evict_first(make_params(config, store), Geometry(*shape)) == found


@pytest.mark.parametrize("pdl", [False, True])
def test_the_shape_of_a_launch(pdl: bool) -> None:
    for config in CONFIGS:
        params = make_params(config)
        shape = record(params, Geometry(200, 1000, 896), pdl=pdl).shape
        assert shape.block == 128 * (config.num_consumers + 1) <= 1024
        assert shape.dynamic_shared == kernels.get(params.kernel).shared_bytes(params)
        assert shape.pdl is pdl


def test_small_products_leave_sms_alone() -> None:
    """One tile launches one cluster, however many SMs there are."""
    for config in CONFIGS:
        assert record(make_params(config), Geometry(1, 16, 128)).shape.grid[0] == config.cluster_size


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), SIZES, st.integers(1, 500))
def test_transposing_covers_rows_and_columns(batch: int, rows: int, columns: int) -> None:
    kernel = transpose_scales.KERNEL
    (params,) = kernel.cases()
    plan = kernel.launch(params, TransposeSpec(rows, columns, batch), {"source": (rows * columns, columns, 1)})
    args = placed(plan.parameters, {"source": 0x100, "target": 0x200})
    assert dict(zip(parameter_names(params), args, strict=True)) == {
        "input": ("ptr", 0x100),
        "output": ("ptr", 0x200),
        "rows": ("u32", rows),
        "columns": ("u32", columns),
        "stride_row": ("i64", columns),
        "stride_column": ("i64", 1),
        "stride_batch": ("i64", rows * columns),
        "padded_rows": ("u32", align(rows, 4)),
    }
    fields = kernel.fields(params)
    across = ceil_div(columns, 32)
    assert plan.shape.grid == (math.ceil(align(rows, 4) / int(fields["tile_rows"])) * across * batch, 1, 1)
    assert plan.shape.block == fields["num_threads"]


@settings(max_examples=200, deadline=None)
@given(SIZES, st.one_of(st.integers(1, 500), st.just(2**31 - 1)), st.integers(0, 1 << 40))
def test_copying_covers_rows_and_columns(rows: int, columns: int, stride: int) -> None:
    kernel = copy_rows.KERNEL
    (params,) = kernel.cases()
    plan = kernel.launch(params, CopySpec(rows, columns), {"source": (1, stride)})
    args = placed(plan.parameters, {"source": 0x100, "target": 0x200})
    assert dict(zip(parameter_names(params), args, strict=True)) == {
        "input": ("ptr", 0x100),
        "output": ("ptr", 0x200),
        "rows": ("u32", rows),
        "columns": ("u32", columns),
        "stride_row": ("i64", 1),
        "stride_column": ("i64", stride),
        "padded_columns": ("u32", align(columns, 8)),
    }
    tiles = ceil_div(rows, 64) * ceil_div(columns, 64)
    assert plan.shape.grid == (min(tiles, copy_rows.MAX_CTAS), 1, 1)
    assert plan.shape.block == kernel.fields(params)["num_threads"]


ALL = [*FAMILIES, transpose_scales.KERNEL, copy_rows.KERNEL]


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_a_spec_of_another_kind_is_refused(kernel: object) -> None:
    """Each family gives a reason, and raises if it is asked to launch all the same."""
    params = kernel.cases()[0]  # type: ignore[attr-defined]
    other = Geometry(8, 8, 128).spec(params) if kernel is transpose_scales.KERNEL else TransposeSpec(8, 8)
    assert kernel.refuses(other)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="but it was asked for"):
        kernel.launch(params, other, {})  # type: ignore[attr-defined]
