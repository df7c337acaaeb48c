"""Modules of torch whose products are those of this library, and `convert`, which puts them into a model. ``import
deep_gemm.nn`` loads them; ``import deep_gemm`` does not. `deep_gemm.nn.parallel` is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from deep_gemm.nn.checkpoint import load_checkpoint
from deep_gemm.nn.convert import Report, convert
from deep_gemm.nn.fp4_linear import FP4GroupedLinear
from deep_gemm.nn.fp4_report import FP8Report, check_mxfp4
from deep_gemm.nn.grouped_linear import FP8GroupedLinear
from deep_gemm.nn.linear import BF16Linear, FP8Linear
from deep_gemm.nn.moe import MoE
from deep_gemm.nn.router import Router
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.spread import SpreadReport, check_spread

__all__ = [
    "BF16Linear",
    "FP4GroupedLinear",
    "FP8GroupedLinear",
    "FP8Linear",
    "FP8Report",
    "MoE",
    "Report",
    "Router",
    "Routing",
    "SpreadReport",
    "check_mxfp4",
    "check_spread",
    "convert",
    "load_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "parallel":
        return importlib.import_module("deep_gemm.nn.parallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
