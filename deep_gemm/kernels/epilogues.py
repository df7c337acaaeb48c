"""What GEMM kernels do with final sums before they are rounded: see ``templates/include/finish.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..records import record
from .base import Argument, Strides, Value, parameters
from .expressions import MARK, Expression

_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32", "": "kNoBias"}


@record(frozen=True)
class Parts:
    """``D = activation(alpha * row_factor * product (+ C) + bias) + residual``: which of these there are.

    ``bias`` is its dtype. In place of an ``activation`` there may be an ``expression``. Specs and params hold the text
    of this, such as "alpha+bias:f32+gelu"; "none" if there is no epilogue.
    """

    alpha: bool = False
    row_factor: bool = False
    bias: str = ""
    activation: str = ""
    residual: bool = False
    expression: Expression | None = None

    def __str__(self) -> str:
        bias = f"bias:{self.bias}" if self.bias else ""
        found = ("alpha" * self.alpha, "rows" * self.row_factor, bias, self.activation, "residual" * self.residual)
        text = "+".join(filter(None, found))
        if self.expression is not None:  # the last part, since it may have any letters
            text += f"{'+' * bool(text)}{self.expression}"
        return text or "none"

    @property
    def label(self) -> str:
        """The text for names of kernels, where an expression is its name."""
        own = self.expression
        return str(self) if own is None else str(self).removesuffix(str(own)) + own.name

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands of a call that only kernels with this epilogue have."""
        given = {"row_factor": self.row_factor, "bias": self.bias, "residual": self.residual}
        vectors = () if self.expression is None else tuple(self.expression.labels)
        return (*(name for name, there in given.items() if there), *vectors)

    @property
    def device_name(self) -> str:
        """The template arguments of ``EpilogueOf`` after D's elements; "" without an epilogue."""
        if self == Parts():
            return ""
        activation = self.activation.title().replace("_", "") or ("Custom" if self.expression else "Identity")
        flags = [str(flag).lower() for flag in (self.alpha, self.row_factor, self.residual)]
        return f"{activation}, {flags[0]}, {flags[1]}, {_ELEMENTS[self.bias]}, {flags[2]}"

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
        vectors = () if self.expression is None else self.expression.arguments
        return (parameters(found.removesuffix(", ")) if found else ()) + vectors

    def values(self, strides: Strides) -> Mapping[str, Value]:
        """The parameters' values, without pointers. The "stride" of alpha is its value."""
        found: dict[str, Value] = {"alpha": strides["alpha"][0]} if self.alpha else {}
        if self.row_factor:
            found["row_factor_stride"] = strides["row_factor"][-1]
        if self.bias:
            found["bias_stride_g"] = strides["bias"][0] if len(strides["bias"]) > 1 else 0
        if self.residual:
            found["residual_stride"] = strides["residual"][-2]
        return found


@functools.cache
def parse(text: str) -> Parts:
    """The parts of an epilogue from their text."""
    text, _, own = text.partition(MARK)
    words = [] if text == "none" else list(filter(None, text.split("+")))
    bias = next((word.partition(":")[2] for word in words if word.startswith("bias:")), "")
    known = ("alpha", "rows", "residual", f"bias:{bias}")
    activation = next((word for word in words if word not in known), "")
    expression = Expression.parse(own) if own else None
    return Parts("alpha" in words, "rows" in words, bias, activation, "residual" in words, expression)
