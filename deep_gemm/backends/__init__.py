"""Implementations of one operation side by side: ours, cuBLASLt, Triton, DeepGEMM and torch.

`get_kernel(backend, op)` returns one of them; its operands are those of our own function. `of(op)` lists them.
`compare` runs them on the same operands, checks them against float64 and times them. A backend, a kernel or an
operation of your own is one class or function with a decorator. A package names its module in the entry point group
``deep_gemm.backends``. Importing this package imports no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .registry import (
    Backend,
    Kernel,
    Operation,
    absent,
    backend,
    get_backend,
    get_kernel,
    get_operation,
    kernel,
    names,
    of,
    operation,
    operation_names,
)

if TYPE_CHECKING:
    from .runner import compare

__all__ = [
    "Backend",
    "Kernel",
    "Operation",
    "absent",
    "backend",
    "compare",
    "get_backend",
    "get_kernel",
    "get_operation",
    "kernel",
    "names",
    "of",
    "operation",
    "operation_names",
]


def __getattr__(name: str) -> Any:
    if name != "compare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.runner").compare
