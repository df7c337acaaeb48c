"""BF16 tiles with operands swapped: where they are offered, and which are legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_gemm.arch import SM90
from deep_gemm.kernels import half_choice
from deep_gemm.kernels import sm90_half_gemm as upright
from deep_gemm.kernels.sm90_half_turned import KERNEL, make_config
from deep_gemm.ops import half_dense
from deep_gemm.params import HalfConfig, HalfSwappedConfig, HalfTurnedConfig
from deep_gemm.select import calibration, candidates, legal, order, select
from deep_gemm.select.model import estimate
from deep_gemm.spec import GemmSpec, Major


def asked(m: int, n: int, k: int, majors: tuple[Major, Major] = ("k", "k"), **options: bool) -> GemmSpec:
    """The spec of a BF16 call."""
    return half_dense.spec("bf16_gemm_nt", m, n, k, 132, majors=majors, **options)


@pytest.mark.parametrize("majors", [("k", "k"), ("k", "mn")])
def test_many_rows_have_tiles_of_any_height(majors: tuple[Major, Major]) -> None:
    """And of the other kernel only small tiles and split K."""
    offered = candidates(asked(1000, 1000, 4096, majors), SM90)
    assert len({config.block_m for config in offered if type(config) is HalfTurnedConfig}) >= 16
    others = [config for config in offered if type(config) is HalfConfig]
    assert others
    assert all(map(half_choice.for_small_outputs, others))


def test_few_rows_have_none() -> None:
    assert not any(type(config) is HalfTurnedConfig for config in candidates(asked(64, 4096, 4096), SM90))
    assert not any(type(config) is HalfSwappedConfig for config in candidates(asked(65, 4096, 4096), SM90))


def test_rows_of_a_that_are_not_contiguous_need_heights_of_whole_boxes() -> None:
    """So all configs of the other kernel are offered too."""
    offered = candidates(asked(4096, 4096, 4096, ("mn", "k")), SM90)
    assert {config.block_m % 64 for config in offered} == {0}
    assert any(type(config) is HalfTurnedConfig for config in offered)
    assert any(type(config) is HalfConfig and not half_choice.for_small_outputs(config) for config in offered)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (asked(4096, 4096, 4096, wide=True), "adds no C"),
        (replace(asked(4096, 4096, 4096), accumulate="from c"), "adds no C"),
        (replace(asked(4096, 4096, 4096), d=replace(asked(8, 8, 8).d, aligned=False)), "16-byte boundaries"),
    ],
)
def test_products_that_it_cannot_store_are_refused(spec: GemmSpec, why: str) -> None:
    assert why in str(KERNEL.refuses(spec))
    assert all(type(config) is HalfConfig for config in candidates(spec, SM90))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(make_config(128, 128), cluster_k=2), "K cannot be split over 2 CTAs"),
        (replace(make_config(128, 128), block_m=132), "multiple of 8"),
        (replace(make_config(128, 128), block_n=160), "160 rows of sums"),
        (replace(make_config(136, 256), cluster_n=2), "eight rows"),  # 68 rows each
        (replace(make_config(192, 192), block_m=200), "96 sums a thread"),
        (replace(make_config(128, 64), block_m=136), "128 columns"),
    ],
)
def test_illegal_tiles_say_why(config: HalfTurnedConfig, why: str) -> None:
    assert why in str(KERNEL.illegal(config, SM90))


def test_tiles_of_three_consumers_are_only_for_swapped_operands() -> None:
    assert any(config.num_consumers == 3 for config in KERNEL.legal(SM90))
    assert all(config.num_consumers < 3 for config in upright.KERNEL.legal(SM90))


def test_small_tiles_and_split_k_are_not_offered_for_many_rounds() -> None:
    """Each of the first three shapes took a third longer in them than in others (H100)."""
    for m, n, k in ((387, 11648, 7936), (175, 8512, 11712), (421, 624, 12416), (8192, 8192, 8192)):
        spec = asked(m, n, k)
        for config in candidates(spec, SM90):
            assert not half_choice.drifts(spec, config)  # type: ignore[arg-type]
            tiles = -(-m // config.block_m) * -(-n // config.block_n)
            small = config.block_m * config.block_n < half_choice.SMALL_TILE
            rounds = tiles * config.k_splits / (132 * config.ctas_per_sm)
            assert rounds <= 1 or not (small or config.k_splits > 1)
    assert any(config.k_splits > 1 for config in candidates(asked(128, 512, 8192), SM90))
    assert any(
        config.block_m * config.block_n < half_choice.SMALL_TILE for config in legal(asked(387, 11648, 7936), SM90)
    )


def test_clusters_of_four_leave_sms_free_only_where_a_second_round_needs_them() -> None:
    """A cluster runs within one GPC, and 33 of four do not fit on every GPU with 132 SMs."""
    config = make_config(112, 128, (2, 2, 1))
    counted = {tiles: KERNEL.num_ctas(config, 224 * tiles, 256, 132) // 4 for tiles in (1, 30, 33, 34, 100)}
    assert counted == {1: 1, 30: 30, 33: 33, 34: 30, 100: 30}


def test_the_last_part_of_a_tile_has_a_map_of_its_own() -> None:
    """Parts have 64 rows of D, and the last one those that are left."""
    spec = asked(4096, 4096, 4096)
    for block_m, last in ((136, 8), (128, 64), (240, 48)):
        params = KERNEL.params(spec, make_config(block_m, 128), SM90)
        strides = {"a": (4096, 1), "b": (4096, 1), "d": (4096, 1)}
        _, values = KERNEL.values(params, spec, strides, pdl=False, constant=False)
        boxes = [values[name].spec.box for name in ("map_d", "map_d_last")]  # type: ignore[union-attr]
        assert boxes == [(64, 64), (64, last)]


def test_rare_tiles_are_chosen_only_for_more_than_their_handicap() -> None:
    """So that deployments need fewer kernels. Where times were measured, they alone count."""
    known, spec = calibration.default(), asked(2048, 2112, 7168)
    rare = next(config for config in KERNEL.configs(SM90) if KERNEL.handicap(config) > 1)
    common = next(config for config in KERNEL.configs(SM90) if KERNEL.handicap(config) == 1)
    for us, expected in ((1.02, common), (1.04, rare)):
        times = {rare: 100.0, common: 100.0 * us}
        first = order(spec, [rare, common], known, lambda config, _, times=times: times[config])[0]
        assert first.config == expected
        first = order(spec, [rare, common], known, lambda config, _, times=times: times[config], measured=True)[0]
        assert first.config == rare


def test_16_bit_tiles_have_speeds_of_their_own() -> None:
    """For a card whose calibration lacks them, they are scaled from the nearest card that has them."""
    known = calibration.of("NVIDIA H100 80GB HBM3")
    (name, own), *others = known.others
    assert not others
    for spec, expected in ((asked(72, 4096, 4096), own), (asked(64, 4096, 4096), known.speed)):
        assert select(spec, SM90, known).estimate == estimate(spec, select(spec, SM90, known).config, expected)
    scaled = calibration.of("NVIDIA H200").named(name)
    assert scaled.hbm_gb_per_s == pytest.approx(own.hbm_gb_per_s * 4800 / 3350)
    assert scaled.tensor == own.tensor
