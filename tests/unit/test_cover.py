"""What runs under a checker of memory accesses shows all that kernels can do."""

from __future__ import annotations

import pytest
from cover import FAMILIES, cover, everything, features
from hypothesis import given
from hypothesis import strategies as st
from sanitize import _config, chosen, sizes

from deep_gemm.arch import SM90
from deep_gemm.kernels.sm90_fp8_launch import num_ctas
from deep_gemm.kernels.stream_k import stream
from deep_gemm.params import SCALE_BLOCK, KernelParams, ceil_div

EVERYTHING = everything()


@pytest.fixture(scope="module")
def taken() -> list[KernelParams]:
    return chosen(0)


def test_every_feature_of_every_family_is_seen(taken: list[KernelParams]) -> None:
    shown = {feature for params in taken for feature in features(params)}
    for params in EVERYTHING:
        assert features(params) <= shown


def test_few_kernels_do(taken: list[KernelParams]) -> None:
    assert len(taken) == len(set(taken)) <= 130


def test_tiles_and_clusters_are_seen(taken: list[KernelParams]) -> None:
    """Said once more, not by what `features` says."""
    configs = {_config(params) for params in taken}
    for kernel in FAMILIES:
        own = {config for config in configs if config in set(kernel.configs(SM90))}
        every = set(kernel.configs(SM90))
        assert {(c.block_m, c.block_n) for c in own} == {(c.block_m, c.block_n) for c in every}
        clusters = {(c.cluster_m, c.cluster_n, c.cluster_k) for c in own}
        assert clusters == {(c.cluster_m, c.cluster_n, c.cluster_k) for c in every}
    assert {"tma", "direct"} == {params.store for params in taken}


def test_sizes_suit_the_kernels(taken: list[KernelParams]) -> None:
    for params in taken:
        config = _config(params)
        m, _, k, parts = sizes(config)
        assert m > 0
        assert k % SCALE_BLOCK == 0
        assert config.cluster_size <= min(parts) * config.ctas_per_sm
        assert max(parts) <= 32


def test_a_cta_that_stays_does_several_tiles(taken: list[KernelParams]) -> None:
    """So that what one tile leaves in shared memory meets the next one's writes."""
    for params in taken:
        config = _config(params)
        if not config.persistent or config.stream_k:
            continue
        m, n, _, (num_sms,) = sizes(config)
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        assert num_ctas(config, m, n, num_sms) < tiles * config.cluster_size, params


def test_ctas_do_whole_tiles_and_pieces_of_any_number(taken: list[KernelParams]) -> None:
    dealt = 0
    for params in taken:
        config = _config(params)
        if config.stream_k:
            m, n, k, parts = sizes(config)
            few, many = (stream(config, m, n, k, num_sms) for num_sms in parts)
            assert few.whole > 0, params
            assert few.dealt > 0, params
            assert many.donors > 1, params
            dealt += 1
    assert dealt > 5


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
