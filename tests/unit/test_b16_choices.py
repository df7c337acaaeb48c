"""What the performance model counts for 16-bit operands, and which of their tiles are chosen."""

import pytest

from deep_gemm import ops
from deep_gemm.arch import SM90
from deep_gemm.kernels.families import B16_GEMM, B16_SWAP_AB, B16_SWAPPED
from deep_gemm.kernels.features import Features
from deep_gemm.params import GemmConfig
from deep_gemm.select import calibration, candidates, select
from deep_gemm.select.model import estimate, features
from deep_gemm.spec import GemmSpec, Major

TILE, PAIR = B16_GEMM.config(128, 256), B16_GEMM.config(128, 256, (2, 1, 1))


def asked(m: int, n: int, k: int, majors: tuple[Major, Major] = ("k", "k")) -> GemmSpec:
    """The spec of a BF16 call."""
    return ops.spec(m, n, k, 132, "bf16_gemm_nt", majors=majors)


def counted(spec: GemmSpec, config: GemmConfig = TILE) -> Features:
    return features(spec, config)


def families(spec: GemmSpec) -> set[str]:
    return {config.family for config in candidates(spec, SM90)}


@pytest.mark.parametrize(("k", "inside"), [(64, 0.0), (960, 0.0), (992, 0.5), (944, 0.75), (936, 0.875), (8, 0.0)])
def test_rows_begin_inside_lines_by_their_bytes(k: int, inside: float) -> None:
    """A line of L2 has 64 elements."""
    assert counted(asked(2048, 2048, k)).unaligned == pytest.approx(inside)
    fp8 = ops.spec(2048, 2048, 2 * k, 132)
    assert features(fp8, candidates(fp8, SM90)[0]).unaligned == pytest.approx(inside)


def test_rows_of_mn_major_operands_are_m_and_n_long() -> None:
    """And not K, which is no row's length."""
    both: tuple[Major, Major] = ("mn", "mn")
    assert counted(asked(2048, 2048, 936, both)).unaligned == 0.0
    assert counted(asked(2048, 2048, 936, both)).crowded == 0.0
    assert counted(asked(2056, 2056, 960, both)).unaligned == pytest.approx(0.875)
    one = counted(asked(2048, 2048, 936, ("k", "mn")))
    assert 0 < one.unaligned < 0.875  # A alone


def test_l2_shares_no_boxes_that_begin_inside_sectors() -> None:
    """There, tiles of a cluster load less by as much as they share."""
    inside, whole = asked(4096, 4096, 4088), asked(4096, 4096, 4096)

    def saved(spec: GemmSpec) -> float:
        return counted(spec, PAIR).from_l2 / counted(spec).from_l2

    assert saved(inside) < saved(whole)
    # 16 columns of tiles read A, and 32 rows of tiles B.
    assert counted(inside).from_l2 == 4096 * 8192 * (16 + 32)


@pytest.mark.parametrize("majors", [("k", "k"), ("k", "mn")])
def test_many_rows_have_swap_ab_tiles_of_any_height(majors: tuple[Major, Major]) -> None:
    offered = candidates(asked(1000, 1000, 4096, majors), SM90)
    assert len({config.block_m for config in offered if config.family == B16_SWAP_AB.name}) >= 16


def test_few_rows_have_a_family_of_their_own() -> None:
    assert B16_SWAP_AB.name not in families(asked(64, 4096, 4096))
    assert B16_SWAPPED.name not in families(asked(65, 4096, 4096))


def test_rows_of_a_that_are_not_contiguous_need_heights_of_whole_boxes() -> None:
    """So other large tiles are offered too."""
    spec = asked(4096, 4096, 4096, ("mn", "k"))
    offered = candidates(spec, SM90)
    assert {config.block_m % 64 for config in offered} == {0}
    assert families(spec) == {B16_GEMM.name, B16_SWAP_AB.name}


def test_16_bit_tiles_have_speeds_of_their_own() -> None:
    """For a card whose calibration lacks them, they are scaled from the nearest card that has them."""
    known = calibration.for_device("NVIDIA H100 80GB HBM3")
    (name, own), *others = known.others
    assert not others
    for spec, expected in ((asked(72, 4096, 4096), own), (asked(64, 4096, 4096), known.speed)):
        assert select(spec, SM90, known).estimate == estimate(spec, select(spec, SM90, known).config, expected)
    scaled = calibration.for_device("NVIDIA H200").named(name)
    assert scaled.hbm_gb_per_s == pytest.approx(own.hbm_gb_per_s * 4800 / 3350)
    assert scaled.tensor == own.tensor


def test_tall_products_get_tiles_of_more_tokens() -> None:
    """3780 x 256 x 256 took an H100 8.4 us in swapped tiles of 64 tokens, which were chosen, and 7.3 us in 128x64."""
    for m, n, k in ((3780, 256, 256), (2250, 288, 128), (520, 128, 656)):
        assert select(asked(m, n, k), SM90).config.family != B16_SWAPPED.name
    assert select(asked(16, 4096, 4096), SM90).config.family == B16_SWAPPED.name


def test_wide_tiles_are_chosen_where_narrow_ones_wait_for_shared_memory() -> None:
    """2048 x 2112 x 7168 took an H100 115 us in 128x96 tiles, which were chosen, and 89 us in 256x144 ones. Both need
    as many cycles of the tensor cores."""
    chosen = select(asked(2048, 2112, 7168), SM90).config
    assert chosen.block_m * chosen.block_n > 128 * 128
