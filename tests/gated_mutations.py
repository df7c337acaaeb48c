"""Device code of products with a gate (SwiGLU) broken on purpose, as in `mutations.py`."""

from __future__ import annotations

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.fp8_gated import FP8_GATED
from deep_gemm.params import KernelParams

_WIDE = 128, 256, (1, 1), 1, 1

KERNELS: dict[str, KernelParams] = {
    "halves": case(FP8_GATED, 64, 64, (1, 1), 2, 2, epilogue="swiglu"),
    "pair": case(FP8_GATED, 128, 256, (2, 1), 1, 1, epilogue="alpha+rows+bias:f32+swiglu", output="f32"),
    "cast": case(FP8_GATED, *_WIDE, epilogue="swiglu+clamp:2.0+fp8:ue8m0", output="e4m3"),
    "labels": case(FP8_GATED, *_WIDE, epilogue="bias:f32+swiglu+fp8", output="e4m3", grouping="contiguous"),
    "ends": case(FP8_GATED, 64, 128, (1, 1), 2, 1, epilogue="swiglu", grouping="psum"),
    "counts": case(FP8_GATED, *_WIDE, epilogue="rows+bias:bf16+swiglu+clamp:2.0+fp8", output="e4m3", grouping="masked"),
}
"""Dense and in each form of groups, with and without FP8 output."""

CAST = "cast", "labels", "counts"

# fmt: off
MUTATIONS = [
    Mutation("swap gate and up", "finish.cuh", "Swiglu<kLimit>::of(gate[i], up[i])",
             "Swiglu<kLimit>::of(up[i], gate[i])", tuple(KERNELS)),
    Mutation("load gate's rows of B for up", "operand.cuh", "row + half * (from.edge / 2)", "row", tuple(KERNELS)),
    Mutation("take gate's scales of B for up", "fp8_scaled.cuh", "(tile.column + scale * kernel.n()) / 256",
             "tile.column / 256", tuple(KERNELS)),
    Mutation("add gate's bias to up", "finish.cuh", "return n + at(i);", "return at(i);", ("pair", "labels")),
    Mutation("cast a row by the scale of the one eight above", "finish.cuh",
             "sum[i + 2] * inverse[1], sum[i + 3] * inverse[1]", "sum[i + 2] * inverse[0], sum[i + 3] * inverse[0]",
             ("labels", "counts")),  # powers of two are alike
    Mutation("store a row's scale eight rows above", "finish.cuh", "*place(kernel, row + i * 8, block, group) = scale;",
             "*place(kernel, row, block, group) = scale;", CAST),
    Mutation("store scales of all groups where the first one's are", "finish.cuh",
             " + opaque(group) * kernel.arg.sfd_stride_g", "", ("counts",)),
    Mutation("leave the last scale of padding as it was", "finish.cuh", "block < kernel.columns() / 128;",
             "block + 1 < kernel.columns() / 128;", ("labels",)),
    Mutation("store the bytes of one row in the one eight below", "part_store.cuh",
             "store_half(place + (row + 8) * kRowBytes, words[i] >> 16);",
             "store_half(place + (row + 8) * kRowBytes, words[i]);", CAST),
]
# fmt: on
