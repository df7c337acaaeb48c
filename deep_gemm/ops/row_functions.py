"""Functions of the rows of matrices, beside GEMMs: checks, launch and reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.kernels.row_kernels import FUNCTIONS, GROUPS
from deep_gemm.ops.cast_reference import cast_blocks
from deep_gemm.ops.quantize import scales_shape
from deep_gemm.ops.reference import gelu, gelu_erf, silu
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry
from deep_gemm.runtime.operation import Fault

from ..errors import InvalidInputError
from ..records import record
from ..spec import AMAX_MIN, RowsSpec
from . import checks
from .checks import shape_of
from .table import DTYPES

INPUTS = (torch.bfloat16, torch.float16)
"""The dtypes of x."""

_GATED = ("silu_and_mul", "swigluoai_and_mul")
"""Functions of gate and up, the two halves of x."""

_IN_PLACE = {"add_gelu": "x", "mul_add": "z", "rms_norm": "x", "layer_norm": "x"}
"""The input that a 16-bit result may overwrite."""

_OPTIONS = {
    "add_gelu": (Parameter("approximate", "str", choices=("none", "tanh")),),
    "mul_add": (),
    "silu_and_mul": (Parameter("interleaved", "bool"), Parameter("limit", "float")),
    "swigluoai_and_mul": (Parameter("limit", "float"),),
    "rms_norm": (Parameter("eps", "float"),),
    "layer_norm": (Parameter("eps", "float"),),
}

_VECTORS = {"y": (1, 2), "z": (1, 2), "weight": (1,), "bias": (1,), "factors": (1,), GROUPS: (1,)}
"""How many dimensions inputs may have that are not (M, N). A bias of groups has two."""

_VALUES, _SCALES = "the values of out", "the scales of out"
_SINGLE = ("factors", GROUPS, _SCALES)
"""Operands that are read and written element by element."""

_ALIGNED = 16
"""Bytes at whose multiples rows begin that kernels read by 16 bytes."""


@record(frozen=True, eq=False)
class RowsOperands:
    """Checked operands: inputs, and "out", or "values" and "scales"."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: RowsSpec


class RowFunction(KernelOperation):
    """See `deep_gemm.fused`. ``given``: which optional operands there are. ``fp8``: the result is FP8 with scales."""

    floats = ("eps", "limit")
    kept = ("residual",)

    def __init__(self, function: str, fp8: bool, given: tuple[str, ...]) -> None:
        self.function, self.fp8, self.given_operands, self.has_groups = function, fp8, given, GROUPS in given
        optional = FUNCTIONS[function].optional
        required = [name for name in FUNCTIONS[function].inputs if name not in optional]
        self.absent = tuple(name for name in optional if name not in given)
        self.read = (*required, *given)
        self.name = " ".join([function, *given, *(["fp8"] if fp8 else [])])
        self.parameters = (
            *(Parameter(name, "Tensor") for name in required),
            *(Parameter(name, "Tensor | None", None) for name in optional),
            Parameter("out", "tuple[Tensor, Tensor]" if fp8 else "Tensor"),
            *_OPTIONS[function],
            Parameter("use_ue8m0", "bool"),
        )
        written = {"values": "out[0]", "scales": "out[1]"} if fp8 else {"out": "out"}
        self.operands = {name: name for name in self.read} | written
        self.output = next(iter(written))
        self.outputs = (*written, *(name for name in given if name == "residual"))
        self.in_place = "" if fp8 else _IN_PLACE.get(function, "")
        self.unsigned = (*(["values"] if fp8 else []), *([GROUPS] if self.has_groups else []))
        self.settings = ("check",) if self.has_groups else ()

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`. Rows are whole."""
        rows = dict.fromkeys(("x", "y", "z", "residual", "out"), "mN")
        bias = "GN" if self.function in _GATED else "N"  # of one group each
        return {"factors": "m", GROUPS: "m", "weight": "N", "bias": bias, **rows}

    def check(self, *arguments: Any, **named_arguments: Any) -> RowsOperands | None:
        """None for fake tensors and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        named: dict[str, Any] = {name: given[name] for name in self.read}
        if self.fp8:
            pair = checks.pair("out", given["out"], "Pass values and scales to write, or leave out out.")
            named[_VALUES], named[_SCALES] = pair
        else:
            named["out"] = given["out"]
        form, number = self._options(given)
        written = [name for name in named if name not in self.read or name == "residual"]
        dims = _VECTORS | ({"bias": (2,)} if self.has_groups else {})
        device = checks.check_tensors(self.function, named, dims, (2,), written)
        rows, columns = self._check_shapes(named)
        if checks.is_fake(named.values()):
            return None
        for name, tensor in named.items():
            checks.check_sizes(name, tensor)
            if name in written and tensor.numel():
                self._check_output(name, named)
            elif tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise InvalidInputError(
                    f"{name} must be contiguous along its last dimension, but it is {shape_of(tensor)} with strides "
                    f"{tensor.stride()}. Pass {name}.contiguous()."
                )
        if rows == 0 or columns == 0:
            return None
        spec = RowsSpec(
            function=self.function,
            rows=rows,
            columns=columns,
            dtype=DTYPES[named["x"].dtype],
            output=DTYPES[named[_VALUES if self.fp8 else "out"].dtype],
            form=form,
            given=self.given_operands,
            aligned=columns % 8 == 0 and all(_is_aligned(x) for name, x in named.items() if name not in _SINGLE),
            number=number,
            amax_min=AMAX_MIN if self.fp8 else 0.0,
            power_of_two=given["use_ue8m0"],
        )
        return RowsOperands(dict(zip(self.operands, named.values(), strict=True)), device, spec)

    def _options(self, given: Mapping[str, Any]) -> tuple[str, float]:
        """The form of the function and its number, from checked options."""
        checks.check_bool("use_ue8m0", given["use_ue8m0"])
        if given["use_ue8m0"] and not self.fp8:
            raise InvalidInputError(
                "use_ue8m0 must be False, since only FP8 has scales. Pass a pair (values, scales) or "
                "torch.float8_e4m3fn as out, or leave it out."
            )
        form = FUNCTIONS[self.function].forms[0]
        if "approximate" in given:
            form = "tanh" if given["approximate"] == "tanh" else form
        if "interleaved" in given:
            checks.check_bool("interleaved", given["interleaved"])
            form = "interleaved" if given["interleaved"] else form
        for name, most, known in (
            ("eps", torch.finfo(torch.float32).max, "a finite number from 0 on"),
            ("limit", math.inf, "None or a number from 0 on"),
        ):
            number = given.get(name, 0.0)
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number <= most:
                raise InvalidInputError(f"{name} must be {known}, but it is {checks.shown(number)}.")
        number = given.get("eps", given.get("limit", 0.0))
        return form, math.inf if number > torch.finfo(torch.float64).max else float(number)

    def _check_shapes(self, named: Mapping[str, Tensor]) -> tuple[int, int]:
        """Check dtypes and shapes. Returns those of the result."""
        x = named["x"]
        if x.dtype not in INPUTS:
            raise InvalidInputError(
                f"x must be torch.bfloat16 or torch.float16, but it is {x.dtype}. Pass x.bfloat16()."
            )
        rows, columns = x.shape
        if self.function in _GATED:
            if columns % 2:
                raise InvalidInputError(f"x must have an even number of columns, gate and up, but it is {shape_of(x)}.")
            columns //= 2
        whole, vector = (rows, columns), (columns,)
        wanted: dict[str, tuple[tuple[torch.dtype, ...], tuple[tuple[int, ...], ...]]]
        wanted = dict.fromkeys(("y", "z"), ((x.dtype,), (whole, vector)))
        wanted |= dict.fromkeys(("weight", "bias"), ((x.dtype,), (vector,)))
        if self.has_groups:
            wanted |= {"bias": ((x.dtype,), ((max(1, named["bias"].shape[0]), x.shape[1]),))}
            wanted |= {GROUPS: ((torch.int32,), ((rows,),))}
        wanted |= {"residual": ((x.dtype,), (whole,)), "factors": ((torch.float32,), ((rows,),))}
        wanted |= {"out": ((x.dtype, torch.float32), (whole,)), _VALUES: ((torch.float8_e4m3fn,), (whole,))}
        wanted[_SCALES] = (torch.float32,), (scales_shape(rows, columns, "row"),)
        for name, tensor in named.items():
            dtypes, shapes = wanted.get(name, ((x.dtype,), (tuple(x.shape),)))
            if tensor.dtype in dtypes and tuple(tensor.shape) in shapes:
                continue
            known = [" or ".join(map(str, each)) for each in (dtypes, shapes)]
            instead = ""
            if name not in self.read:
                instead = " Leave out out for a fresh one, or pass its dtype."
            elif tuple(tensor.shape) in shapes:
                instead = f" Pass {name}.to({dtypes[0]})."
            raise InvalidInputError(
                f"{name} must be {known[0]} {known[1]} for x {shape_of(x)}, but it is {tensor.dtype} "
                f"{shape_of(tensor)}.{instead}"
            )
        return rows, columns

    def _check_output(self, name: str, named: Mapping[str, Tensor]) -> None:
        tensor = named[name]
        others = {other: x for other, x in named.items() if other != name}
        if name == "out" and self.in_place and _is_same(tensor, named[self.in_place]):
            del others[self.in_place]
        checks.check_written(name, tensor, others, has_columns=name == _SCALES)

    def launches(self, x: RowsOperands, device: int) -> LaunchSequence:
        """One launch."""
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence((Step(x.spec, strides, {name: name for name in x.tensors}),))

    def faults(self, x: RowsOperands) -> list[Fault]:
        """Groups that have no bias."""
        groups, count = x.tensors[GROUPS], x.tensors["bias"].shape[0]

        def say(row: int) -> str:
            return (
                f"groups[{row}] is {int(groups[row])}, but bias has {count} rows: groups are from 0 to {count - 1}, "
                "and -1 is none."
            )

        return [Fault((groups < -1) | (groups >= count), say)]

    def reference(self, x: RowsOperands) -> None:
        """In float64, rounded to float32 first."""
        with torch.inference_mode():
            given = dict(x.tensors)
            if "residual" in given:
                given["residual"].copy_(given["x"].float() + given["residual"].float())
                given["x"] = given["residual"]
            wide = {name: given[name].detach().double() for name in self.read if name != GROUPS}
            if self.has_groups:
                groups = given[GROUPS].long()
                wide["x"] = wide["x"] + wide["bias"][groups.clamp(min=0)].masked_fill(groups[:, None] < 0, 0)
            found = _REFERENCES[self.function](wide, x.spec).float()
            if self.fp8:
                values, scales = cast_blocks(found, 1, 128, x.spec.power_of_two, x.spec.amax_min)
                given["values"].view(torch.uint8).copy_(values.view(torch.uint8))
                given["scales"].copy_(scales)
            else:
                given["out"].copy_(found)


def _is_aligned(x: Tensor) -> bool:
    rows = x.stride(0) * x.element_size() if x.dim() == 2 and x.shape[0] > 1 else 0
    return (x.data_ptr() | rows) % _ALIGNED == 0


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    same = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.dtype == y.dtype
    return same and (x.shape[0] <= 1 or x.stride(0) == y.stride(0))


def _add_gelu(x: Mapping[str, Tensor], spec: RowsSpec) -> Tensor:
    total = x["x"] + x["y"]
    return gelu(total) if spec.form == "tanh" else gelu_erf(total)


def gated(both: Tensor, is_oai: bool, interleaved: bool, limit: float) -> Tensor:
    """The activation of gate and up (rows, 2 * columns): see `deep_gemm.fused`."""
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1) if is_oai else silu(gate) * up


def _gated(x: Mapping[str, Tensor], spec: RowsSpec) -> Tensor:
    found = gated(x["x"], spec.function == "swigluoai_and_mul", spec.form == "interleaved", spec.number)
    return found * x["factors"][:, None] if "factors" in x else found


def _norm(x: Mapping[str, Tensor], spec: RowsSpec) -> Tensor:
    values = x["x"]
    if spec.function == "layer_norm":
        values = values - values.mean(1, keepdim=True)
    found = values * (values.square().mean(1, keepdim=True) + spec.number).rsqrt() * x["weight"]
    return found + x["bias"] if "bias" in x else found


_REFERENCES: dict[str, Callable[[Mapping[str, Tensor], RowsSpec], Tensor]] = {
    "add_gelu": _add_gelu,
    "mul_add": lambda x, spec: x["x"] * x["y"] + x["z"],
    "silu_and_mul": _gated,
    "swigluoai_and_mul": _gated,
    "rms_norm": _norm,
    "layer_norm": _norm,
}


def _entry(function: str, fp8: bool) -> Callable[..., None]:
    """The function that computes one of `FUNCTIONS`. Arguments: required inputs, optional ones or None, out, options,
    use_ue8m0."""
    variants = FUNCTIONS[function].variants
    return make_entry(*(RowFunction(function, fp8, given) for given in sorted(variants, key=len)))


TENSOR = {function: _entry(function, False) for function in FUNCTIONS}
"""The functions by name, for an out that is a tensor."""

PAIR = {function: _entry(function, True) for function in FUNCTIONS}
"""The functions by name, for an out of FP8 values and scales."""
