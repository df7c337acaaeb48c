"""Device code of the grouped kernels broken on purpose, as in `mutations.py`: each edit makes a wrong result, and no
wait for something that never comes."""

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import B16_GROUPED, B16_K_GROUPED, FP8_GROUPED, FP8_K_GROUPED
from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "labels": case(FP8_GROUPED, 128, 128, (1, 1), 2, 1, grouping="contiguous"),
    "ends": case(B16_GROUPED, 128, 128, grouping="psum"),
    "counts": case(FP8_GROUPED, 64, 64, grouping="masked"),
    "depths": case(B16_K_GROUPED, 128, 128, output="f32", adds_c="tma"),
    "maps": case(FP8_K_GROUPED, 128, 128, (1, 1), 2, 1, adds_c="tma"),
    "mixed": case(FP8_K_GROUPED, 128, 256, (1, 1), 1, 1, scaling="1d2d", adds_c="tma"),
}
"""A kernel of each form."""

# fmt: off
MUTATIONS = [
    Mutation("take the label of a tile's first row", "groups.cuh", "most = __reduce_max_sync(0xffffffffu, most);",
             "most = __shfl_sync(0xffffffffu, most, 0);", ("labels",)),
    Mutation("leave out the rows of a group's last tile", "groups.cuh",
             "(first + tile) * kBlockM + (static_cast<u32>(word) & 0xffff)", "(first + tile) * kBlockM", ("labels",)),
    Mutation("leave out 64 rows of each group", "groups.cuh", "used = raster->skips ? last : row + kBlockM;",
             "used = last - 64;", ("ends", "counts")),
    Mutation("begin a group where the one before ends", "groups.cuh",
             "ceil_div(static_cast<u32>(max_of(previous, 0)), arg.alignment) * arg.alignment",
             "static_cast<u32>(max_of(previous, 0))", ("ends",)),
    Mutation("forget the groups before a warp's", "groups.cuh", "before = __shfl_sync(0xffffffffu, given, 31);",
             "before = 0;", ("ends",)),
    Mutation("store a group's last rows with the next group's first", "part_store.cuh",
             "(kEnds ? y + 64 <= end : y < end)", "y < end", ("ends", "counts")),
    Mutation("leave a group's last row out", "part_store.cuh", "row < rows; row += kRows",
             "row + 1 < rows; row += kRows", ("ends", "counts")),
    Mutation("multiply by the first group's weights", "gemm_kernel.cuh",
             "tile.group * B::rows(n()) + column(tile)", "column(tile)", ("labels", "ends", "counts")),
    Mutation("scale by the first group's scales of B", "fp8_scaled.cuh", "tile.group * arg.scale_b_stride_g",
             "0 * arg.scale_b_stride_g", ("labels", "counts")),
    Mutation("scale by the first group's scales of A", "tile_scales.cuh", "block += tile.group * order.blocks;", "",
             ("counts",)),
    Mutation("leave padding as it was", "groups.cuh", "store_16(line + x, Bytes16{});", ";", ("labels",)),
    Mutation("multiply rows of the next group too", "b16_mainloop.cuh",
             "if (before_last-- == 0 && last_rows < 64) clear();", "before_last--;", ("depths",)),
    Mutation("clear one row less", "b16_mainloop.cuh", "u32 place = last_rows * 128 +",
             "u32 place = last_rows * 128 + 128 +", ("depths",)),
    Mutation("begin each group's scales at the first block", "tile_scales.cuh",
             "tile.first_k + step : +Kernel::kNowhere", "step : +Kernel::kNowhere", ("maps", "mixed")),
    Mutation("read every group's values from the beginning", "k_group_maps.cuh", "static_cast<u64>(before) *", "0 *",
             ("maps", "mixed")),
    Mutation("begin each group's blocks of B's scales at the first", "fp8_scaled.cuh",
             "tile.first_k * arg.scale_b_stride_k", "0 * arg.scale_b_stride_k", ("mixed",)),
    Mutation("scale every tile by the blocks of the first columns", "fp8_scaled.cuh",
             "(tile.column + Columns::scale_begin(scale)) / 128", "Columns::scale_begin(scale) / 128", ("mixed",)),
    Mutation("scale the right half of a tile as its left", "fp8_scaled.cuh",
             "(tile.column + Columns::scale_begin(scale)) / 128", "tile.column / 128", ("mixed",)),
    Mutation("write every group's matrix over the first", "b16_gemm.cuh",
             "tma_add_3d(arg.map_d, source, x, y, at.group);", "tma_add_3d(arg.map_d, source, x, y, 0);", ("depths",)),
]
# fmt: on
