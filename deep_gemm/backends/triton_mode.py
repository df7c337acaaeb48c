"""Triton's mode: compiled on a GPU, or interpreted without one. The interpreter must be chosen when Triton is imported.

Kernels import `triton` and `tl` from here, and two functions that work around errors of the interpreter.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import sys
from typing import Any

import torch

from ..settings import variables

__all__ = ["dot_nt", "interpreted", "rounded", "tl", "triton", "tuned", "why_not"]

if torch.cuda.is_available() or "triton" in sys.modules:
    import triton
else:
    with variables(TRITON_INTERPRET="1"):
        import triton
    triton.knobs.runtime.interpret = True  # for kernels that are decorated from now on

import triton.language as tl

interpreted: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run in the interpreter."""
_INTERPRETED = tl.constexpr(interpreted)


def why_not(device: torch.device) -> str:
    if device.type == "cuda":
        return "TRITON_INTERPRET is set, and the interpreter's times are no kernel's" if interpreted else ""
    if device.type != "cpu":
        return f"it does not run on {device.type}"
    if interpreted:
        return ""
    if torch.cuda.is_available():
        return "on CPU tensors it runs in its interpreter alone: set TRITON_INTERPRET=1"
    return "Triton was imported before its interpreter could be chosen: set TRITON_INTERPRET=1"


def tuned(kernel: Any, configs: list[Any], key: list[str]) -> Any:
    """`triton.autotune`. In the interpreter, where times mean nothing, only the first config is used."""
    return triton.autotune(configs=configs[:1] if interpreted else configs, key=key)(kernel)


@triton.jit
def dot_nt(a, b, acc):
    """``a @ b^T + acc``. The interpreter would multiply the bits of bfloat16 as integers."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b.T, acc)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 rounded to the nearest ``dtype``. The interpreter would truncate to bfloat16."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)
