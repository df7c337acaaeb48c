"""What the performance model counts for 16-bit operands: bytes, not elements, and how tiles are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_gemm import ops
from deep_gemm.arch import SM90
from deep_gemm.kernels import sm90_half_turned as turned
from deep_gemm.kernels.features import Features
from deep_gemm.kernels.loads import l2_promotion
from deep_gemm.kernels.sm90_half_gemm import F32_ELEMENT, KERNEL, make_config
from deep_gemm.ops import half_dense
from deep_gemm.params import HalfConfig
from deep_gemm.select import candidates, select
from deep_gemm.select.calibration import default
from deep_gemm.select.model import estimate, features
from deep_gemm.spec import GemmSpec, Major

TILE, PAIR = make_config(128, 256), make_config(128, 256, (2, 1, 1))


def asked(m: int, n: int, k: int, majors: tuple[Major, Major] = ("k", "k"), **options: bool) -> GemmSpec:
    """The spec of a BF16 call."""
    return half_dense.spec("bf16_gemm_nt", m, n, k, 132, majors=majors, **options)


def counted(spec: GemmSpec, config: HalfConfig = TILE) -> Features:
    return features(spec, config)


@pytest.mark.parametrize(("k", "inside"), [(64, 0.0), (960, 0.0), (992, 0.5), (944, 0.75), (936, 0.875), (8, 0.0)])
def test_rows_begin_inside_lines_by_their_bytes(k: int, inside: float) -> None:
    """A line of L2 has 64 elements."""
    assert counted(asked(2048, 2048, k)).unaligned == pytest.approx(inside)
    fp8 = ops.spec(2048, 2048, 2 * k, 132)
    assert features(fp8, candidates(fp8, SM90)[0]).unaligned == pytest.approx(inside)


def test_rows_of_mn_major_operands_are_m_and_n_long() -> None:
    """And not K, which is no row's length."""
    tile = make_config(128, 256)
    both: tuple[Major, Major] = ("mn", "mn")
    assert counted(asked(2048, 2048, 936, both), tile).unaligned == 0.0
    assert counted(asked(2048, 2048, 936, both), tile).crowded == 0.0
    assert counted(asked(2056, 2056, 960, both), tile).unaligned == pytest.approx(0.875)
    one = counted(asked(2048, 2048, 936, ("k", "mn")), tile)
    assert 0 < one.unaligned < 0.875  # A alone


def test_l2_shares_no_boxes_that_begin_inside_sectors() -> None:
    """There, tiles of a cluster load less by as much as they share."""
    inside, whole = asked(4096, 4096, 4088), asked(4096, 4096, 4096)

    def saved(spec: GemmSpec) -> float:
        return counted(spec, PAIR).from_l2 / counted(spec).from_l2

    assert saved(inside) < saved(whole)
    assert counted(inside).from_l2 > 1.4 * counted(whole).from_l2
    # 16 columns of tiles read A, and 32 rows of tiles B.
    assert counted(inside).from_l2 == 4096 * 8192 * (16 + 32)


@pytest.mark.parametrize(
    ("config", "row"),
    [
        (make_config(128, 128), 128),
        (make_config(128, 160), 64),
        (make_config(128, 176), 32),
        (make_config(64, 128, (1, 1, 4)), 64),
    ],
)
def test_narrow_rows_of_d_take_as_long_as_whole_ones(config: HalfConfig, row: int) -> None:
    spec = asked(4096, 128 * 7 * 11, 4096)
    tile = config.block_m * config.block_n / config.cluster_k
    assert counted(spec, config).elements == pytest.approx(tile * 128 / row)
    direct = counted(replace(spec, d=replace(spec.d, aligned=False)), config).elements
    assert direct == pytest.approx(10 * tile)


@pytest.mark.parametrize(
    ("config", "row", "buffered"), [(make_config(128, 160), 128, 8192), (make_config(128, 176), 64, 4096)]
)
def test_float32_elements_cost_more_except_those_in_buffers(config: HalfConfig, row: int, buffered: int) -> None:
    """Two buffers of each of two consumers are still being stored when the next tile begins."""
    spec = asked(4096, 128 * 7 * 11, 4096, wide=True)
    shown = config.block_m * config.block_n - buffered
    assert counted(spec, config).elements == pytest.approx(shown * F32_ELEMENT * 128 / row * 2)
    direct = counted(replace(spec, d=replace(spec.d, aligned=False)), config).elements
    assert direct == pytest.approx(10 * config.block_m * config.block_n * 2)


def test_transposed_elements_cost_more() -> None:
    spec, config = asked(4096, 4096, 4096), turned.make_config(128, 256)
    assert counted(spec, config).elements == pytest.approx(turned.TURNED_ELEMENT * counted(spec).elements)


@pytest.mark.parametrize(
    ("config", "wide", "hides"),
    [
        (TILE, False, True),
        (make_config(256, 128, (1, 2, 1)), False, True),
        (make_config(256, 144), False, False),  # too few registers for a second tile
        (TILE, True, False),
        (make_config(128, 128, (1, 1, 2)), False, False),
    ],
)
def test_the_next_tile_hides_an_epilogue_only_where_a_tile_is_kept(config: HalfConfig, wide: bool, hides: bool) -> None:
    spec = asked(8192, 8192, 4096, wide=wide)
    x = counted(spec, config)
    assert x.hides_epilogue == hides
    params = KERNEL.params(spec, config, SM90)
    assert (KERNEL.constants(params)["buffers"] == 1) == hides  # as the kernel does it
    speed = default().speed
    shown = estimate(spec, config, speed).epilogue_us
    each = speed.epilogue_us + x.elements / speed.elements_per_us
    exchanged = x.waves * (x.exchanges * speed.exchange_us + x.exchanged / speed.exchanged_per_us)
    seen = x.waves - (x.waves - 1) * speed.epilogue_hidden if hides else x.waves
    assert shown == pytest.approx(seen * each + exchanged)


def test_direct_stores_hide_nothing() -> None:
    spec = asked(8192, 8192, 4096)
    assert not counted(replace(spec, d=replace(spec.d, aligned=False))).hides_epilogue


@pytest.mark.parametrize(
    ("k", "stride", "promoted"),
    [
        (960, 1920, 256),
        (992, 1984, 128),  # half of the rows begin in the middle of a line
        (944, 1888, 128),
        (936, 1872, 128),
        (936, 1920, 256),  # padded rows: their distance counts, not K
        (2048, 4096, 128),  # D is smaller than B
        (2040, 4096, 128),
    ],
)
def test_two_blocks_are_promoted_together_only_where_rows_begin_with_lines(k: int, stride: int, promoted: int) -> None:
    spec, strides = asked(2000, 2048, k), {"a": (stride // 2, 1), "b": (stride // 2, 1), "d": (2048, 1)}
    _, values = KERNEL.values(KERNEL.params(spec, TILE, SM90), spec, strides, pdl=False, constant=False)
    assert {values[name].spec.l2_promotion for name in ("map_a", "map_b", "map_a_last", "map_b_last")} == {promoted}
    assert l2_promotion(ops.spec(2000, 2048, 2 * k, 132), stride) == promoted  # as for FP8 with rows of as many bytes


def test_tall_products_get_upright_tiles() -> None:
    """3780 x 256 x 256 took an H100 8.4 us in swapped tiles of 64 tokens, which were chosen, and 7.3 us in 128x64."""
    for m, n, k in ((3780, 256, 256), (2250, 288, 128), (520, 128, 656)):
        assert isinstance(select(asked(m, n, k), SM90).config, HalfConfig)
    assert not isinstance(select(asked(16, 4096, 4096), SM90).config, HalfConfig)


def test_wide_tiles_are_chosen_where_narrow_ones_wait_for_shared_memory() -> None:
    """2048 x 2112 x 7168 took an H100 115 us in 128x96 tiles, which were chosen, and 89 us in 256x144 ones. Both need
    as many cycles of the tensor cores."""
    chosen = select(asked(2048, 2112, 7168), SM90).config
    assert chosen.block_m * chosen.block_n > 128 * 128
