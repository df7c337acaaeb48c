"""Who finds out which tile is next: no result tells, only time does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_renders import find_config, make_params
from kernel_builds import open_compiler

from deep_gemm import engine
from deep_gemm.jit import Builder, sass
from deep_gemm.params import FP8Config


def divisions_between_products(tmp_path: Path, config: FP8Config) -> list[str]:
    """The upper halves of products of integers, by which a tile's place in the order is found, that stand in the code
    between the first and the last product of matrices: there is nothing but consumers' code."""
    text = sass(Builder(tmp_path, open_compiler("nvrtc")).build(engine.build_request(make_params(config))).cubin)
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
def test_two_consumers_are_told_their_next_tile(tmp_path: Path, config: FP8Config) -> None:
    assert divisions_between_products(tmp_path, config) == []


def test_one_looks_for_it_itself(tmp_path: Path) -> None:
    """So that it is seen what the others do not do."""
    assert divisions_between_products(tmp_path, find_config(block_m=64, block_n=64))
