"""Mutations of the device code, one at a time: tests that a kernel passes must fail for each of these.

Each is one edit of one header. None makes a kernel hang, read outside its operands, or depend on timing: each gives a
wrong result, the same every time.
"""

from chosen import SWAPPED, find_config, make_params
from mutation import Mutation

from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "ahead": make_params(find_config(block_m=128, block_n=128, num_partials=2)),
    "one by one": make_params(find_config(block_m=256, block_n=128, num_partials=1)),
    "once": make_params(find_config(block_m=256, block_n=128, persistent=False)),
    "segments": make_params(find_config(block_m=64, block_n=112)),
    "split": make_params(find_config(block_m=128, block_n=64, cluster_k=2)),
    "in turn": make_params(find_config(block_m=128, block_n=64, in_turn=2)),
    "direct": make_params(find_config(block_m=64, block_n=48), store="direct"),
    "swapped": make_params(find_config(SWAPPED, block_m=32)),
    "swapped split": make_params(find_config(SWAPPED, block_m=48, cluster_k=2, consumers_k=2)),
    "swapped direct": make_params(find_config(SWAPPED, block_m=16), store="direct"),
}
"""Every schedule of products and promotion, all ways to store D, split K, parts of K in turn."""

UNSWAPPED_KERNELS = ("ahead", "one by one", "segments", "split", "direct")
STAGED = ("ahead", "one by one", "segments", "split")
SWAPPED_KERNELS = ("swapped", "swapped split", "swapped direct")
SWAPPED_STAGED = ("swapped", "swapped split")
EVERY = UNSWAPPED_KERNELS + SWAPPED_KERNELS


# fmt: off
MUTATIONS = [
    Mutation("skip A's scale in every other row group", "promotion.cuh",
             "factors.token[slice][0] = load_shared(address + slice * 256);", "factors.token[slice][0] = 1.0f;"),
    Mutation("take A's scale of the row above", "promotion.cuh", "load_shared(address + slice * 256 + 32);",
             "load_shared(address + slice * 256 + 28);"),
    Mutation("take B's scales of the block after", "promotion.cuh",
             "scale[r] = __shfl_sync(0xffffffffu, now[r], place);",
             "scale[r] = __shfl_sync(0xffffffffu, now[r], place + 1);", EVERY),
    Mutation("take B's scales from the first row", "promotion.cuh", "__ldg(base + part.row[r] * stride_n",
             "__ldg(base + r * stride_n", EVERY),
    Mutation("keep the first tile's scales of B", "promotion.cuh", "    part = that;\n", "", EVERY),
    Mutation("fetch the next tile's scales of B before the last page of this tile's is in use", "fp8_mainloop.cuh",
             "place % kPage == 0) scaling.weights.turn(place);\n    look_ahead();",
             "place % kPage == 0) look_ahead(), scaling.weights.turn(place);\n    else look_ahead();",
             ("ahead", "segments", "direct"), k=34 * 128 - 16),  # the last block but one begins a page
    Mutation("publish each tile for the one after it", "tile_store.cuh",
             "      ahead.advance();\n      hint.template publish<Gemm::kNeedsRow>(ahead, lane == 0);\n",
             "      hint.template publish<Gemm::kNeedsRow>(ahead, lane == 0);\n      ahead.advance();\n",
             ("ahead", "one by one", "split")),
    # "one by one" has a single band of a single row.
    Mutation("take the second column of a group for the first", "raster.cuh", "column = first + right;",
             "column = first + right / 2 * 2;", tuple(kernel for kernel in EVERY if kernel != "one by one")),
    Mutation("take the second column of a lone band for the first", "raster.cuh",
             "column = last_height.quotient(index);", "column = last_height.quotient(index) / 2 * 2;",
             ("one by one", "once")),
    Mutation("take the first block's scales of B from the second", "promotion.cuh",
        "kSpreads ? __shfl_sync(0xffffffffu, lead[r], 0)", "kSpreads ? __shfl_sync(0xffffffffu, lead[r], 1)", EVERY),
    Mutation("take B's scales of another consumer's blocks", "order.cuh",
        "const u32 step = turn + count * kConsumersK;", "const u32 step = count * kConsumersK;", ("swapped split",)),
    Mutation("take the first segment's scales of B for all", "columns.cuh", ": first(scale) / 128;",
             ": first(0) / 128;", ("segments",)),
    Mutation("change B's scale a group of columns late", "columns.cuh", "kBlockN == 256 ? 128 * scale : begin(scale);",
             "kBlockN == 256 ? 128 * scale : begin(scale) + (scale > 0 ? 16 : 0);", ("segments",)),
    Mutation("load the second segment from where the first ends", "operand.cuh",
             "load(from.maps[segment], place, k, row);",
             "load(from.maps[segment], place, k, columns.first(0) + place / 128);", ("segments",)),
    Mutation("store the second segment where the first ends", "columns.cuh",
             "found = first(segment) + column - begin(segment);", "found = first(0) + column;", ("segments",)),
    Mutation("drop the last block of K", "gemm_kernel.cuh", "return Tile::kShapeK ? Tile::kShapeK : arg.k;",
             "return (Tile::kShapeK ? Tile::kShapeK : arg.k) - kBlockK;", EVERY),
    Mutation("multiply the first quarter of every block of K four times", "warpgroup.cuh", "kStepKMajor = 32 / 16",
             "kStepKMajor = 0", EVERY),
    Mutation("forget the promotion of a tile's last partial sums", "fp8_mainloop.cuh",
             "promote_unit<false, kUnits - 1>(sum, partial[kLast], block);", "", ("ahead", "split", *SWAPPED_KERNELS)),
    Mutation("forget the promotion of one register", "promotion.cuh", "for (u32 i = (kFrom - kOffset) / 2; i <",
             "for (u32 i = (kFrom - kOffset) / 2 + 1; i <"),
    Mutation("start with the sums of the tile before", "promotion.cuh",
             "sum = kFresh ? scale * partial : sum + scale * partial;", "sum += scale * partial;", ("one by one",)),
    Mutation("promote a partial sum twice", "promotion.cuh", "(i & 2) ? high : low, partial[i]);",
             "(i & 2) ? high : low, partial[i] * (i == 1 ? 2.0f : 1.0f));"),
    # With two blocks of K for each split, each set of partial sums is used once, while it is still zero.
    Mutation("keep the old partial sums", "fp8_mainloop.cuh", "block.stage, kRight), opaque_zero);",
             "block.stage, kRight), opaque_zero + 1);", tuple(kernel for kernel in EVERY if kernel != "swapped split")),
    Mutation("read operands with another swizzle", "warpgroup.cuh", "constexpr u64 kSwizzle128B = 1ull << 62;",
             "constexpr u64 kSwizzle128B = 2ull << 62;", EVERY),
    Mutation("swap rows in the store", "tile_store.cuh", "const u32 row = warp * 16 + lane % 16;",
             "const u32 row = warp * 16 + (lane % 16 ^ 1);", STAGED),
    Mutation("stage without the swizzle that the store undoes", "tile_store.cuh",
             "return unit ^ (row / (8 / kUnits) % kUnits);", "return unit;", STAGED),
    Mutation("swap columns in a direct store", "tile_store.cuh", "if (x < columns) out[0] = static_cast<u16>(packed);",
             "if (x < columns) out[0] = static_cast<u16>(packed >> 16);", ("direct",)),
    Mutation("store the first split's columns for all", "fp8_gemm.cuh",
             "Store::stage_all(area, sum, owner * kColumns / 2, warp, lane);",
             "Store::stage_all(area, sum, 0, warp, lane);", ("split",)),
    Mutation("take the scale of the token beside", "promotion.cuh", "factors.token[i], factors.token[i + 1]);",
             "factors.token[i + 1], factors.token[i]);", SWAPPED_KERNELS),
    Mutation("drop the weights' scale for every other token", "promotion.cuh",
             "      factors.token[i] *= factors.weight[0];\n", "", SWAPPED_KERNELS),
    Mutation("multiply the first stage's weights by all tokens", "fp8_mainloop.cuh", "(left, block.stage, kLeft)",
             "(left, 0, kLeft)", SWAPPED_KERNELS),
    Mutation("promote three of four sums, swapped", "promotion.cuh",
             "      add<kFresh>(sum[i + 3], odd, partial[i + 3]);\n", "", SWAPPED_KERNELS),
    Mutation("copy a lone tile without the swizzle that it was staged with", "tile_store.cuh",
             "load_shared_16(box + r * kRowBytes + swizzled(r, unit) * 16)",
             "load_shared_16(box + r * kRowBytes + unit * 16)", ("once",)),
    Mutation("copy every other chunk of tokens twice", "swapped_output.cuh", "const u32 chunk = pair + lane / 16, y",
             "const u32 chunk = pair, y", SWAPPED_STAGED),
    Mutation("copy one warp's weights for all", "swapped_output.cuh",
             "const u32 row = lane % 8, unit = warp * 2 + lane / 8 % 2;",
             "const u32 row = lane % 8, unit = lane / 8 % 2;", SWAPPED_STAGED),
    Mutation("leave out one part in the split-K exchange", "split_k_exchange.cuh",
             "for (u32 split = 0; split < kSplits; ++split)", "for (u32 split = 1; split < kSplits; ++split)",
             ("split", "swapped split")),
    Mutation("add a part of K to the parts before it twice", "fp8_mainloop.cuh",
             "this->total[slice][i] + sum[slice][i];\n    clear(sum);",
             "this->total[slice][i] + sum[slice][i];", ("in turn",)),
    Mutation("leave out the parts of K before the last one", "fp8_mainloop.cuh",
             "sum[kSlice][i] = this->total[kSlice][i] + sum[kSlice][i];", "sum[kSlice][i] += 0.0f;", ("in turn",)),
    Mutation("add what another thread was sent", "split_k_exchange.cuh",
             "const u32 mine = slots + consumer * kConsumerBytes + thread * 16;",
             "const u32 mine = slots + consumer * kConsumerBytes + (thread ^ 1) * 16;", ("split", "swapped split")),
    Mutation("swap tokens in the store", "swapped_output.cuh", "const u32 token = lane % 8, unit",
             "const u32 token = lane % 8 ^ 1, unit", SWAPPED_STAGED),
    Mutation("stage transposed without the swizzle that the store undoes", "swapped_output.cuh",
             "token * 128 + (unit ^ token) * 16;", "token * 128 + unit * 16;", SWAPPED_STAGED),
    Mutation("swap weights in a direct store", "swapped_output.cuh", "warp * 16 + lane / 4 + i / 2 * 8,",
             "warp * 16 + (lane / 4 ^ 1) + i / 2 * 8,", ("swapped direct",)),
    Mutation("store one token twice", "swapped_output.cuh", "use(sum[0][chunk * 4 + i], y, x);",
             "use(sum[0][chunk * 4 + i / 2 * 2], y, x);", ("swapped direct",)),
]
# fmt: on
