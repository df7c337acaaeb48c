"""From a template's name to a launch: render, compile, cache, load. Knows str, bytes and int; never torch, never GEMM.

Nothing here runs at import; the functions that use cuda.bindings, jinja2 or platformdirs import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep_gemm.jit.binary import Binary, BuildRequest, PostPass
from deep_gemm.jit.builder import Builder, default_builder
from deep_gemm.jit.generator import include_dir, render, template_dir, variables
from deep_gemm.jit.resources import Resources

if TYPE_CHECKING:
    from deep_gemm.jit.disassembler import sass

__all__ = [
    "Binary",
    "BuildRequest",
    "Builder",
    "PostPass",
    "Resources",
    "default_builder",
    "include_dir",
    "render",
    "sass",
    "template_dir",
    "variables",
]


def __getattr__(name: str) -> Any:
    if name != "sass":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deep_gemm.jit.disassembler import sass  # here, because few processes disassemble

    return sass
