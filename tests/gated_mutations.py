"""Device code of products with a gate (SwiGLU) or with FP8 output broken on purpose, as in `mutations.py`."""

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import B16_GEMM, FP8_GROUPED, FP8_SCALED
from deep_gemm.kernels.hopper.gated import B16_GATED, FP8_GATED
from deep_gemm.params import KernelParams

_WIDE = 128, 256, (1, 1), 1, 1
_PAIR = 128, 256, (2, 1), 1, 1

KERNELS: dict[str, KernelParams] = {
    "halves": case(FP8_GATED, 64, 64, (1, 1), 2, 2, epilogue="swiglu"),
    "pair": case(FP8_GATED, 128, 256, (2, 1), 1, 1, epilogue="alpha+rows+bias:f32+swiglu", output="f32"),
    "cast": case(FP8_GATED, *_WIDE, epilogue="swiglu+clamp:2.0+fp8:ue8m0", output="e4m3"),
    "few rows": case(FP8_GATED, 64, 256, (1, 1), 2, 1, epilogue="rows+bias:f32+swiglu+fp8", output="e4m3"),
    "labels": case(FP8_GATED, *_WIDE, epilogue="bias:f32+swiglu+fp8", output="e4m3", grouping="contiguous"),
    "ends": case(FP8_GATED, 64, 128, (1, 1), 2, 1, epilogue="swiglu", grouping="psum"),
    "counts": case(FP8_GATED, *_WIDE, epilogue="rows+bias:bf16+swiglu+clamp:2.0+fp8", output="e4m3", grouping="masked"),
    "turns": case(FP8_GATED, *_PAIR, epilogue="bias:f32+swiglu+interleaved+fp8", output="e4m3"),
    "turns counts": case(FP8_GATED, *_WIDE, epilogue="bias:f32+swiglu+interleaved", grouping="masked"),
    "turns labels": case(FP8_GATED, 64, 64, (1, 1), 2, 2, epilogue="swiglu+interleaved", grouping="contiguous"),
    "eights ends": case(FP8_GATED, *_WIDE, epilogue="rows+swiglu+interleaved:8+fp8", output="e4m3", grouping="psum"),
    "eights counts": case(FP8_GATED, 64, 64, (1, 1), 2, 2, epilogue="swiglu+interleaved:8", grouping="masked"),
    "half turns": case(B16_GATED, 128, 256, (2, 1, 1), epilogue="bias:f32+swiglu+interleaved"),
    "half turns ends": case(B16_GATED, 64, 128, epilogue="bias:bf16+swiglu+interleaved", grouping="psum"),
    "half": case(B16_GATED, 64, 128, epilogue="swiglu"),
    "half pair": case(B16_GATED, 128, 256, (2, 1, 1), epilogue="alpha+rows+bias:f32+swiglu", output="f32"),
    "half cast": case(B16_GATED, 128, 256, epilogue="bias:f32+swiglu+fp8", output="e4m3"),
    "half labels": case(B16_GATED, 128, 128, epilogue="bias:f32+swiglu", grouping="contiguous"),
    "half counts": case(B16_GATED, 128, 256, epilogue="rows+swiglu+fp8", output="e4m3", grouping="masked"),
    "half plain": case(B16_GEMM, 128, 256, epilogue="bias:f32+silu+fp8", output="e4m3"),
    "half tall": case(B16_GEMM, 256, 128, (1, 2, 1), epilogue="fp8", output="e4m3"),
    "plain": case(FP8_SCALED, *_WIDE, epilogue="rows+bias:f32+gelu+fp8", output="e4m3", scaling="1d2d"),
    "plain labels": case(FP8_GROUPED, 64, 128, (1, 1), 2, 1, epilogue="silu+fp8", output="e4m3", grouping="contiguous"),
    "plain counts": case(FP8_GROUPED, *_WIDE, epilogue="bias:bf16+fp8", output="e4m3", grouping="masked"),
}
"""Dense and in each form of groups, with and without FP8 output; and FP8 output without a gate."""

PLAIN = "plain", "plain labels", "plain counts", "half plain", "half tall"
GATED = tuple(name for name in KERNELS if name not in PLAIN)
HALF_TURNS = "half turns", "half turns ends"
HALF = "half", "half pair", "half cast", "half labels", "half counts", *HALF_TURNS
TURNS = tuple(name for name in KERNELS if "turns" in name)
EIGHTS = "eights ends", "eights counts"
CAST = "cast", "few rows", "labels", "counts", "turns", "eights ends", "half cast", "half counts", *PLAIN

# fmt: off
MUTATIONS = [
    Mutation("swap gate and up", "finish.cuh", "Swiglu<kLimit>::of(gate[i], up[i])",
             "Swiglu<kLimit>::of(up[i], gate[i])", GATED),
    Mutation("load gate's rows of B for up", "operand.cuh", "row + half * (from.edge / 2)", "row",
             tuple(name for name in GATED if name not in (*TURNS, *EIGHTS))),
    Mutation("load each second eight of rows", "operand.cuh", "place, k, 0, row / 8);", "place, k, 0, row / 16);",
             EIGHTS),
    Mutation("take gate's scales of B for up", "fp8_scaled.cuh", "(tile.column + scale * kernel.n()) / 256",
             "tile.column / 256", tuple(name for name in GATED if name not in (*HALF, *TURNS))),
    Mutation("add gate's bias to up", "finish.cuh", "(kInterleaved ? 1 : n) + at(part + i)", "at(part + i)",
        ("pair", "few rows", "labels", "half pair", "half cast", "half labels", "turns", "turns counts", *HALF_TURNS)),
    Mutation("cast a row by the scale of the one eight above", "finish.cuh",
             "sum[i + 2] * inverse[1], sum[i + 3] * inverse[1]", "sum[i + 2] * inverse[0], sum[i + 3] * inverse[0]",
             ("labels", "counts", "turns", "half cast", "half counts", *PLAIN)),  # powers of two are alike
    Mutation("store a row's scale eight rows above", "finish.cuh", "*place(kernel, row + i * 8, block, group) = scale;",
             "*place(kernel, row, block, group) = scale;", CAST),
    Mutation("store scales of all groups where the first one's are", "finish.cuh",
             " + opaque(group) * kernel.arg.sfd_stride_g", "", ("counts", "plain counts", "half counts")),
    Mutation("leave the last scale of padding as it was", "finish.cuh", "block < kernel.columns() / 128;",
             "block + 1 < kernel.columns() / 128;", ("labels", "plain labels")),
    Mutation("store a tile's scales where those of its first columns are", "fp8_scaled.cuh",
             "y, end, column + kColumn + box, matrix", "y, end, column, matrix", ("plain", "plain counts")),
    Mutation("load gate's rows of interleaved ones for up", "operand.cuh",
             "half ? from.last : from.map", "from.map", (*TURNS, *EIGHTS)),
    Mutation("take twice as many interleaved rows for a group", "operand.cuh",
             "return kTurn > 0 ? n / 2 : n;", "return n;",
             ("turns counts", "turns labels", "half turns ends", *EIGHTS)),
    Mutation("take the first of B's scales for all", "promotion.cuh", "kScale % Columns::kScales", "0",
             ("pair", "cast", "counts", "turns", "turns counts")),
    Mutation("take interleaved rows' scales where those of halves are", "fp8_scaled.cuh",
        ": Layout::kInterleaved ?", ": false ?", ("turns", "turns counts", "turns labels")),
    Mutation("take a gate's bias as that of halves", "finish.cuh", "return at(part + i) * kApart;",
             "return at(part + i);", ("turns", "turns counts", *HALF_TURNS)),
    Mutation("take the bias of up for a gate", "finish.cuh", "lane % kRun * kApart, group)", "lane % kRun, group)",
             ("turns", "turns counts", *HALF_TURNS)),
    Mutation("take gate's sums for up's", "b16_gemm.cuh", "gate, gate + kColumns / 2,", "gate, gate,", HALF),
    Mutation("take the bias of other columns", "b16_gemm.cuh", "return column / 2 + i;", "return column + i;",
             ("half pair", "half cast", "half labels")),
    Mutation("store 16-bit tiles where those of the product are", "gemm_kernel.cuh", "return tile.column / B::kHalves;",
             "return tile.column;", HALF),
    Mutation("store a 16-bit tile's scales where those of the first tile are", "b16_gemm.cuh",
             "(column / Layout::B::kHalves + first) / 128", "first / 128", ("half cast", "half counts", "half tall")),
    Mutation("store a 16-bit tile's scales where those of its first columns are", "b16_gemm.cuh",
             "(column / Layout::B::kHalves + first) / 128", "column / Layout::B::kHalves / 128", ("half plain",)),
    Mutation("store the scales of a consumer's last rows in its first", "b16_gemm.cuh",
             "row + part / Store::kBoxes * 64 + warp * 16", "row + warp * 16", ("half tall",)),
    Mutation("store the bytes of one row in the one eight below", "part_store.cuh",
             "store_half(place + (row + 8) * kRowBytes, words[i] >> 16);",
             "store_half(place + (row + 8) * kRowBytes, words[i]);", CAST),
]
# fmt: on
