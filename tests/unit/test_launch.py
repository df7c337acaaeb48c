"""Launches of all dense GEMMs: which tiles CTAs compute, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from chosen import find_config, make_params
from forced import spec_of
from house_choices import numbers, strides
from hypothesis import given, settings
from hypothesis import strategies as st
from rasters import located

from deep_gemm import kernels, ops
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver.launch import LaunchShape
from deep_gemm.kernels.base import Kernel, Value
from deep_gemm.kernels.families import GEMMS
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.helpers import TRANSPOSE_SCALES
from deep_gemm.kernels.hopper.loads import _ALL_EARLY
from deep_gemm.params import KernelParams
from deep_gemm.spec import TransposeSpec, align, ceil_div

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


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
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
def test_a_spec_of_another_kind_is_refused(family: Kernel) -> None:
    other = ops.spec(8, 8, 128, 132) if family is TRANSPOSE_SCALES else TransposeSpec(8, 8)
    assert family.refuses(other)


def test_launching_it_all_the_same_is_an_error() -> None:
    (params,) = TRANSPOSE_SCALES.cases()
    with pytest.raises(TypeError, match="but it transposes"):
        TRANSPOSE_SCALES.launch(params, ops.spec(8, 8, 128, 132), {})
