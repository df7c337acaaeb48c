"""What GEMM kernels do with final sums before they are rounded: see ``templates/include/finish.cuh``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..parts import PARTS, Parts
from ..spec import AMAX_MIN, GemmSpec, Operand, QuantizeSpec, float_bits
from .base import Argument, Numbers, Strides, Value, parse_arguments

_FLAGS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32", "": "kNoBias", False: "false", True: "true"}
_DECLARED = {
    "m": "const float* {0}, i64 {0}_stride",
    "n": "const u8* {0}, i64 {0}_stride_g",
    "mn": "const u8* {0}, i64 {0}_stride",
}


def device_name(parts: Parts) -> str:
    """The template arguments of ``EpilogueOf`` after D's elements; "" without an epilogue."""
    if not parts:
        return ""
    activation = parts.activation.title().replace("_", "") or ("Custom" if parts.expression else "Identity")
    if parts.is_gated:
        limit = float("inf") if parts.clamp is None else parts.clamp
        turns = f", {parts.interleaved:d}" if parts.interleaved else ""
        activation += f"<0x{float_bits(limit):08x}{turns}>"
    given = [getattr(parts, part.name) for part in PARTS]
    flags = [_FLAGS[flag] for flag in (parts.alpha, *given[:3], parts.cast == "ue8m0", *given[3:])]
    while len(flags) > 4 and flags[-1] == "false":  # the defaults of those behind the first three parts
        flags.pop()
    return ", ".join((activation, *flags))


def device_code(parts: Parts) -> str:
    """The device code of an expression; "" without one."""
    return "" if parts.expression is None else parts.expression.device_code


def arguments(parts: Parts) -> tuple[Argument, ...]:
    """The kernel's parameters."""
    found = ["f32 alpha"] * parts.alpha
    found += [_DECLARED[part.axes].format(part.name) for part in PARTS if getattr(parts, part.name)]
    found += ["float* sfd, i64 sfd_stride_m, i64 sfd_stride_n, i64 sfd_stride_g"] * bool(parts.cast)
    labels = () if parts.expression is None else parts.expression.labels
    vectors = tuple(Argument(name, "const float*", field=f"vectors[{index}]") for index, name in enumerate(labels))
    return (parse_arguments(", ".join(found)) if found else ()) + vectors


def values(parts: Parts, strides: Strides, numbers: Numbers) -> Mapping[str, Value]:
    """The parameters' values, without pointers. A group's FP8 scales begin ``sfd_stride_g`` after where its rows alone
    would put them."""
    found: dict[str, Value] = {"alpha": numbers["alpha"]} if parts.alpha else {}
    for part in PARTS:
        if getattr(parts, part.name):
            own = strides[part.name]
            of_columns = {f"{part.name}_stride_g": own[0] if len(own) > 1 else 0}
            found |= of_columns if part.axes == "n" else {f"{part.name}_stride": own[-len(part.axes)]}
    if parts.cast:
        *group, row, block = strides["sfd"]
        found |= {"sfd_stride_g": group[0] if group else 0, "sfd_stride_m": row, "sfd_stride_n": block}
    return found


def every(has_matrices: bool) -> Parts:
    """An epilogue with all parts, for tests; without those of elements of D if a family has none."""
    given: dict[str, Any] = {part.name: part.given("bf16") for part in PARTS if has_matrices or part.axes != "mn"}
    return Parts(True, activation="silu", **given)


def apart(spec: GemmSpec) -> tuple[GemmSpec, QuantizeSpec] | None:
    """Two launches that compute what ``spec`` does in one, if D is FP8 and there are no groups: the product with a
    contiguous float32 D, and the cast of it, that of `deep_gemm.quantize.rows`. None for others."""
    if spec.d.dtype != "e4m3" or spec.grouping != "none":
        return None
    parts, epsilon = spec.epilogue, float_bits(AMAX_MIN)
    columns, powers = spec.n // 2 if parts.is_gated else spec.n, parts.cast == "ue8m0"
    product = replace(spec, d=Operand("f32", "mn"), epilogue=replace(parts, cast=""))
    return product, QuantizeSpec(spec.m, columns, "f32", "row", "none", epsilon=epsilon, power_of_two=powers)
