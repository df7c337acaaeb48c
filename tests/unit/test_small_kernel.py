"""The kernel without a ring: what is passed to it, where it keeps what it copies, and which of it the grid covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden_renders import SMALL, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import AT, encoder, geometries, launch_at, parameters, record

from deep_gemm import arch
from deep_gemm.cli.inspect import describe
from deep_gemm.errors import InvalidInputError
from deep_gemm.kernels.sm90_fp8_launch import Geometry
from deep_gemm.params import GemmProblem, SmallConfig
from deep_gemm.select import candidates
from deep_gemm.select.calibration import default
from deep_gemm.select.model import estimate

CONFIGS: list[SmallConfig] = list(SMALL.configs(arch.SM90))
TYPES = {"const u8*": "ptr", "const float*": "ptr", "u16*": "ptr"}


def shortened(g: Geometry, config: SmallConfig) -> Geometry:
    """``g`` with as much of K as the config's stages hold."""
    k = min(g.k, 128 * config.num_stages)
    return replace(g, k=k, stride_a=k + g.stride_a - g.k, stride_b=k + g.stride_b - g.k)


def named(config: SmallConfig, g: Geometry, pdl: bool = False, constant_b: bool = False) -> dict[str, object]:
    params = make_params(config)
    with encoder():
        _, args = launch_at(params, g, AT, 132, pdl, constant_b)
    declared = parameters(params)
    assert [TYPES.get(kind, kind) for kind, _ in declared] == [arg[0] for arg in args]
    return {name: arg[1] for (_, name), arg in zip(declared, args, strict=True)}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CONFIGS), geometries())
def test_arguments_are_the_parameters_of_the_kernel(config: SmallConfig, g: Geometry) -> None:
    g = shortened(g, config)
    assert named(config, g) == {
        "a": AT.a,
        "b": AT.b,
        "a_stride": g.stride_a,
        "b_stride": g.stride_b,
        "m": g.m,
        "n": g.n,
        "k": g.k,
        "b_late": 0,
        "scale_a": AT.sfa,
        "scale_b": AT.sfb,
        "scale_a_stride": g.stride_sfa,
        "scale_b_stride_n": g.stride_sfb[0],
        "scale_b_stride_k": g.stride_sfb[1],
        "d": AT.d,
        "d_stride": g.stride_d,
    }


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CONFIGS), geometries(), st.booleans())
def test_the_grid_covers_d(config: SmallConfig, g: Geometry, pdl: bool) -> None:
    recorded = record(make_params(config), shortened(g, config), pdl=pdl)
    across, down, batch = recorded.shape.grid
    assert (across - 1) * config.block_n < g.n <= across * config.block_n
    assert (down - 1) * 64 < g.m <= down * 64
    assert batch == 1
    assert recorded.shape.block == 128 * config.consumers_k
    assert recorded.shape.pdl is pdl
    assert recorded.maps == {}


@pytest.mark.parametrize(
    ("pdl", "constant_b", "late"), [(True, False, 1), (True, True, 0), (False, False, 0), (False, True, 0)]
)
def test_weights_wait_only_where_something_that_still_runs_may_write_them(
    pdl: bool, constant_b: bool, late: int
) -> None:
    g = Geometry(7, 100, 384, 384, 384, 100, 8, (3, 1))
    assert named(CONFIGS[0], g, pdl, constant_b)["b_late"] == late


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: SMALL.entry(make_params(config)))
def test_all_of_k_lies_in_shared_memory(config: SmallConfig) -> None:
    """By hand: E4M3 rows, float32 scales of 64 tokens and one of weights in 16 bytes, float32 sums in padded rows."""
    operands = (64 + config.block_n) * 128
    size = config.num_stages * (operands + 64 * 4 + 16) + config.consumers_k * 64 * (config.block_n + 8) * 4
    params = make_params(config)
    assert SMALL.shared_bytes(params) == SMALL.fields(params)["shared_bytes"] == size <= 227 * 1024
    # One block more for each warpgroup would be too many, of shared memory or of what is worth it.
    deeper = replace(config, num_stages=config.num_stages + config.consumers_k)
    assert config.num_stages == 8 * config.consumers_k or "do not fit" in str(SMALL.illegal(deeper, arch.SM90))
    # Where operands are swizzled, they begin on boundaries of eight rows.
    assert operands % 1024 == 0
    most = Geometry(1, 8, 128 * config.num_stages, 4096, 4096, 8, 4, (32, 1))
    record(params, most)
    longer = replace(most, k=most.k + 16)
    with pytest.raises(InvalidInputError, match=rf"holds all of K in its {config.num_stages} stages .* {longer.k}\."):
        record(params, longer)


def test_a_row_of_tiles_reads_one_row_of_scales_of_b() -> None:
    """Which is found from a tile's first column: no tile may reach into the next 128."""
    for config in CONFIGS:
        assert 128 % config.block_n == 0
        assert all(first // 128 == (first + config.block_n - 1) // 128 for first in range(0, 4096, config.block_n))


def test_the_model_takes_copies_by_threads_for_something_else_than_loads_by_tma() -> None:
    problem, constants = GemmProblem(m=128, n=512, k=1024, num_sms=132), default().some_tokens
    for config in CONFIGS:
        usual = estimate(problem, config, constants)
        later = estimate(problem, config, replace(constants, copied_us=constants.copied_us + 1))
        assert later.launch_us == pytest.approx(usual.launch_us + 1)
        slower = estimate(problem, config, replace(constants, copied_cycles=2 * constants.copied_cycles))
        assert slower.chain_us > 1.5 * usual.chain_us
        ring = dict.fromkeys(("launch_us", "upright_us", "stage_us", "put_away_us", "chain_cycles"), 9.0)
        assert estimate(problem, config, replace(constants, **ring)) == usual


def test_rows_that_threads_copy_cost_more_where_they_begin_inside_sectors() -> None:
    """Where the model did not know, it chose one for 107 x 3584 x 976 that took 1.23 times as long as the best."""
    constants = default().some_tokens
    even, torn = (GemmProblem(m=107, n=3584, k=k, num_sms=132) for k in (1024, 976))
    for config in CONFIGS:
        for problem, costs_more in ((even, False), (torn, True)):
            usual = estimate(problem, config, constants)
            dearer = estimate(problem, config, replace(constants, copied_torn_cycles=50.0))
            assert (dearer.total_us > 1.2 * usual.total_us) is costs_more
            assert estimate(problem, config, replace(constants, copied_row_cycles=50.0)).total_us > 1.2 * usual.total_us
    by_tma = next(c for c in candidates(torn, arch.SM90) if not isinstance(c, SmallConfig))
    dear = replace(constants, copied_us=9.0, copied_cycles=900.0, copied_row_cycles=50.0, copied_torn_cycles=50.0)
    assert estimate(torn, by_tma, dear) == estimate(torn, by_tma, constants)


def test_inspect_tells_it_from_others() -> None:
    assert describe(CONFIGS[0]) == "small 64x16x128 s16 w2 c1x1x1"
