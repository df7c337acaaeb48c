"""Device code of batched and summed products broken on purpose, as in `mutations.py`."""

from __future__ import annotations

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import HALF_BATCHED, HALF_SUMMED
from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "batch": case(HALF_BATCHED, 128, 128),
    "pair": case(HALF_BATCHED, 128, 256, (2, 1, 1), majors="km"),
    "direct": case(HALF_BATCHED, 64, 64, majors="km", store="direct"),
    "sum": case(HALF_SUMMED, 64, 64, (1, 1, 4), accumulate="reduces"),
}

MUTATIONS = [
    Mutation(
        "multiply the first product's operands again and again",
        "gemm_kernel.cuh",
        "return matrix(tile);",
        "return 0;",
        ("batch", "pair", "direct"),
    ),
    Mutation(
        "write every product over the first",
        "half_gemm.cuh",
        "tma_store_3d(arg.map_d, source, x, y, at.group);",
        "tma_store_3d(arg.map_d, source, x, y, 0);",
        ("batch", "pair"),
    ),
    Mutation(
        "write single elements of every product over the first",
        "gemm_kernel.cuh",
        "static_cast<i64>(group) * arg.d_stride_g",
        "0 * arg.d_stride_g",
        ("direct",),
    ),
    Mutation(
        "go on counting tiles after a product's last one",
        "scheduler.cuh",
        "index - group * raster->part.value",
        "index",
        ("batch", "pair", "direct"),
    ),
    Mutation(
        "add the first product only",
        "gemm_kernel.cuh",
        "return arg.raster->part.quotient(order.step_block(step));",
        "return 0;",
        ("sum",),
    ),
    Mutation(
        "go on along K after a product's last block",
        "gemm_kernel.cuh",
        "(block - arg.raster->part.quotient(block) * arg.raster->part.value) * kBlockK",
        "block * kBlockK",
        ("sum",),
    ),
]
