"""The kernels that run under compute-sanitizer cover every feature of all kernels."""

from __future__ import annotations

import pytest
from chosen import FAMILIES
from cover import cover, everything, features
from hypothesis import given
from hypothesis import strategies as st
from sanitize import chosen, sizes

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.params import GemmConfig, KernelParams
from deep_gemm.spec import SCALE_BLOCK, ceil_div

EVERYTHING = everything()


@pytest.fixture(scope="module")
def taken() -> list[KernelParams]:
    return chosen(0)


def test_every_feature_of_every_family_is_seen(taken: list[KernelParams]) -> None:
    shown = {feature for params in taken for feature in features(params)}
    for params in EVERYTHING:
        assert features(params) <= shown


def test_few_kernels_do(taken: list[KernelParams]) -> None:
    assert len(taken) == len(set(taken)) <= 40


def test_tiles_and_ways_to_share_them_are_seen(taken: list[KernelParams]) -> None:
    """Checked without `features`: CTAs along m, n and k, and consumers along K."""

    def split(config: GemmConfig) -> tuple[int, ...]:
        return config.cluster_m, config.cluster_n, config.cluster_k, config.consumers_k

    for kernel in FAMILIES:
        every, own = kernel.configs(SM90), [params.gemm for params in taken if params.kernel == kernel.name]
        assert {config.tile for config in own} == {config.tile for config in every}
        assert {split(config) for config in own} == {split(config) for config in every}
    assert {"tma", "direct"} == {params.store for params in taken}


def test_sizes_suit_the_kernels_and_ctas_that_stay_do_several_tiles(taken: list[KernelParams]) -> None:
    """So that the next tile's writes meet what the one before left in shared memory."""
    for params in taken:
        config, rules = params.gemm, kernels.gemm_family(params.kernel).rules
        m, n, k, num_sms = sizes(config)
        assert k % SCALE_BLOCK == 0
        assert config.cluster_size <= num_sms * config.ctas_per_sm <= 32
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        if config.persistent:
            assert rules.num_ctas(config, m, n, num_sms) < tiles * config.cluster_size, params


def test_every_takes_all() -> None:
    assert chosen(1) == EVERYTHING
    assert chosen(7) == EVERYTHING[::7]


SETS = st.lists(st.frozensets(st.integers(0, 12), max_size=4), max_size=12)


@given(SETS, st.integers(0, 3))
def test_a_cover_shows_all_and_nothing_twice(sets: list[frozenset[int]], given_first: int) -> None:
    items = list(enumerate(sets))
    first = items[:given_first]
    found = cover(items, lambda item: item[1], first)
    assert set().union(*(item[1] for item in found)) == set().union(*sets)
    assert first == [item for item in found if item in first]
    assert found == sorted(found)
    assert len(found) == len(set(found)) <= len(first) + len(set().union(*sets))
