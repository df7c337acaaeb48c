"""Casts to FP8: values and scales of a matrix, of its transpose, or of both in one pass."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import cast_blocks
from deep_gemm.ops.reference import silu, silu_gradient
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from ..errors import InvalidInputError
from ..records import record
from ..spec import AMAX_MIN, SCALE_BLOCK, Blocks, QuantizeSpec, float_bits
from . import checks
from .checks import shape_of
from .layouts import TMA_BYTES
from .table import DTYPES

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of x."""

_PREFIX = {"plain": "", "transposed": "t_"}
"""What names of an output's values and scales begin with."""

MAX_EPSILON = torch.finfo(torch.float32).max

_BLOCK: dict[Blocks, tuple[int, int]] = {
    "row": (1, SCALE_BLOCK),
    "column": (SCALE_BLOCK, 1),
    "tile": (SCALE_BLOCK, SCALE_BLOCK),
}
"""Rows and columns of the matrix that share a scale."""


_CHOICES: dict[str, tuple[Blocks, ...]] = {"plain": ("row", "column", "tile"), "transposed": ("column", "tile")}
"""The blocks that kernels have for each output."""


_CHOSEN: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("plain",): ((), ("rows",), ("factors",), ("rows", "factors")),
    ("transposed",): ((),),
    ("plain", "transposed"): ((), ("rows",), ("rows", "factors"), ("gradient",)),
}
"""The optional operands that calls may have, by what is written. The last ones get the calls that no other takes."""


@record(frozen=True, eq=False)
class QuantizeOperands:
    """Checked operands: x (rows, columns), or (rows, 2 * columns) if ``gated`` without a gradient; and E4M3 values and
    float32 scales for each output. Of several matrices each has one dimension more, in front."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: QuantizeSpec


class Quantize(KernelOperation):
    """See ``deep_gemm.quantize``. ``written``: "plain", "transposed" or both. ``chosen``: "rows", an index of the rows
    of x that are cast, and "factors" of the scales of each row, or none of them. Where both outputs are written,
    factors multiply rows, which are rounded to x's dtype and then cast; and "gradient" (rows, columns / 2), with
    ``gated``, is that of silu(left half) * right half: the gradient of x is cast."""

    def __init__(self, written: Sequence[str], chosen: Sequence[str] = ()) -> None:
        self.written, self.read = tuple(written), ("x", *chosen)
        optional = tuple(dict.fromkeys(name for each in _CHOSEN[self.written] for name in each))
        is_last = tuple(chosen) == _CHOSEN[self.written][-1]
        self.absent = () if is_last else tuple(name for name in optional if name not in chosen)
        kinds = {"rows": "gathered", "factors": "factored", "gradient": "gradient"}
        self.name = " ".join(["quantize", *(kinds[name] for name in chosen), " and ".join(written)])
        self.parameters = (
            Parameter("x", "Tensor"),
            *(Parameter(name, "Tensor | None", None) for name in optional),
            *(Parameter(name, "tuple[Tensor, Tensor]") for name in written),
            *(Parameter(f"{name}_blocks", "Blocks", choices=_CHOICES[name]) for name in written),
            Parameter("use_ue8m0", "bool", False),
            Parameter("epsilon", "float", AMAX_MIN),
            Parameter("gated", "bool", False),
        )
        places = ("out",) if len(self.written) == 1 else ("out[0]", "out[1]")
        self.titles = dict(zip(self.written, places, strict=True))
        self.operands = {name: name for name in self.read}
        for output in self.written:
            self.operands |= {f"{_PREFIX[output]}values": f"{output}[0]", f"{_PREFIX[output]}scales": f"{output}[1]"}
        self.outputs = tuple(name for name in self.operands if name not in self.read)
        self.output = self.outputs[0]
        self.unsigned = ("rows", *(name for name in self.outputs if name.endswith("values")))

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`. An index of rows counts those of the whole x, so that there is no rule for it."""
        return {"x": "mk", "factors": "m", "plain": "mk", "transposed": "km"}

    def check(self, *arguments: Any, **named_arguments: Any) -> QuantizeOperands | None:
        """None for fake tensors and where there is nothing to cast."""
        given = self.given(arguments, named_arguments)
        use_ue8m0, epsilon, gated = given["use_ue8m0"], given["epsilon"], given["gated"]
        checks.check_bool("use_ue8m0", use_ue8m0)
        checks.check_bool("gated", gated)
        if not isinstance(epsilon, (int, float)) or isinstance(epsilon, bool) or not 0 <= epsilon <= MAX_EPSILON:
            raise InvalidInputError(
                f"epsilon must be a number from 0 that float32 can hold, an int or a float, but it is "
                f"{checks.shown(epsilon)}."
            )
        named: dict[str, Any] = {name: given[name] for name in self.read}
        for output in self.written:
            title = self.titles[output]
            values, scales = checks.pair(title, given[output], "Pass values and scales to write, or leave out out.")
            named |= {f"the values of {title}": values, f"the scales of {title}": scales}
        blocks = {output: given[f"{output}_blocks"] for output in self.written}
        of_weights = set(blocks.values()) == {"tile"} and not gated
        dims = {"rows": (1,), "factors": (1,), "gradient": (2,)}
        device = checks.check_tensors(self.name, named, dims, (2, 3) if of_weights else (2,), ())
        x = named["x"]
        if x.dtype not in INPUTS:
            known = ", ".join(map(str, INPUTS))
            raise InvalidInputError(f"x must be one of {known}, but it is {x.dtype}. Pass x.float().")
        *groups, source_rows, columns = x.shape
        index = named.get("rows")
        if index is not None:
            check_index(index)
        rows = source_rows if index is None else index.shape[0]
        factors = named.get("factors")
        if factors is not None:
            check_factors(factors, rows, use_ue8m0 and self.written == ("plain",))
        if gated and columns % 2:
            raise InvalidInputError(
                f"x must have an even number of columns if gated: two halves, but it is {shape_of(x)}."
            )
        gradient = named.get("gradient")
        if gradient is not None:
            if given["rows"] is not None or given["factors"] is not None:
                raise InvalidInputError("rows and factors must be None with a gradient.")
            _check_gradient(gradient, x, gated)
        columns = columns // 2 if gated and gradient is None else columns
        for output in self.written:
            _check_output(self.titles[output], output == "transposed", named, groups, rows, columns, blocks[output])
        if checks.is_fake(named.values()):
            return None
        for name in self.read:
            checks.check_sizes(name, named[name])
        if x.numel():
            named["x"] = rows_in_memory(x)
            named |= {"gradient": rows_in_memory(gradient, "gradient")} if gradient is not None else {}
        self._check_places(named)
        if 0 in (*groups, rows, columns):
            return None
        spec = QuantizeSpec(
            rows=rows,
            columns=columns,
            dtype=DTYPES[x.dtype],
            plain=blocks.get("plain", "none"),
            transposed=blocks.get("transposed", "none"),
            gated=gated,
            epsilon=float_bits(abs(epsilon)),  # -0.0 has a sign
            power_of_two=use_ue8m0,
            source_rows=None if index is None else source_rows,
            factors=factors is not None,
            groups=math.prod(groups),
            gradient=gradient is not None,
        )
        return QuantizeOperands(dict(zip(self.operands, named.values(), strict=True)), device, spec)

    def _check_places(self, named: Mapping[str, Tensor]) -> None:
        """Check that the rows of outputs do not overlap, and that outputs share no memory with other operands."""
        for name, tensor in named.items():
            if name not in self.read and tensor.numel():
                others = {other: x for other, x in named.items() if other != name}
                if tensor.dim() > 2 and not tensor.is_contiguous():
                    raise InvalidInputError(
                        f"{name} must be contiguous for several matrices, but they have the strides {tensor.stride()}."
                    )
                rows = tensor.flatten(0, -2)
                checks.check_written(name, rows, others, has_columns=name.startswith("the scales"))

    def launches(self, x: QuantizeOperands, device: int) -> LaunchSequence:
        """One launch."""
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence((Step(x.spec, strides, {name: name for name in x.tensors}),))

    def reference(self, x: QuantizeOperands) -> None:
        """See `cast_blocks`."""
        source = x.tensors["x"].detach()
        if "rows" in x.tensors:
            source = gathered_rows(source, x.tensors["rows"])
        if x.spec.gradient:
            source = silu_gradient(source, x.tensors["gradient"].detach())
        elif x.spec.gated:
            left, right = source.float().chunk(2, dim=1)
            source = silu(left) * right
        multiplies_rows = "factors" in x.tensors and len(self.written) == 2
        if multiplies_rows:
            source = (source.float() * x.tensors["factors"][:, None]).to(source.dtype)
        epsilon = struct.unpack("<f", struct.pack("<I", x.spec.epsilon))[0]
        with torch.inference_mode():
            for prefix, blocks in (("", x.spec.plain), ("t_", x.spec.transposed)):
                if blocks == "none":
                    continue
                out = x.tensors[f"{prefix}values"].view(torch.uint8), x.tensors[f"{prefix}scales"]
                matrices = (each if each.dim() > 2 else each[None] for each in (source, *out))
                for matrix, out_values, out_scales in zip(*matrices, strict=True):
                    values, scales = cast_blocks(matrix, *_BLOCK[blocks], x.spec.power_of_two, epsilon)
                    if "factors" in x.tensors and not multiplies_rows:
                        scales = scales * x.tensors["factors"][:, None]
                    found = (values.t(), scales.t()) if prefix else (values, scales)
                    out_values.copy_(found[0].view(torch.uint8))
                    out_scales.copy_(found[1])


def rows_in_memory(x: Tensor, name: str = "x") -> Tensor:
    """x, or a copy if its rows repeat one element, as those of an expanded gradient do. Refuses other strides."""
    if x.shape[-1] == 1 or x.stride(-1) == 1:
        return x
    if x.stride(-1) == 0:
        return x.detach().contiguous()
    raise InvalidInputError(
        f"{name} must be row-major (stride 1 along its last dimension), but it is {shape_of(x)} with strides "
        f"{x.stride()}. Pass {name}.contiguous(), or to cast a transpose without a copy, pass {name}.t() to columns or "
        "blocks_transposed."
    )


def check_index(rows: Tensor) -> None:
    """Refuse an index of rows that is not int32 or not contiguous."""
    if rows.dtype != torch.int32:
        raise InvalidInputError(
            f"rows must be torch.int32: the row of x for each row of the result, but it is {rows.dtype}."
        )
    if rows.numel() > 1 and rows.stride(0) != 1:
        raise InvalidInputError(
            f"rows must be contiguous, but it has the stride {rows.stride(0)}. Pass rows.contiguous()."
        )


def check_factors(factors: Tensor, rows: int, use_ue8m0: bool) -> None:
    """Refuse factors that are not float32, not contiguous, or not one for each row of the result, and factors of
    scales that must be powers of two."""
    if factors.dtype != torch.float32:
        raise InvalidInputError(
            f"factors must be torch.float32, as the scales that they multiply, but it is {factors.dtype}. Pass "
            "factors.float()."
        )
    if factors.shape[0] != rows:
        raise InvalidInputError(
            f"factors must have one for each of the {rows} rows of the result, but it has {factors.shape[0]}."
        )
    if rows > 1 and factors.stride(0) != 1:
        raise InvalidInputError(
            f"factors must be contiguous, but it has the stride {factors.stride(0)}. Pass factors.contiguous()."
        )
    if use_ue8m0:
        raise InvalidInputError(
            "factors must be None if use_ue8m0 is True: scales times factors are no powers of two. Leave use_ue8m0 "
            "False, or multiply the result of the GEMM."
        )


def _check_gradient(gradient: Tensor, x: Tensor, gated: bool) -> None:
    if not gated:
        raise InvalidInputError("gated must be True with a gradient, which is that of silu(left half) * right half.")
    wanted = x.shape[0], x.shape[1] // 2
    if gradient.dtype != x.dtype or tuple(gradient.shape) != wanted:
        raise InvalidInputError(
            f"gradient must be {x.dtype} {wanted} for x {shape_of(x)}, but it is {gradient.dtype} {shape_of(gradient)}."
        )


def gathered_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows ``rows`` of x; zeros for a number that is no row of x."""
    if not x.shape[0]:
        return x.new_zeros((rows.shape[0], x.shape[1]))
    known = (rows >= 0) & (rows < x.shape[0])
    return x[rows.clamp(0, x.shape[0] - 1).long()].masked_fill(~known[:, None], 0)


def scales_shape(rows: int, columns: int, blocks: Blocks, transposed: bool = False) -> tuple[int, int]:
    """The shape of the scales of a matrix of these sizes, or of its transpose."""
    of_rows, of_columns = _BLOCK[blocks]
    shape = -(-rows // of_rows), -(-columns // of_columns)  # each layer's pass comes here: no functions
    return shape[::-1] if transposed else shape


def _check_output(
    title: str, flip: bool, named: Mapping[str, Any], groups: list[int], rows: int, columns: int, blocks: Blocks
) -> None:
    values, scales = named[f"the values of {title}"], named[f"the scales of {title}"]
    height, width = (columns, rows) if flip else (rows, columns)
    wanted = (
        (f"the values of {title}", values, torch.float8_e4m3fn, (*groups, height, width)),
        (f"the scales of {title}", scales, torch.float32, (*groups, *scales_shape(rows, columns, blocks, flip))),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InvalidInputError(
                f"{name} must be {dtype} {shape} for such an x, but they are {tensor.dtype} {shape_of(tensor)}. Leave "
                "out out to get fresh ones."
            )


def empty_output(
    rows: int, columns: int, blocks: Blocks, device: torch.device, transposed: bool = False, row_major: bool = False
) -> tuple[Tensor, Tensor]:
    """Fresh values, whose rows begin at multiples of 16 bytes, and fresh scales. Scales of 1 x 128 have the layout that
    TMA reads, unless ``row_major``."""
    height, width = (columns, rows) if transposed else (rows, columns)
    stride = -(-width // TMA_BYTES) * TMA_BYTES
    values = torch.empty_strided((height, width), (stride, 1), dtype=torch.float8_e4m3fn, device=device)
    return values, empty_scales(rows, columns, blocks, device, transposed, row_major)


def empty_scales(
    rows: int, columns: int, blocks: Blocks, device: torch.device, transposed: bool = False, row_major: bool = False
) -> Tensor:
    """The scales of `empty_output`."""
    lines, steps = scales_shape(rows, columns, blocks, transposed)
    if row_major or blocks == "tile":
        return torch.empty((lines, steps), dtype=torch.float32, device=device)
    # One call of torch: a view costs the host as much as a launch.
    return torch.empty_strided((lines, steps), (1, max(1, lines + -lines % 4)), dtype=torch.float32, device=device)


plain, transposed, both = (
    make_entry(*(Quantize(written, chosen) for chosen in choices)) for written, choices in _CHOSEN.items()
)
"""Arguments: x; the index of rows and the factors, or None (not of transposed); the gradient of gate and up or None (of
both); one or two outputs, the blocks of each, use_ue8m0, epsilon, gated."""
