"""The compilers: NVRTC and NVCC behind one interface, and finding them. None is imported before it is needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deep_gemm.jit.compilers.base import Compiled, Compiler

if TYPE_CHECKING:
    from deep_gemm.jit.compilers.find import FoundCompiler, choose, find_all, is_broken
    from deep_gemm.jit.compilers.nvcc import Nvcc
    from deep_gemm.jit.compilers.nvrtc import Nvrtc

__all__ = ["Compiled", "Compiler", "FoundCompiler", "Nvcc", "Nvrtc", "choose", "find_all", "is_broken"]

_PLACES = {"Nvcc": "nvcc", "Nvrtc": "nvrtc"} | dict.fromkeys(
    ("FoundCompiler", "choose", "find_all", "is_broken"), "find"
)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
