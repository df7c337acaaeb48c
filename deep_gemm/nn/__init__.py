"""Modules of torch whose products are those of this library: `FP8Linear` and `BF16Linear`, and `convert`, which puts
them into a model. ``import deep_gemm.nn`` loads them; ``import deep_gemm`` does not."""

from __future__ import annotations

from deep_gemm.nn.linear import BF16Linear, FP8Linear

__all__ = ["BF16Linear", "FP8Linear"]
