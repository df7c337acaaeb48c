"""Fused element-wise and row-wise kernels in Triton: blocks of elements, or one program per row. The autotuner chooses
blocks and warps for each number of columns."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from torch import Tensor

from ..errors import InvalidInputError
from .operations import LayerNorm, RMSNorm
from .registry import kernel
from .triton_mode import rounded, tl, triton, tuned

BLOCKS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8))
]
WARPS = [triton.Config({}, num_warps=warps) for warps in (4, 8, 16)]


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _add_gelu(x, y, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(y + at, mask=inside).to(tl.float32)
    tl.store(out + at, rounded(_gelu(total), out.dtype.element_ty), mask=inside)


@triton.jit
def _mul_add(x, y, z, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    product = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(y + at, mask=inside).to(tl.float32)
    total = product + tl.load(z + at, mask=inside).to(tl.float32)
    tl.store(out + at, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(x + row * 2 * columns + at, mask=inside).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * columns + at, mask=inside).to(tl.float32)
    tl.store(out + row * columns + at, rounded(gate * tl.sigmoid(gate) * up, out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / columns + eps)
    result = values * scale * tl.load(weight + at, mask=inside).to(tl.float32)
    tl.store(out + row * columns + at, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / columns, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    result = centred * scale * tl.load(weight + at, mask=inside).to(tl.float32)
    result += tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(out + row * columns + at, rounded(result, out.dtype.element_ty), mask=inside)


_add_gelu_tuned = tuned(_add_gelu, BLOCKS, ["size"])
_mul_add_tuned = tuned(_mul_add, BLOCKS, ["size"])
_swiglu_tuned = tuned(_swiglu, BLOCKS, ["columns"])
_rms_norm_tuned = tuned(_rms_norm, WARPS, ["columns"])
_layer_norm_tuned = tuned(_layer_norm, WARPS, ["columns"])


def _check(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InvalidInputError(f"{name} must be contiguous, but it has strides {tensor.stride()}.")


@kernel("triton", "add_gelu")
def add_gelu(x: Tensor, y: Tensor, out: Tensor) -> None:
    """See `operations.AddGelu`."""
    _check(x=x, y=y, out=out)
    size = out.numel()
    _add_gelu_tuned[lambda given: (triton.cdiv(size, given["BLOCK"]),)](x, y, out, size)


@kernel("triton", "mul_add")
def mul_add(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> None:
    """See `operations.MulAdd`."""
    _check(x=x, y=y, z=z, out=out)
    size = out.numel()
    _mul_add_tuned[lambda given: (triton.cdiv(size, given["BLOCK"]),)](x, y, z, out, size)


@kernel("triton", "swiglu")
def swiglu(x: Tensor, out: Tensor) -> None:
    """See `operations.SwiGLU`."""
    _check(x=x, out=out)
    rows, columns = out.shape
    _swiglu_tuned[lambda given: (rows, triton.cdiv(columns, given["BLOCK"]))](x, out, columns)


@kernel("triton", RMSNorm.name)
def rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """See `operations.RMSNorm`."""
    _check(x=x, weight=weight, out=out)
    rows, columns = out.shape
    _rms_norm_tuned[(rows,)](x, weight, out, columns, RMSNorm.EPS, BLOCK=triton.next_power_of_2(columns))


@kernel("triton", LayerNorm.name)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """See `operations.LayerNorm`."""
    _check(x=x, weight=weight, bias=bias, out=out)
    rows, columns = out.shape
    _layer_norm_tuned[(rows,)](x, weight, bias, out, columns, LayerNorm.EPS, BLOCK=triton.next_power_of_2(columns))
