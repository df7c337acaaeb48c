"""Device code of functions of rows broken on purpose, as in `mutations.py`."""

from mutation import Mutation
from rows_runs import RowsRun

RUNS: dict[str, RowsRun] = {
    "gelu": RowsRun("add and gelu", 37, 3000), "odd": RowsRun("bias and gelu by tanh", 37, 101, "bf16", False),
    "cast": RowsRun("mul and add of vectors", 300, 7168, "e4m3"),
    "silu": RowsRun("silu and mul, all options", 37, 1000, "e4m3"),
    "bias": RowsRun("swigluoai and mul with biases of groups", 37, 1000, "e4m3"),
    "norm": RowsRun("rms norm of a sum", 37, 2000), "narrow": RowsRun("rms norm", 37, 104),
    "wide": RowsRun("rms norm", 5, 40000), "centred": RowsRun("layer norm of a sum", 37, 7000, "e4m3"),
    "wide and centred": RowsRun("layer norm of a sum", 5, 40000),
}  # fmt: skip
KERNELS = {name: run.params for name, run in RUNS.items()}

_SILU = ("silu",)
_NORMS = ("norm", "wide", "centred", "wide and centred")

# fmt: off
MUTATIONS = [
    Mutation("take the other half of gelu", "activation.cuh", "x < 0.0f ? half", "x < 0.5f ? half", ("gelu",)),
    Mutation("leave the cube out of gelu", "activation.cuh", "kLinear * 0.044715f, kLinear", "0.0f, kLinear", ("odd",)),
    Mutation("put odd elements on even ones", "rows.cuh", "const u16*>(at)[i]) << i % 2", "const u16*>(at)[i]) << 0",
             ("odd",)),
    Mutation("write one scale for all chunks", "rows.cuh", "own = column(part / Scales::kSame) / 128",
             "own = column(0) / 128", ("cast", "centred")),
    Mutation("give all chunks the first one's scale", "rows.cuh", "scales.inverse_of(c)", "scales.inverse_of(0)",
             ("cast", "centred")),
    Mutation("go through tiles of one row only", "rows.cuh", "tile.begin(blockIdx.x / across);", "tile.begin(0);",
             ("gelu", "odd", "cast", "silu")),
    Mutation("take up for gate", "rows.cuh", "in[i / 4].get(2 * i % 8) :", "in[i / 4].get(2 * i % 8 + 1) :", _SILU),
    Mutation("cap up from above only", "activation.cuh", "-smaller(-smaller(up, limit), limit)", "smaller(up, limit)",
             _SILU),
    Mutation("cap gate from below", "activation.cuh", "smaller(gate, limit)", "-smaller(-gate, limit)", _SILU),
    Mutation("forget the factor", "rows.cuh", "kFactored ? __fmul_rn(product, factor)", "kFactored ? product", _SILU),
    Mutation("add the bias of group 0 to all rows", "rows.cuh", "group = groups[row];", "group = 0;", ("bias",)),
    Mutation("add gate's bias to up", "rows.cuh", "in[2 + i / 4].get(2 * i % 8 + 1) :",
             "in[2 + i / 4].get(2 * i % 8) :", ("bias",)),
    Mutation("leave the last warp out", "rows.cuh", "i < Tile::kWarps; ++i", "i + 1 < Tile::kWarps; ++i", _NORMS),
    Mutation("leave neighbours out", "rows.cuh", "distance > 0; distance /= 2", "distance > 1; distance /= 2",
             (*_NORMS, "narrow")),
    Mutation("leave the residual out of odd elements", "rows.cuh", "residual[c].get(2 * i + 1)", "0.0f",
             ("norm", "centred", "wide and centred")),
    Mutation("take columns that do not exist for deviations", "rows.cuh", "if (j < tile.exist(tile.column(c))) squares",
             "squares", ("centred",)),  # the mean of a wide row is so near 0 that it hides them
    Mutation("write the last tile's values for all", "rows.cuh", "if (i > 0) load(tile, from[kResidual], x);", "",
             ("wide", "wide and centred")),
    Mutation("sum up the deviations of one tile", "rows.cuh", "if (i + 1 < tiles) load(tile, from[kResidual], x);", "",
             ("wide and centred",)),
    Mutation("leave eps out", "rows.cuh", "__fadd_rn(__fdiv_rn(total, columns), eps)", "__fdiv_rn(total, columns)",
             (*_NORMS, "narrow")),
]
# fmt: on
