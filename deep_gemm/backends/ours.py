"""Our own functions, by name."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import deep_gemm

from .operations import HALF_GEMMS, SCALED_GEMMS, FP8Gemm
from .registry import Call, kernel


def prepare(op: str, *operands: Any) -> Call:
    """A direct call of the public function, without a wrapper that would be timed too."""
    return functools.partial(getattr(deep_gemm, op), *operands)


def scaled(recipe: Any, a: Any, b: Any, d: Tensor, c: Tensor | None = None) -> Call:
    """`deep_gemm.fp8_gemm_nt` with scales of another kind."""
    return functools.partial(deep_gemm.fp8_gemm_nt, a, b, d, c, recipe)


for _op in (FP8Gemm.name, *HALF_GEMMS):
    kernel("cuda", _op, prepares=True)(functools.partial(prepare, _op))
for _gemm in SCALED_GEMMS:
    kernel("cuda", _gemm.name, prepares=True)(functools.partial(scaled, _gemm.recipe))
