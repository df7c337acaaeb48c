"""Device code of the FP8 kernel with any scaling broken on purpose, as in `mutations.py`: each edit makes a wrong
result, and no wait for something that never comes."""

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import FP8_ROWS, FP8_SCALED, FP8_SCALED_SWAPPED
from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "rows": case(FP8_SCALED, 128, 128),
    "parts": case(FP8_SCALED, 128, 160, adds_c="tma"),
    "blocks": case(FP8_SCALED, 64, 64, scaling="1d2d", adds_c="threads"),
    "whole": case(FP8_SCALED, 128, 128, scaling="rowwise"),
    "direct": case(FP8_SCALED, 64, 64, scaling="rowwise", store="direct"),
    "own": case(FP8_ROWS, 128, 192),
    "swapped": case(FP8_SCALED_SWAPPED, 32),
    "swapped split": case(FP8_SCALED_SWAPPED, 16, 4, scaling="1d2d", output="f32", adds_c="threads"),
}
"""All scalings, outputs, and ways to add C."""

_1D1D = ("rows", "parts")

# fmt: off
MUTATIONS = [
    Mutation("read B's scales from the slots of even rounds", "scaling.cuh",
             "(stage + parity * kStages) * kColumnBytes", "stage * kColumnBytes", _1D1D),
    Mutation("load B's scales into the slots of even rounds", "tile_scales.cuh",
             "stage + (cursor.round & 1) * Layout::kStages", "stage", _1D1D),
    Mutation("give a column its neighbour's scale", "scaling.cuh", "partial[i + 2 * row + 1] * odd",
             "partial[i + 2 * row + 1] * even", _1D1D),
    Mutation("give a row the scale of the one eight above", "scaling.cuh",
             "factors.row[kSlice][row], partial[i + 2 * row] * even",
             "factors.row[kSlice][0], partial[i + 2 * row] * even", _1D1D),
    Mutation("load scales of the first rows for every tile", "tile_scales.cuh", "barriers.full(stage), row, block);",
        "barriers.full(stage), 0, block);", ("rows", "parts", "blocks", "swapped split")),
    Mutation("give a weight the scale of the one eight above", "fp8_scaled_swapped.cuh", "i & 2 ? high : low", "low",
             ("swapped",)),
    Mutation("take the first tile's scales of B where operands are swapped", "fp8_scaled_swapped.cuh",
        "return {{tile.column / 128}, kernel.order(turn)};", "return {{0}, kernel.order(turn)};", ("swapped split",)),
    Mutation("store weights of the upper half in the lower", "swapped_output.cuh", "lane / 4 + i / 2 * 8,", "lane / 4,",
             ("swapped split",)),
    Mutation("take the first tile's scales of B", "fp8_scaled.cuh", "(tile.column + Columns::scale_begin(scale)) / 128",
             "Columns::scale_begin(scale) / 128", ("blocks",)),
    Mutation("scale a column by A alone", "scaling.cuh", "      sum[i] *= even;\n", "", ("whole", "direct", "own")),
    Mutation("take B's scales of another lane", "scaling.cuh", "from = column % 32 + lane % 4 * 2;",
             "from = lane % 4 * 2;", ("whole", "direct", "own")),
    Mutation("take A's scales of the first rows for every tile", "fp8_gemm.cuh",
             "mainloop.scaling.fetch(tile.row + first_row", "mainloop.scaling.fetch(first_row", ("own",)),
    Mutation("take B's scales of the first columns for every tile", "fp8_gemm.cuh",
             "return columns.at(kColumn + column + lane);", "return kColumn + column + lane;", ("own",)),
    Mutation("tell consumers the next tile's column as its row", "next_tile_hint.cuh", '{%1, %2};" ::"r"(place)',
             '{%1, %1};" ::"r"(place)', ("own",)),
    Mutation("add C to one of two neighbours", "fp8_scaled.cuh", "      pair[1] += second;\n", "", ("blocks",)),
    Mutation("write over D in place of adding to it", "fp8_scaled.cuh", "tma_add(arg.map_d, source, x, y);",
             "tma_store(arg.map_d, source, x, y);", ("parts",)),
    Mutation("stage one of two neighbours twice", "part_store.cuh", "within, words[i], words[i + 1]);",
             "within, words[i], words[i]);", ("rows", "parts", "blocks")),
    Mutation("store one of two neighbours twice", "fp8_scaled.cuh", "Out::store(kernel.arg.d, index + 1, pair[1]);",
             "Out::store(kernel.arg.d, index + 1, pair[0]);", ("direct",)),
    Mutation("drop the last block of K", "gemm_kernel.cuh", "Tile::kShapeK : arg.k;", "Tile::kShapeK : arg.k - 128;",
             tuple(name for name in KERNELS if name != "own")),
]
# fmt: on
