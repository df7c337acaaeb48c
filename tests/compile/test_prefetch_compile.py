"""How many blocks of weights a kernel prefetches into L2 in its prologue. Results do not show it, only times do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chosen import PLAIN, SWAPPED, find_config, make_params
from kernel_builds import open_compiler

from deep_gemm.jit import Builder, sass
from deep_gemm.jit.compilers import Compiler
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long

IN_L2 = 65536
"""The most bytes of weights that a CTA prefetches."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return open_compiler("nvrtc")


def counts_before_prefetch(text: str) -> tuple[list[int], list[int]]:
    """Constants in the instructions before the first prefetch of a box: those of minima, and those of selections. Only
    selections by threads count; those that depend on constants are uniform instructions."""
    before = text[: text.index("UTMAPF")].splitlines()[-60:]
    least = [int(found[1], 16) for line in before if (found := re.search(r"\sVIMNMX\S* \w+, \w+, (0x\w+)", line))]
    chosen = [int(found[1], 16) for line in before if (found := re.search(r"\sSEL \w+, \w+, (0x\w+)", line))]
    return least, chosen


@pytest.mark.parametrize("cluster_k", [1, 2])
@pytest.mark.parametrize(("family", "block_n"), [(PLAIN, 64), (PLAIN, 224), (SWAPPED, 64)])
def test_three_blocks_of_weights_come_into_l2_where_there_is_time(
    compiler: Compiler, kernels_root: Path, family: GemmFamily, block_n: int, cluster_k: int
) -> None:
    """CTAs with split K wait for their cluster: they prefetch three blocks, or as many as `IN_L2` allows. Other CTAs do
    so only with early loads, which they know at run time, and otherwise prefetch one block."""
    config = find_config(family, block_n=block_n, cluster_k=cluster_k)
    several = min(3, IN_L2 // (config.block_n * config.block_k))
    text = sass(Builder(kernels_root, compiler).build(engine.build_request(make_params(config))).cubin)
    least, chosen = counts_before_prefetch(text)
    counts = [number for number in chosen if number <= 3]  # others are offsets of the map that was chosen
    assert (least, counts) == (([several], []) if cluster_k > 1 else ([], [several]))
