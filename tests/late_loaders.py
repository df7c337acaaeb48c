"""Kernels of clusters in which some loader has no box of a tile, and device headers in which such a loader is late."""

from pathlib import Path

from chosen import case, find_config, make_params
from headers import edited_headers

from deep_gemm.kernels.families import B16_GEMM, B16_SWAP_AB, FP8_SCALED
from deep_gemm.params import KernelParams

SHAPE = (1544, 1096, 4096, 8)
"""M, N, K, SMs. Columns of tiles are odd in number, or the last one has rows of B for the cluster's first CTAs only; so
too for rows of tiles. There are several rounds of stages."""

_LATE = "pass_cycles(20000)"  # longer than a round of any ring

_MN_MAJOR = """      use([&](u32 k, const auto& load) {
#pragma unroll
        for (u32 box = 0; box < kPartRows / 64; ++box)"""

KERNELS: dict[str, KernelParams] = {
    "fp8 1x2": make_params(find_config(block_m=128, block_n=80, cluster_n=2)),
    "fp8 1x2, wide": make_params(find_config(block_m=128, block_n=128, cluster_n=2)),
    "fp8 2x1": make_params(find_config(block_m=128, block_n=192, cluster_m=2)),
    "scaled 1x2": case(FP8_SCALED, 128, 128, (1, 2)), "scaled 2x1": case(FP8_SCALED, 128, 192, (2, 1)),
    "b16 2x1": case(B16_GEMM, 128, 128, (2, 1, 1)), "b16 1x2": case(B16_GEMM, 256, 128, (1, 2, 1)),
    "swap-AB 1x2": case(B16_SWAP_AB, 144, 128, (1, 2, 1)), "swap-AB 2x1": case(B16_SWAP_AB, 136, 256, (2, 1, 1)),
    "swap-AB 2x2": case(B16_SWAP_AB, 96, 128, (2, 2, 1)), "swap-AB 4x1": case(B16_SWAP_AB, 96, 64, (4, 1, 1)),
    "swap-AB 1x4": case(B16_SWAP_AB, 96, 64, (1, 4, 1)),
    "swap-AB 2x2, MN-major": case(B16_SWAP_AB, 128, 128, (2, 2, 1), form="tn"),
}  # fmt: skip


def late_headers(folder: Path) -> Path:
    """The device headers in ``folder``, with a pause at each block of K that a loader has no box of."""
    edited_headers(
        folder,
        "operand.cuh",
        (
            "if (map) load(map, part * kPartRows * 128, k, row);",
            f"map ? load(map, part * kPartRows * 128, k, row) : {_LATE};",
        ),
        ("if (map) load(map, place * 128, k, row);", f"map ? load(map, place * 128, k, row) : {_LATE};"),
        (_MN_MAJOR, _MN_MAJOR.replace("{\n", f"{{\n        if (count == 0) {_LATE};\n", 1)),
    )
    return folder
