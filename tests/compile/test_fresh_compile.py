"""A tile's first block overwrites the sums. Clearing them first would not change results, only the time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chosen import PLAIN, find_config, make_params
from headers import edited_headers
from kernel_builds import open_compiler

from deep_gemm.jit import Builder, sass
from deep_gemm.jit.generator import include_dir
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long

CONFIGS = [
    find_config(PLAIN, block_m=128, block_n=144),
    find_config(PLAIN, block_m=128, block_n=224, cluster_m=2),
    find_config(PLAIN, block_m=256, block_n=128, cluster_n=2),
    find_config(PLAIN, block_m=256, block_n=128, persistent=False),
]


def zeros_behind_the_first_product(root: Path, config: GemmConfig, headers: Path) -> int:
    """The number of registers that are cleared between a tile's first two groups of products, in the order of the code.
    The code for tiles with one block is elsewhere."""
    builder = Builder(root, open_compiler("nvrtc"), headers)
    text = sass(builder.build(engine.build_request(make_params(config))).cubin)
    first, second = [found.end() for found in re.finditer(r"GMMA\.[^;]*gsb0", text)][:2]
    found = re.findall(r"\b(CS2R R\d+, SRZ|MOV R\d+, RZ|MOV\.U32 R\d+, RZ, RZ, RZ)", text[first:second])
    return sum(2 if clearing.startswith("CS2R") else 1 for clearing in found)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.cluster_size}")
def test_a_tile_of_several_blocks_clears_no_sums(kernels_root: Path, config: GemmConfig) -> None:
    assert zeros_behind_the_first_product(kernels_root, config, include_dir()) < 8


def test_it_would_be_seen(kernels_root: Path, tmp_path: Path) -> None:
    headers = edited_headers(tmp_path / "include", "fp8_mainloop.cuh", ('        asm volatile("");', "        "))
    assert zeros_behind_the_first_product(kernels_root, CONFIGS[2], headers) > 100
