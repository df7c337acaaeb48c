"""Mutations of the device code of the 16-bit kernels, as in `mutations.py`: each edit gives a wrong result and no
hang."""

from chosen import case
from mutation import Mutation

from deep_gemm.kernels.families import B16_GEMM, B16_SWAP_AB, B16_SWAPPED
from deep_gemm.params import KernelParams

KERNELS: dict[str, KernelParams] = {
    "late": case(B16_GEMM, 128, 128), "float": case(B16_GEMM, 128, 128, output="f32", adds_c="threads"),
    "mn major": case(B16_GEMM, 128, 256, form="tn"), "split": case(B16_GEMM, 64, 64, (1, 1, 2)),
    "in turn": case(B16_GEMM, 128, 128, (1, 1, 1), 1, False, 2),
    "direct": case(B16_GEMM, 64, 64, store="direct"), "transposed": case(B16_SWAP_AB, 136, 128),
    "swapped": case(B16_SWAPPED, 32), "swapped split": case(B16_SWAPPED, 16, 2, 2, output="f32"),
}  # fmt: skip
"""All layouts of operands, all ways to store D, split K."""

_UPRIGHT = ("late", "float", "mn major", "split", "direct", "transposed")

# fmt: off
MUTATIONS = [
    # Not where consumers split K: they also load a block past the last one, which here is the dropped one.
    Mutation("drop the last block of K", "gemm_kernel.cuh", "Tile::kShapeK : arg.k;", "Tile::kShapeK : arg.k - 64;",
             (*_UPRIGHT, "swapped")),
    # Not transposed: products of 136 columns that overwrite sums in flight are an illegal instruction on an H100.
    Mutation("keep the last block of K alone", "b16_mainloop.cuh", "issue(sum, 1);", "issue(sum, opaque_zero);",
             tuple(kernel for kernel in KERNELS if kernel != "transposed")),
    Mutation("leave out the last part of K", "b16_gemm.cuh",
             "sum[slice][i] = __fadd_rn(total[slice][i], sum[slice][i]);", "sum[slice][i] = total[slice][i];",
             ("in turn",)),
    Mutation("multiply the first quarter of a block four times", "warpgroup.cuh", "kStepKMajor = 32 / 16",
             "kStepKMajor = 0", ("late", "split", "swapped", "transposed")),
    Mutation("step past K in MN-major operands", "warpgroup.cuh", "kStepMnMajor = 16 * 128 / 16",
             "kStepMnMajor = 8 * 128 / 16", ("mn major",)),
    Mutation("take every box of columns for the first", "operand.cuh", "kMnMajor ? kBoxBytes : 16", "kMnMajor ? 0 : 16",
             ("mn major",)),
    Mutation("load one box of rows again", "operand.cuh", "row + box * 64, k)", "row, k)", ("mn major",)),
    Mutation("stage rows as they are not swizzled", "part_store.cuh", "swizzled(row, i / 2 + lane / 16) * 16",
             "(i / 2 + lane / 16) * 16", ("late", "mn major", "split")),
    Mutation("stage one of two neighbours twice", "part_store.cuh", "within, words[i], words[i + 1]);",
             "within, words[i], words[i]);", ("float",)),
    Mutation("exchange neighbours", "b16_gemm.cuh", "Out::apply(v[2 * i], v[2 * i + 1])",
             "Out::apply(v[2 * i + 1], v[2 * i])", ("late", "mn major", "split", "transposed")),
    Mutation("add C to one of two neighbours", "b16_gemm.cuh", "      pair[1] += second;\n", "", ("float",)),
    Mutation("store the parts of split K in one place", "b16_gemm.cuh",
             "Layout::kSwapped ? first_row : kernel.rank_k() * kColumns);", "Layout::kSwapped ? first_row : 0);",
             ("split",)),
    Mutation("store the columns of both consumers in one place", "b16_gemm.cuh",
             "Layout::kSwapped ? first_row : kernel.rank_k() * kColumns);",
             "Layout::kSwapped ? 0 : kernel.rank_k() * kColumns);", ("transposed",)),
    Mutation("stage rows of D as they are not swizzled", "part_store.cuh", "row * kRowBytes + (unit ^ row) * 16;",
             "row * kRowBytes + unit * 16;", ("transposed",)),
    Mutation("leave out the rows of a short part", "part_store.cuh", "else if (left > 0)", "else if (left > 2)",
             ("transposed",)),
    Mutation("store one of two neighbours twice", "b16_gemm.cuh", "Out::store(arg.d, at + 1, pair[1]);",
             "Out::store(arg.d, at + 1, pair[0]);", ("direct",)),
    Mutation("store weights of the upper half in the lower", "swapped_output.cuh", "lane / 4 + i / 2 * 8,", "lane / 4,",
             ("swapped split",)),
]
# fmt: on
