"""Device code of batched and summed products broken on purpose, as in `mutations.py`."""

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import B16_BATCHED, B16_SUMMED, FP8_BATCHED, FP8_BATCHED_SWAPPED, FP8_HEADS
from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "batch": case(B16_BATCHED, 128, 128),
    "pair": case(B16_BATCHED, 128, 256, (2, 1, 1), form="nn"),
    "direct": case(B16_BATCHED, 64, 64, form="nn", store="direct"),
    "fp8": case(FP8_BATCHED, 128, 128, (1, 1), 2, 2),
    "fp8 pair": case(FP8_BATCHED, 128, 256, (2, 1), 1, 1),
    "fp8 direct": case(FP8_BATCHED, 64, 64, (1, 1), 2, 2, store="direct"),
    "fp8 swapped": case(FP8_BATCHED_SWAPPED, 64),
    "fp8 swapped direct": case(FP8_BATCHED_SWAPPED, 16, 1, 1, 2, store="direct"),
    "heads": case(FP8_HEADS, 128, 128, (1, 1), 2, 2),
    "heads direct": case(FP8_HEADS, 64, 64, (1, 1), 2, 2, store="direct"),
    "sum": case(B16_SUMMED, 64, 64, (1, 1, 4), adds_c="tma"),
    "parts": case(B16_SUMMED, 128, 128, (1, 1, 1), 1, True, adds_c="threads"),
    "parts of one consumer": case(B16_SUMMED, 64, 128, (1, 1, 1), 1, True, output="bf16"),
}

PARTS = ("parts", "parts of one consumer")
FP8 = tuple(name for name in KERNELS if name.startswith("fp8"))
FP8_STAGED, FP8_SWAPPED = ("fp8", "fp8 pair"), ("fp8 swapped", "fp8 swapped direct")

MUTATIONS = [
    Mutation("multiply the first product's operands again and again", "gemm_kernel.cuh", "return matrix(tile);",
        "return 0;", ("batch", "pair", "direct", *FP8)),
    Mutation("load the first product's scales of A for all", "tile_scales.cuh", "row, block, tile.group);",
        "row, block, 0);", FP8),
    Mutation("take the first product's scales of B for all", "fp8_scaled.cuh", "tile.group * arg.scale_b_stride_g;",
        "0 * arg.scale_b_stride_g;", (*FP8_STAGED, "fp8 direct")),
    Mutation("take the first product's scales of B for all, swapped", "fp8_scaled_swapped.cuh",
        "tile.group * kernel.arg.scale_b_stride_g;", "0 * kernel.arg.scale_b_stride_g;", FP8_SWAPPED),
    Mutation("write every FP8 product over the first", "fp8_scaled.cuh",
        "tma_store_3d(arg.map_d, source, x, y, at.group);", "tma_store_3d(arg.map_d, source, x, y, 0);", FP8_STAGED),
    Mutation("take the right columns of a head for the left ones of the same", "raster.cuh",
        "head.quotient(column + right) * mid", "head.quotient(column) * mid", ("heads", "heads direct")),
    Mutation("store boxes of heads as if there were no columns between them", "fp8_scaled.cuh",
        "arg.heads->place(x), y,", "x, y,", ("heads",)),
    Mutation("write every product over the first, swapped", "fp8_scaled_swapped.cuh", "matrix = tile.group;",
        "matrix = 0;", FP8_SWAPPED),
    Mutation("write every product over the first", "b16_gemm.cuh", "tma_store_3d(arg.map_d, source, x, y, at.group);",
        "tma_store_3d(arg.map_d, source, x, y, 0);", ("batch", "pair")),
    Mutation("write single elements of every product over the first", "gemm_kernel.cuh",
        "static_cast<i64>(group) * arg.d_stride_g", "0 * arg.d_stride_g", ("direct", "fp8 direct", *FP8_SWAPPED)),
    Mutation("go on counting tiles after a product's last one", "scheduler.cuh", "index - group * raster->part.value",
        "index", ("batch", "pair", "direct", *FP8)),
    Mutation("add the first product only", "gemm_kernel.cuh",
        "return arg.raster->part.quotient(order.step_block(step));", "return 0;", ("sum", *PARTS)),
    Mutation("go on along K after a product's last block", "gemm_kernel.cuh",
        "(block - arg.raster->part.quotient(block) * arg.raster->part.value) * kBlockK", "block * kBlockK",
        ("sum", *PARTS)),
    Mutation("let every part have the first part's blocks of K", "gemm_kernel.cuh", "blockIdx.y * kClusterK + rank_k()",
        "rank_k()", PARTS),
    Mutation("leave out blocks of K that cannot be dealt out evenly", "order.cuh", "length(share + (rank < more))",
        "length(share)", ("sum", "parts")),
    Mutation("leave out the first part's sums", "parts_together.cuh",
        "for (u32 part = 0; part < gridDim.y; ++part)", "for (u32 part = 1; part < gridDim.y; ++part)", PARTS),
    Mutation("read this part's sums for each part", "parts_together.cuh", "+ part * each * kPairBytes",
        "+ blockIdx.y * each * kPairBytes", PARTS),
    Mutation("copy the first slice of a tile for each", "parts_together.cuh",
        "sums + static_cast<i64>(slice) * slice_bytes, s", "sums, s", PARTS),
    Mutation("add no C to the sums of all parts", "parts_together.cuh", "__fadd_rn(total[j][k], last[j][k]);",
        "__fadd_rn(total[j][k], 0.0f);", ("parts",)),
]  # fmt: skip
