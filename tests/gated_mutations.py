"""Device code of products with a gate (SwiGLU) or with FP8 output broken on purpose, as in `mutations.py`."""

from __future__ import annotations

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import FP8_GROUPED, FP8_SCALED
from deep_gemm.kernels.fp8_gated import FP8_GATED
from deep_gemm.params import KernelParams

_WIDE = 128, 256, (1, 1), 1, 1

KERNELS: dict[str, KernelParams] = {
    "halves": case(FP8_GATED, 64, 64, (1, 1), 2, 2, epilogue="swiglu"),
    "pair": case(FP8_GATED, 128, 256, (2, 1), 1, 1, epilogue="alpha+rows+bias:f32+swiglu", output="f32"),
    "cast": case(FP8_GATED, *_WIDE, epilogue="swiglu+clamp:2.0+fp8:ue8m0", output="e4m3"),
    "few rows": case(FP8_GATED, 64, 256, (1, 1), 2, 1, epilogue="rows+bias:f32+swiglu+fp8", output="e4m3"),
    "labels": case(FP8_GATED, *_WIDE, epilogue="bias:f32+swiglu+fp8", output="e4m3", grouping="contiguous"),
    "ends": case(FP8_GATED, 64, 128, (1, 1), 2, 1, epilogue="swiglu", grouping="psum"),
    "counts": case(FP8_GATED, *_WIDE, epilogue="rows+bias:bf16+swiglu+clamp:2.0+fp8", output="e4m3", grouping="masked"),
    "plain": case(FP8_SCALED, *_WIDE, epilogue="rows+bias:f32+gelu+fp8", output="e4m3", scaling="1d2d"),
    "plain labels": case(FP8_GROUPED, 64, 128, (1, 1), 2, 1, epilogue="silu+fp8", output="e4m3", grouping="contiguous"),
    "plain counts": case(FP8_GROUPED, *_WIDE, epilogue="bias:bf16+fp8", output="e4m3", grouping="masked"),
}
"""Dense and in each form of groups, with and without FP8 output; and FP8 output without a gate."""

PLAIN = "plain", "plain labels", "plain counts"
GATED = tuple(name for name in KERNELS if name not in PLAIN)
CAST = "cast", "few rows", "labels", "counts", *PLAIN

# fmt: off
MUTATIONS = [
    Mutation("swap gate and up", "finish.cuh", "Swiglu<kLimit>::of(gate[i], up[i])",
             "Swiglu<kLimit>::of(up[i], gate[i])", GATED),
    Mutation("load gate's rows of B for up", "operand.cuh", "row + half * (from.edge / 2)", "row", GATED),
    Mutation("take gate's scales of B for up", "fp8_scaled.cuh", "(tile.column + scale * kernel.n()) / 256",
             "tile.column / 256", GATED),
    Mutation("add gate's bias to up", "finish.cuh", "return n + at(part + i);", "return at(part + i);",
             ("pair", "few rows", "labels")),
    Mutation("cast a row by the scale of the one eight above", "finish.cuh",
             "sum[i + 2] * inverse[1], sum[i + 3] * inverse[1]", "sum[i + 2] * inverse[0], sum[i + 3] * inverse[0]",
             ("labels", "counts", *PLAIN)),  # powers of two are alike
    Mutation("store a row's scale eight rows above", "finish.cuh", "*place(kernel, row + i * 8, block, group) = scale;",
             "*place(kernel, row, block, group) = scale;", CAST),
    Mutation("store scales of all groups where the first one's are", "finish.cuh",
             " + opaque(group) * kernel.arg.sfd_stride_g", "", ("counts", "plain counts")),
    Mutation("leave the last scale of padding as it was", "finish.cuh", "block < kernel.columns() / 128;",
             "block + 1 < kernel.columns() / 128;", ("labels", "plain labels")),
    Mutation("store a tile's scales where those of its first columns are", "fp8_scaled.cuh",
             "(column + kColumn + box) / 128, matrix", "column / 128, matrix", ("plain", "plain counts")),
    Mutation("store the bytes of one row in the one eight below", "part_store.cuh",
             "store_half(place + (row + 8) * kRowBytes, words[i] >> 16);",
             "store_half(place + (row + 8) * kRowBytes, words[i]);", CAST),
]
# fmt: on
