"""Device code of MXFP4 weights broken on purpose, as in `mutations.py`."""

from fp4_runs import RUNS
from mutation import Mutation

KERNELS = {name: run.params for name, run in RUNS.items()}

_SPLIT = ("fp8 split", "bf16 split", "bf16 split by three")
_FP8 = ("fp8", "fp8 masked", "fp8 high", "fp8 split", "psum")
_BF16 = ("bf16", "bf16 masked", "bf16 high", "index")
_RELATIVE = ("fp8", "bf16", "fp8 masked", "bf16 masked", "fp8 high", "bf16 high", "index", "psum")
_LARGE = ("fp8 large", "bf16 large", "fp8 large psum", "bf16 large masked")
_WIDE = ("fp8 wide", "fp8 wide index", "bf16 wide psum", "bf16 wide masked")
_STREAM = (*_RELATIVE, "fp8 absolute")

# fmt: off
MUTATIONS = [
    Mutation("leave A's scales out", "fp4_products.cuh", "sum[i] += products[i] * scale[i / 4 * 2 + i % 2];",
             "sum[i] += products[i];", _FP8),
    Mutation("take the neighbour's scale of A", "fp4_products.cuh", "products[i] * scale[i / 4 * 2 + i % 2]",
             "products[i] * scale[i / 4 * 2]", _FP8),
    Mutation("multiply the first half of a block by all weights", "fp4_products.cuh", "a1, b + step_of(2), 1)",
             "a1, b, 1)", (*_RELATIVE, *_SPLIT)),
    Mutation("keep the sums of the tile before", "fp4_products.cuh", "kPromotes ? 0 : keep", "kPromotes ? 0 : 1",
             _BF16),
    Mutation("take the upper row's exponent for the lower", "fp4_products.cuh", "f1 = words.power(1, kS)",
             "f1 = words.power(0, kS)", ("fp8 absolute", "bf16 absolute")),
    Mutation("read staged tokens unswizzled", "fp4_products.cuh", "(thread % 8 ^ y % 8) * 16", "thread % 8 * 16",
             (*_STREAM, *_SPLIT, "bf16 absolute")),
    Mutation("swap the tokens of a pair", "fp4_products.cuh", "pack_bf16(v[0] * f0, v[1] * f0)",
             "pack_bf16(v[1] * f0, v[0] * f0)", (*_STREAM, *_SPLIT, "bf16 absolute")),
    Mutation("take the exponents of the third 32 for the first", "fp4_weights.cuh", "0x4440u + 2 * h + s / 2",
             "0x4440u + 2 * h + (s / 2 ^ 1)", _FP8),
    Mutation("take the exponents of the third 32 for the first in BF16", "fp4_weights.cuh", "8 * (s / 2));",
             "8 * (s / 2 ^ 1));", (*_BF16, "bf16 split")),
    Mutation("leave the signs of a word's last pair out", "fp4_weights.cuh", "* 0x4108u", "* 0x0108u",
             (*_BF16, "bf16 absolute", "bf16 split")),
    Mutation("take the exponents of the row below", "fp4_weights.cuh", "+ lane / 4 * 4;", "+ (lane / 4 ^ 1) * 4;",
             tuple(RUNS)),
    Mutation("leave the signs of a word's second codes out", "fp4_weights.cuh", "| ((w << 4) & 0x80808080u)", "",
             (*_FP8, "fp8 absolute")),
    Mutation("rotate a word's second pair too far", "fp4_weights.cuh", "__funnelshift_r(w, w, 3)",
             "__funnelshift_r(w, w, 6)", (*_BF16, "bf16 absolute", "bf16 split")),
    Mutation("leave the second block of a stage out", "fp4_gemm.cuh",
             "if (unit * 2 + 1 < arg.blocks)\n          Products",
             "if (unit * 2 + 3 < arg.blocks)\n          Products", (*_STREAM, "bf16 absolute")),
    Mutation("forget what other CTAs have summed up", "fp4_gemm.cuh",
             "if (walk.k1 < walk.units) add_tails(walk, sum, consumer, thread);", "",
             ("fp8", "bf16", "fp8 high", "fp8 absolute")),
    Mutation("take the upper row's factor for the lower", "fp4_gemm.cuh",
             "f1 = __ldg(factors + warp * 16 + lane / 4 + 8);", "f1 = f0;", _RELATIVE),
    Mutation("take the first group's weights for all", "fp4_gemm.cuh",
             "((static_cast<u64>(group) * arg.pieces + min_of(index", "((0 * group + min_of(index",
             ("fp8 masked", "bf16 masked", "bf16 absolute", "bf16 high", "index", "psum")),
    Mutation("take the first group's scales of A", "fp4_gemm.cuh", "masked * arg.blocks);", "0);", ("fp8 masked",)),
    Mutation("take the upper row's factor for the lower where K is split", "fp4_split.cuh", "f1 = __ldg(factors + 8)",
             "f1 = __ldg(factors)", _SPLIT),
    Mutation("write decoded weights unswizzled", "fp4_large.cuh", "row * 128 + lane / 4 * 16", "row * 128", _LARGE),
    Mutation("decode the first block again", "fp4_large.cuh", "from += kTeams * kPiece;", "", _LARGE),
    Mutation("take a neighbour's factor in a large tile", "fp4_large.cuh", "sum[i * 4 + 1] * odd)",
             "sum[i * 4 + 1] * even)", _LARGE),
    Mutation("leave the rows of the second consumer out", "fp4_large.cuh",
             "at.tile.row + kBox < at.tile.last;", "false;", _LARGE),
    Mutation("leave A's scales out of a large tile", "fp4_large.cuh", "i & 2 ? high : low, partial[i]",
             "1.0f, partial[i]", ("fp8 large", "fp8 large psum")),
    Mutation("leave A's scales out of a wide tile", "fp4_wide.cuh", "settled(scale[i])", "settled(1.0f)", _WIDE[:2]),
    Mutation("take the upper row's factor for the lower in a wide tile", "fp4_wide.cuh", "load_shared(factors + 32)",
             "load_shared(factors)", _WIDE),
    Mutation("load a consumer's first weights for all", "fp4_wide.cuh", "tile.column / kPieceRows + lane,",
             "tile.column / kPieceRows + lane / 2 * 2,", _WIDE),
    Mutation("multiply the first half of the tokens twice", "fp4_wide.cuh", "issue<1>(p1, a0",
             "issue<0>(p1, a0", _WIDE[:2]),
    Mutation("take the first slice's weights for the second half of K", "fp4_wide.cuh", "decode<1, 1>(a1",
             "decode<0, 1>(a1", _WIDE[2:]),
    Mutation("keep the sums of the wide tile before", "fp4_wide.cuh", "last ? at.zero : 1);\n    wgmma",
             "1);\n    wgmma", _WIDE[2:]),
    Mutation("store all slices of a wide tile in one place", "fp4_wide.cuh", "load_word(note + 8) + index * kPieceRows",
             "load_word(note + 8)", _WIDE),
]
# fmt: on
