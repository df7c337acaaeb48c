"""One call of each kind of kernel of `deep_gemm.fused` with given device code, whose result is checked."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rows_cases import CASES, assert_right, same

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.row_kernels import FUNCTIONS, ROWS
from deep_gemm.ops.cast_reference import AMAX_MIN
from deep_gemm.ops.table import TORCH
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import Dtype, RowsSpec, ceil_div

DEVICE = "cuda"


@dataclass(frozen=True)
class RowsRun:
    """A case of `rows_cases` of some size."""

    case: str
    rows: int
    columns: int
    output: Dtype = "bf16"
    aligned: bool = True
    dtype: Dtype = "bf16"

    @property
    def spec(self) -> RowsSpec:
        case = CASES[self.case]
        function = FUNCTIONS[case.function]
        is_second = case.options.get("approximate") == "tanh" or case.options.get("interleaved", False)
        limit = {"silu_and_mul": float("inf"), "swigluoai_and_mul": 7.0}.get(case.function, 0.0)
        return RowsSpec(
            case.function,
            self.rows,
            self.columns,
            self.dtype,
            self.output,
            function.forms[int(is_second)],
            tuple(name for name in function.optional if name in case.inputs),
            self.aligned,
            case.options.get("limit", case.options.get("eps", limit)),
            AMAX_MIN,
        )

    @property
    def params(self) -> KernelParams:
        return ROWS.params(self.spec, ROWS.config_of(self.spec, SM90), SM90)

    def is_right(self, function: Function, launches: int = 1) -> bool:
        """Whether the result is right, and that of each launch the same. Later ones are dependent launches."""
        case, found = CASES[self.case], []
        given = case.make(self.rows, self.columns, TORCH[self.dtype], DEVICE)
        for early in (False, True)[:launches]:
            inputs = {name: tensor.clone() for name, tensor in given.items()}
            shape = self.rows, self.columns
            out = {"out": torch.full(shape, torch.nan, device=DEVICE).to(TORCH[self.output])}
            if self.output == "e4m3":
                scales = torch.full((ceil_div(self.columns, 128), self.rows), torch.nan, device=DEVICE).t()
                out = {"values": out["out"], "scales": scales}
            self.launch(function, inputs | out, early)
            found.append(tuple(out.values()) if self.output == "e4m3" else out["out"])
        try:
            assert_right(case, found[0], given)
        except AssertionError:
            return False
        return all(same(found[0], each) for each in found)

    def launch(self, function: Function, tensors: Mapping[str, torch.Tensor], early: bool) -> None:
        stream, kernel = engine.raw_stream(torch.cuda.current_device()), kernels.get("rows")
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        made = kernel.launch_plan(self.params, self.spec, strides, early)
        Launch(function, made.shape, stream, made.parameters, addresses)()
        torch.cuda.synchronize()


_RUNS = (
    RowsRun("add and gelu", 37, 3000), RowsRun("bias and gelu by tanh", 37, 101, "bf16", False),
    RowsRun("mul and add", 37, 400, "f32"), RowsRun("mul and add of vectors", 300, 7168, "e4m3"),
    RowsRun("silu and mul", 37, 200, "e4m3"), RowsRun("silu and mul, all options", 37, 1000, "e4m3"),
    RowsRun("rms norm", 37, 104), RowsRun("rms norm", 37, 1000, "e4m3"), RowsRun("rms norm of a sum", 37, 2000, "e4m3"),
    RowsRun("rms norm of a sum", 37, 7160), RowsRun("rms norm", 5, 40000), RowsRun("layer norm", 37, 3000, "e4m3"),
    RowsRun("layer norm of a sum", 37, 6999, "e4m3", False), RowsRun("layer norm of a sum", 5, 40000),
    RowsRun("swigluoai and mul", 37, 200), RowsRun("swigluoai and mul, all options", 37, 2880, "e4m3"),
    RowsRun("silu and mul with biases of groups", 37, 200, "e4m3"),
    RowsRun("swigluoai and mul with biases of groups", 300, 2880),
)  # fmt: skip
RUNS: dict[KernelParams, RowsRun] = {run.params: run for run in _RUNS}
"""Each function; each tile of norms; rows that are read once and again; each way to write."""
