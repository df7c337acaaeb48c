"""Our own functions, by their names."""

from __future__ import annotations

import functools
from typing import Any

import deep_gemm

from .operations import HALF_GEMMS, FP8Gemm
from .registry import Call, kernel


def prepare(op: str, *operands: Any) -> Call:
    """The public function, with nothing of ours between it and who times it."""
    return functools.partial(getattr(deep_gemm, op), *operands)


for _op in (FP8Gemm.name, *HALF_GEMMS):
    kernel("cuda", _op, prepares=True)(functools.partial(prepare, _op))
