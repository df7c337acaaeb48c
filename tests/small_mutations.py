"""Ways to break the kernel without a ring; see `mutations`."""

from __future__ import annotations

from mutation import Mutation

SMALL_MUTATIONS = [
    Mutation(
        "skip A's scales in every other row group, without a ring",
        "fp8_small.cuh",
        "lower = load_shared(token + 32) * weight;",
        "lower = weight;",
        ("small",),
    ),
    Mutation(
        "take A's scales of the first block, without a ring",
        "fp8_small.cuh",
        "      of_token += arg.scale_a_stride * kShares;\n",
        "",
        ("small",),
    ),
    Mutation(
        "take B's scales from the first row, without a ring",
        "fp8_small.cuh",
        "arg.scale_b + column / 128 * arg.scale_b_stride_n +",
        "arg.scale_b +",
        ("small",),
    ),
    Mutation(
        "take B's scales of the first block, without a ring",
        "fp8_small.cuh",
        "      of_weights += arg.scale_b_stride_k * kShares;\n",
        "",
        ("small",),
    ),
    Mutation(
        "add blocks of K before they are scaled, without a ring",
        "fp8_small.cuh",
        "matrix_descriptor(low + kBytesA / 16), 0);",
        "matrix_descriptor(low + kBytesA / 16), 1);",
        ("small",),
    ),
    Mutation(
        "leave out a share's sums, without a ring",
        "fp8_small.cuh",
        "for (u32 s = 0; s < kShares; ++s) add_shared",
        "for (u32 s = 1; s < kShares; ++s) add_shared",
        ("small",),
    ),
    Mutation(
        "swizzle rows four apart alike, without a ring",
        "fp8_small.cuh",
        "(unit ^ first) * 16",
        "(unit ^ first & 3) * 16",
        ("small",),
    ),
    Mutation(
        "multiply the first block again and again, without a ring",
        "fp8_small.cuh",
        "low += kStageBytes / 16, scale",
        "scale",
        ("small",),
    ),
]
