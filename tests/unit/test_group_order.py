"""Grouped GEMMs: the numbers of the order of tiles, when padding is skipped, and which weights leave L2 first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rasters import located, quotient

from deep_gemm import ops
from deep_gemm.arch import SM90
from deep_gemm.kernels import groups
from deep_gemm.kernels.families import HALF_K_GROUPED
from deep_gemm.spec import GemmSpec, ceil_div

STRIP = 16
"""Rows of tiles that are gone through together, column by column."""


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 18), st.sampled_from([64, 128, 192, 256]), st.integers(0, (1 << 31) - 1))
def test_a_launch_has_the_numbers_that_locate_a_tile(n: int, block_n: int, index: int) -> None:
    """`GroupedScheduler::locate` divides by the columns, and by the tiles of a strip. What it makes of them is shown by
    results on a GPU: see gpu/test_m_grouped_gpu.py and the mutations of groups."""
    order = groups.order(HALF_K_GROUPED.config(128, block_n), n, True, 0)
    columns = ceil_div(n, block_n)
    assert order[0] == columns
    assert quotient(index, tuple(order[3:6])) == index // columns
    assert quotient(index, tuple(order[6:9])) == index // (STRIP * columns)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 20), st.sampled_from([3, 132]))
def test_along_k_each_matrix_has_each_tile_once(m: int, n: int, count: int, num_sms: int) -> None:
    """From the numbers of a launch. The matrices follow one another, all with the same order of tiles."""
    kernel, config = HALF_K_GROUPED, HALF_K_GROUPED.config(128, 128)
    m, n = m, 8 * n
    spec = ops.spec(m, n, 4096, num_sms, "k_grouped_bf16_gemm_tn_contiguous", groups=count)
    strides = {"a": (1, 2048), "b": (1, 8 * 1500), "d": (m * n, n, 1), "c": (m * n, n, 1)}
    launch, values = kernel.values(kernel.params(spec, config, SM90), spec, strides, {}, pdl=False, constant=False)
    numbers = values["raster"]
    assert isinstance(numbers, list)
    tiles = ceil_div(m, 128) * ceil_div(n, 128)
    assert numbers[0] == tiles
    assert launch.grid == (min(tiles * count, num_sms), 1, 1)
    inside = [located(tuple(numbers[3:]), index) for index in range(tiles)]
    assert sorted(inside) == [(y, x) for y in range(ceil_div(m, 128)) for x in range(ceil_div(n, 128))]
    for index in (0, tiles - 1, tiles * count // 2, tiles * count - 1):
        assert quotient(index, tuple(numbers[:3])) == index // tiles


def grouped_spec(form: str, m: int, k: int, count: int, expected_m: int = 0) -> GemmSpec:
    """The spec of an FP8 call with groups along M."""
    return ops.spec(m, 6144, k, 132, f"m_grouped_fp8_gemm_nt_{form}", groups=count, expected_m=expected_m)


@pytest.mark.parametrize(
    ("groups_and_rows", "k", "skips"),
    [((64, 306), 7168, False), ((64, 306), 3072, True), ((32, 192), 7168, True), ((8, 4096), 2048, False)],
)
def test_padding_is_skipped_where_that_pays(groups_and_rows: tuple[int, int], k: int, skips: bool) -> None:
    """Few tiles for each CTA; or low groups, and columns of B that stay in L2. Otherwise CTAs only drift apart."""
    count, rows = groups_and_rows
    spec = grouped_spec("masked", 4096, k, count, rows)
    assert groups.skips_padding(spec, HALF_K_GROUPED.config(128, 256)) is skips
    contiguous = grouped_spec("contiguous", count * rows, k, count)
    assert groups.skips_padding(contiguous, HALF_K_GROUPED.config(128, 256)) is skips


@pytest.mark.parametrize(
    ("form", "count", "rows", "k", "evicted"),
    [
        ("masked", 6, 20, 2048, 1),
        ("masked", 6, 20, 7168, 0),  # 264 MB
        ("masked", 32, 20, 2048, 0),
        ("masked", 6, 100, 2048, 0),  # two rows of tiles read B
        ("contiguous", 6, 20, 2048, 0),
    ],
)
def test_weights_that_are_read_once_leave_l2_first(form: str, count: int, rows: int, k: int, evicted: int) -> None:
    spec = grouped_spec(form, 4096, k, count, rows)
    assert groups.evict_first(spec, HALF_K_GROUPED.config(64, 128)) == evicted
