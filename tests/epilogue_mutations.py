"""Device code of epilogues broken on purpose, as in `mutations.py`."""

from chosen import case
from epilogue_runs import EXPRESSIONS
from mutation import Mutation

from deep_gemm.kernels.families import (
    B16_GEMM,
    B16_GROUPED,
    B16_SWAPPED,
    FP8_GROUPED,
    FP8_ROWS,
    FP8_SCALED,
    FP8_SWAPPED,
)
from deep_gemm.params import KernelParams

_ALL = "alpha+rows+bias:f32+relu+residual"
_VECTORS, _PLACE = EXPRESSIONS
KERNELS: dict[str, KernelParams] = {
    "rows": case(FP8_ROWS, 128, 192, epilogue=_ALL),
    "scaled": case(FP8_SCALED, 64, 64, scaling="1d2d", store="direct", epilogue=_ALL),
    "half": case(B16_GEMM, 128, 128, epilogue=_ALL), "swapped": case(FP8_SWAPPED, 32, epilogue=_ALL),
    "half swapped": case(B16_SWAPPED, 64, epilogue=_ALL), "vectors": case(B16_GEMM, 128, 128, epilogue=_VECTORS),
    "vectors, FP8": case(FP8_SCALED, 128, 128, epilogue=_VECTORS),
    "vectors, swapped": case(B16_SWAPPED, 64, epilogue=_VECTORS),
    "groups": case(B16_GROUPED, 128, 128, grouping="psum", epilogue="bias:f32"),
    "groups, FP8": case(FP8_GROUPED, 64, 64, grouping="masked", epilogue="bias:f32"),
    "place": case(FP8_ROWS, 128, 192, epilogue=_PLACE), "place, swapped": case(FP8_SWAPPED, 32, epilogue=_PLACE),
}  # fmt: skip

_UPRIGHT, _SWAPPED = ("rows", "scaled", "half"), ("swapped", "half swapped")
_GROUPED = ("groups", "groups, FP8")
_OWN, _OWN_SWAPPED = ("vectors", "vectors, FP8", "place"), ("vectors, swapped", "place, swapped")

# fmt: off
MUTATIONS = [
    Mutation("take the bias of the next column", "finish.cuh", "at(2 * i) + lane % kRun * kApart, group)",
             "at(2 * i) + 1 + lane % kRun, group)", (*_UPRIGHT, *_OWN)),
    Mutation("give two columns one bias", "finish.cuh", "sum[i + 3] = __fadd_rn(sum[i + 3], odd);",
             "sum[i + 3] = __fadd_rn(sum[i + 3], even);", (*_UPRIGHT, *_OWN)),
    Mutation("take the bias of the column eight before", "finish.cuh", "arg.bias, 0, weight + 8, Index<0>());",
             "arg.bias, 0, weight, Index<0>());", (*_SWAPPED, *_OWN_SWAPPED)),
    Mutation("take the bias of the first group", "finish.cuh", "opaque(group) * stride_g", "0 * stride_g", _GROUPED),
    Mutation("leave the activation out", "finish.cuh", "        Activation::apply(sum[i + 2], sum[i + 3]);\n", "",
             _UPRIGHT),
    Mutation("leave the activation out, swapped", "finish.cuh", "          Activation::apply(v[2], v[3]);\n", "",
             _SWAPPED),
    Mutation("leave alpha out", "finish.cuh", "if constexpr (kAlpha) found = __fmul_rn(found, kernel.arg.alpha);", "",
             (*_UPRIGHT, *_SWAPPED)),
    Mutation("add the residual of the row eight below", "finish.cuh", "const u32 y = opaque(row + half * 8);",
             "const u32 y = opaque(row + (1 - half) * 8);", _UPRIGHT),
    Mutation("add the residual of the column eight before", "finish.cuh", "kernel.arg.residual, at + 8)",
             "kernel.arg.residual, at)", _SWAPPED),
    Mutation("take the factor of the row eight above", "finish.cuh", "high = factor(kernel, row + 8, end);",
             "high = factor(kernel, row, end);", _UPRIGHT),
    Mutation("take the factor of the token before", "finish.cuh",
             "__fmul_rn(sum[chunk * 4 + i], i & 1 ? odd : even);", "__fmul_rn(sum[chunk * 4 + i], even);", _SWAPPED),
    Mutation("take the first of the columns' vectors for all", "finish.cuh", "kernel.arg.vectors[first + i] + index",
             "kernel.arg.vectors[first] + index", ("vectors", "vectors, FP8", "vectors, swapped")),
    Mutation("take rows' elements of the row eight above", "finish.cuh", "load_values(kernel, high, row + 8, end);",
             "load_values(kernel, high, row, end);", _OWN),
    Mutation("take columns' elements of the first columns", "finish.cuh", "each.give(2 * i % kRun + lane % 4 * 2,",
             "each.give(lane % 4 * 2,", ("vectors", "vectors, FP8")),
    Mutation("take columns' elements of the column eight before", "finish.cuh",
             "load_values(kernel, high_values, weight + 8, kernel.n(), Own::kRows);",
             "load_values(kernel, high_values, weight, kernel.n(), Own::kRows);", ("vectors, swapped",)),
    Mutation("take tokens' elements of the first tokens", "finish.cuh", "each.give(chunk % 4 * 8 + lane % 4 * 2,",
             "each.give(lane % 4 * 2,", _OWN_SWAPPED),
    Mutation("tell an expression the row eight above", "finish.cuh", "Activation::apply(sum[i + 2], row + 8, column,",
             "Activation::apply(sum[i + 2], row, column,", ("place",)),
    Mutation("tell an expression the column before", "finish.cuh", "Activation::apply(sum[i + 1], row, column + 1,",
             "Activation::apply(sum[i + 1], row, column,", ("place",)),
    Mutation("tell an expression the token before", "finish.cuh", "Activation::apply(v[1], y + 1, weight,",
             "Activation::apply(v[1], y, weight,", ("place, swapped",)),
    Mutation("tell an expression the weight eight before", "finish.cuh", "Activation::apply(v[2], y, weight + 8,",
             "Activation::apply(v[2], y, weight,", ("place, swapped",)),
]
# fmt: on
