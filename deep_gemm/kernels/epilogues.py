"""What GEMM kernels do with final sums before they are rounded: see ``templates/include/finish.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ..records import record
from ..spec import AMAX_MIN, GemmSpec, Operand, QuantizeSpec, float_bits
from .base import Argument, Strides, Value, parameters
from .expressions import MARK, Expression

SWIGLU = "swiglu"
"""The activation of a product whose columns are a gate's and up's."""

_CASTS = {"": "", "1x128": "fp8", "ue8m0": "fp8:ue8m0"}
_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32", "": "kNoBias"}


@record(frozen=True)
class Parts:
    """``D = activation(alpha * row_factor * product (+ C) + bias) + residual``: which of these there are.

    ``bias`` is its dtype. ``clamp`` is SwiGLU's limit, and ``cast`` says whether D is FP8 with "1x128" scales, or with
    such that are powers of two, "ue8m0". In place of an ``activation`` there may be an ``expression``. ``interleaved``:
    rows of B are a gate's and up's in turn. Specs and params hold the text of this, such as "alpha+bias:f32+gelu";
    "none" if there is no epilogue.
    """

    alpha: bool = False
    row_factor: bool = False
    bias: str = ""
    activation: str = ""
    residual: bool = False
    clamp: float | None = None
    cast: str = ""
    expression: Expression | None = None
    interleaved: bool = False

    def __str__(self) -> str:
        bias = f"bias:{self.bias}" if self.bias else ""
        found = ("alpha" * self.alpha, "rows" * self.row_factor, bias, self.activation, "residual" * self.residual)
        clamp = "" if self.clamp is None else f"clamp:{self.clamp!r}"
        text = "+".join(filter(None, (*found, "interleaved" * self.interleaved, clamp, _CASTS[self.cast])))
        if self.expression is not None:  # the last part, since it may have any letters
            text += f"{'+' * bool(text)}{self.expression}"
        return text or "none"

    @property
    def is_gated(self) -> bool:
        """Whether D has half as many columns as the product."""
        return self.activation == SWIGLU

    @property
    def label(self) -> str:
        """The text for names of kernels, where an expression is its name."""
        own = self.expression
        return str(self) if own is None else str(self).removesuffix(str(own)) + own.name

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands of a call that only kernels with this epilogue have."""
        given = {"row_factor": self.row_factor, "bias": self.bias, "residual": self.residual, "sfd": self.cast}
        vectors = () if self.expression is None else tuple(self.expression.labels)
        return (*(name for name, there in given.items() if there), *vectors)

    @property
    def device_name(self) -> str:
        """The template arguments of ``EpilogueOf`` after D's elements; "" without an epilogue."""
        if self == Parts():
            return ""
        activation = self.activation.title().replace("_", "") or ("Custom" if self.expression else "Identity")
        if self.is_gated:
            limit = float("inf") if self.clamp is None else self.clamp
            turns = ", true" if self.interleaved else ""
            activation += f"<0x{float_bits(limit):08x}{turns}>"
        flags = [str(flag).lower() for flag in (self.alpha, self.row_factor, self.residual)]
        powers = ", true" if self.cast == "ue8m0" else ""
        return f"{activation}, {flags[0]}, {flags[1]}, {_ELEMENTS[self.bias]}, {flags[2]}{powers}"

    @property
    def device_code(self) -> str:
        """The device code of an expression; "" without one."""
        return "" if self.expression is None else self.expression.device_code

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters."""
        found = "f32 alpha, " if self.alpha else ""
        found += "const float* row_factor, i64 row_factor_stride, " if self.row_factor else ""
        found += "const u8* bias, i64 bias_stride_g, " if self.bias else ""
        found += "const u8* residual, i64 residual_stride, " if self.residual else ""
        found += "float* sfd, i64 sfd_stride_m, i64 sfd_stride_n, i64 sfd_stride_g, " if self.cast else ""
        vectors = () if self.expression is None else self.expression.arguments
        return (parameters(found.removesuffix(", ")) if found else ()) + vectors

    def values(self, strides: Strides) -> Mapping[str, Value]:
        """The parameters' values, without pointers. The "stride" of alpha is its value. That of a group's FP8 scales is
        how much further apart they are than its rows."""
        found: dict[str, Value] = {"alpha": strides["alpha"][0]} if self.alpha else {}
        if self.row_factor:
            found["row_factor_stride"] = strides["row_factor"][-1]
        if self.bias:
            found["bias_stride_g"] = strides["bias"][0] if len(strides["bias"]) > 1 else 0
        if self.residual:
            found["residual_stride"] = strides["residual"][-2]
        if self.cast:
            *group, row, block = strides["sfd"]
            found |= {"sfd_stride_g": group[0] if group else 0, "sfd_stride_m": row, "sfd_stride_n": block}
        return found


@functools.cache
def parse(text: str) -> Parts:
    """The parts of an epilogue from their text."""
    text, _, own = text.partition(MARK)
    words = [] if text == "none" else list(filter(None, text.split("+")))
    bias = next((word.partition(":")[2] for word in words if word.startswith("bias:")), "")
    clamp = next((float(word.partition(":")[2]) for word in words if word.startswith("clamp:")), None)
    cast = next(cast for cast, word in reversed(_CASTS.items()) if word in words or not cast)
    known = ("alpha", "rows", "residual", "interleaved", f"bias:{bias}", f"clamp:{clamp!r}", _CASTS[cast])
    activation = next((word for word in words if word not in known), "")
    expression = Expression.parse(own) if own else None
    own_parts = bias, activation, "residual" in words, clamp, cast, expression, "interleaved" in words
    return Parts("alpha" in words, "rows" in words, *own_parts)


def apart(spec: GemmSpec) -> tuple[GemmSpec, QuantizeSpec] | None:
    """Two launches that compute what ``spec`` does in one, if D is FP8 and there are no groups: the product with a
    contiguous float32 D, and the cast of it, that of `deep_gemm.quantize.rows`. None for others."""
    if spec.d.dtype != "e4m3" or spec.grouping != "none":
        return None
    parts, epsilon = parse(spec.epilogue), float_bits(AMAX_MIN)
    columns, powers = spec.n // 2 if parts.is_gated else spec.n, parts.cast == "ue8m0"
    product = replace(spec, d=Operand("f32", "mn"), epilogue=str(replace(parts, cast="")))
    return product, QuantizeSpec(spec.m, columns, "f32", "row", "none", epsilon=epsilon, power_of_two=powers)
