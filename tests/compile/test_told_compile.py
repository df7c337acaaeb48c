"""The next-tile hint: whether consumers compute the next tile themselves. Results do not show it, only times do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chosen import find_config, make_params
from kernel_builds import open_compiler

from deep_gemm.jit import Builder, sass
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long


def divisions_between_products(kernels_root: Path, config: GemmConfig) -> list[str]:
    """The integer multiplications for upper halves, which locate a tile in the order, between the first and the last
    wgmma. This part of the code belongs to consumers only."""
    text = sass(Builder(kernels_root, open_compiler("nvrtc")).build(engine.build_request(make_params(config))).cubin)
    return re.findall(r"IMAD\.HI\.U32", text[text.index("GMMA") : text.rindex("GMMA")])


@pytest.mark.parametrize(
    "config",
    [
        find_config(block_m=128, block_n=128),
        find_config(block_m=128, block_n=192),
        find_config(block_m=256, block_n=128, cluster_n=2),
        find_config(block_m=128, block_n=64, cluster_k=2),
    ],
    ids=lambda config: f"{config.block_m}x{config.block_n}",
)
def test_two_consumers_are_told_their_next_tile(kernels_root: Path, config: GemmConfig) -> None:
    assert divisions_between_products(kernels_root, config) == []


def test_one_looks_for_it_itself(kernels_root: Path) -> None:
    """The check above must be able to fail: a lone consumer has these multiplications."""
    assert divisions_between_products(kernels_root, find_config(block_m=64, block_n=64))
