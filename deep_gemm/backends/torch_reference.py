"""The reference: GEMMs of `deep_gemm.reference`, which accumulate in float64, and other operations in eager torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import fp8_gemm_reference, half_gemm_reference
from .operations import HALF_GEMMS, SCALED_GEMMS, FP8Gemm, HalfGemm, LayerNorm, RMSNorm, ScaledGemm
from .registry import get_operation, kernel

Pair = tuple[Tensor, Tensor]


@kernel("torch", FP8Gemm.name)
def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor) -> None:
    """See `fp8_gemm_reference`."""
    fp8_gemm_reference(*a, *b, d)


def scaled_gemm(gemm: type[ScaledGemm], a: Pair, b: Pair, d: Tensor) -> None:
    """See `fp8_gemm_reference`."""
    fp8_gemm_reference(*a, *b, d, scaling=gemm.scaling)


for _gemm in SCALED_GEMMS:
    kernel("torch", _gemm.name)(functools.partial(scaled_gemm, _gemm))


def half_gemm(op: HalfGemm, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """See `half_gemm_reference`."""
    half_gemm_reference(*op.as_nt(a, b), d, c)


for _name in HALF_GEMMS:
    _op: Any = get_operation(_name)
    kernel("torch", _name)(functools.partial(half_gemm, _op))


@kernel("torch", "add_gelu")
def add_gelu(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Two kernels on a GPU."""
    return F.gelu(x + y)


@kernel("torch", "mul_add")
def mul_add(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> None:
    """One kernel."""
    torch.addcmul(z, x, y, out=out)


@kernel("torch", RMSNorm.name)
def rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """torch's own."""
    return F.rms_norm(x, x.shape[1:], weight, RMSNorm.EPS)


@kernel("torch", LayerNorm.name)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """torch's own."""
    return F.layer_norm(x, x.shape[1:], weight, bias, LayerNorm.EPS)


@kernel("torch", "swiglu")
def swiglu(x: Tensor, out: Tensor) -> None:
    """Two kernels."""
    gate, up = x.chunk(2, 1)
    torch.mul(F.silu(gate), up, out=out)
