"""What GEMM kernels do with final sums before they are rounded: see ``templates/include/finish.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..records import record
from .base import Argument, Strides, Value, parameters

_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32", "": "kNoBias"}


@record(frozen=True)
class Parts:
    """``D = activation(alpha * row_factor * product (+ C) + bias) + residual``: which of these there are.

    ``bias`` is its dtype. Specs and params hold the text of this, such as "alpha+bias:f32+gelu"; "none" if there is
    no epilogue.
    """

    alpha: bool = False
    row_factor: bool = False
    bias: str = ""
    activation: str = ""
    residual: bool = False

    def __str__(self) -> str:
        bias = f"bias:{self.bias}" if self.bias else ""
        found = ("alpha" * self.alpha, "rows" * self.row_factor, bias, self.activation, "residual" * self.residual)
        return "+".join(filter(None, found)) or "none"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands of a call that only kernels with this epilogue have."""
        given = {"row_factor": self.row_factor, "bias": self.bias, "residual": self.residual}
        return tuple(name for name, there in given.items() if there)

    @property
    def device_name(self) -> str:
        """The template arguments of ``EpilogueOf`` after D's elements; "" without an epilogue."""
        if self == Parts():
            return ""
        activation = self.activation.title().replace("_", "") or "Identity"
        flags = [str(flag).lower() for flag in (self.alpha, self.row_factor, self.residual)]
        return f"{activation}, {flags[0]}, {flags[1]}, {_ELEMENTS[self.bias]}, {flags[2]}"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters."""
        found = "f32 alpha, " if self.alpha else ""
        found += "const float* row_factor, i64 row_factor_stride, " if self.row_factor else ""
        found += "const u8* bias, i64 bias_stride_g, " if self.bias else ""
        found += "const u8* residual, i64 residual_stride, " if self.residual else ""
        return parameters(found.removesuffix(", ")) if found else ()

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
    words = [] if text == "none" else text.split("+")
    bias = next((word.partition(":")[2] for word in words if word.startswith("bias:")), "")
    known = ("alpha", "rows", "residual", f"bias:{bias}")
    activation = next((word for word in words if word not in known), "")
    return Parts("alpha" in words, "rows" in words, bias, activation, "residual" in words)
