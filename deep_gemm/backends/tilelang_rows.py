"""Fused element-wise and row-wise kernels in TileLang, tuned over blocks and threads for each shape."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type"
# No `from __future__ import annotations`: see `tilelang_gemm`.
import functools
from typing import Any

import tilelang
import tilelang.language as T
from torch import Tensor

from ..errors import InvalidInputError
from .operations import LayerNorm, RMSNorm
from .registry import Call, kernel
from .tilelang_gemm import compiled

BF16, F32 = "bfloat16", "float32"
BLOCKS = [
    {"block": block, "threads": threads} for block, threads in ((1024, 128), (2048, 128), (2048, 256), (4096, 256))
]
THREADS = [{"threads": threads} for threads in (128, 256, 512)]


@tilelang.autotune(configs=BLOCKS, skip_check=True)
@tilelang.jit
def _add_gelu(size: int, block: int = 1024, threads: int = 128) -> Any:
    @T.prim_func
    def run(x: T.Tensor((size,), BF16), y: T.Tensor((size,), BF16), out: T.Tensor((size,), BF16)):
        with T.Kernel(T.ceildiv(size, block), threads=threads) as program:
            left = T.alloc_fragment((block,), F32)
            right = T.alloc_fragment((block,), F32)
            T.copy(x[program * block], left)  # separate copies, because loops that call erf are not vectorised
            T.copy(y[program * block], right)
            for i in T.Parallel(block):
                left[i] = left[i] + right[i]
                left[i] = 0.5 * left[i] * (1.0 + T.erf(left[i] * 0.7071067811865476))
            T.copy(left, out[program * block])

    return run


@tilelang.autotune(configs=BLOCKS, skip_check=True)
@tilelang.jit
def _mul_add(size: int, block: int = 1024, threads: int = 128) -> Any:
    @T.prim_func
    def run(
        x: T.Tensor((size,), BF16),
        y: T.Tensor((size,), BF16),
        z: T.Tensor((size,), BF16),
        out: T.Tensor((size,), BF16),
    ):
        with T.Kernel(T.ceildiv(size, block), threads=threads) as program:
            for i in T.Parallel(block):
                if program * block + i < size:
                    product = T.cast(x[program * block + i], F32) * T.cast(y[program * block + i], F32)
                    out[program * block + i] = product + T.cast(z[program * block + i], F32)

    return run


@tilelang.autotune(configs=BLOCKS, skip_check=True)
@tilelang.jit
def _swiglu(rows: int, columns: int, block: int = 1024, threads: int = 128) -> Any:
    @T.prim_func
    def run(x: T.Tensor((rows, 2 * columns), BF16), out: T.Tensor((rows, columns), BF16)):
        with T.Kernel(T.ceildiv(columns, block), rows, threads=threads) as (part, row):
            for i in T.Parallel(block):
                if part * block + i < columns:
                    gate = T.cast(x[row, part * block + i], F32)
                    up = T.cast(x[row, columns + part * block + i], F32)
                    out[row, part * block + i] = gate / (1.0 + T.exp(-gate)) * up

    return run


@tilelang.autotune(configs=THREADS, skip_check=True)
@tilelang.jit
def _rms_norm(rows: int, columns: int, eps: float, threads: int = 128) -> Any:
    width = -(-columns // threads) * threads

    @T.prim_func
    def run(
        x: T.Tensor((rows, columns), BF16), weight: T.Tensor((columns,), BF16), out: T.Tensor((rows, columns), BF16)
    ):
        with T.Kernel(rows, threads=threads) as row:
            values = T.alloc_fragment((1, width), F32)
            squares = T.alloc_fragment((1, width), F32)
            total = T.alloc_fragment((1,), F32)
            for i, j in T.Parallel(1, width):
                values[i, j] = T.if_then_else(j < columns, T.cast(x[row + i, j], F32), 0.0)
                squares[i, j] = values[i, j] * values[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(1, width):
                if j < columns:
                    out[row + i, j] = values[i, j] * T.rsqrt(total[i] / columns + eps) * T.cast(weight[j], F32)

    return run


@tilelang.autotune(configs=THREADS, skip_check=True)
@tilelang.jit
def _layer_norm(rows: int, columns: int, eps: float, threads: int = 128) -> Any:
    width = -(-columns // threads) * threads

    @T.prim_func
    def run(
        x: T.Tensor((rows, columns), BF16),
        weight: T.Tensor((columns,), BF16),
        bias: T.Tensor((columns,), BF16),
        out: T.Tensor((rows, columns), BF16),
    ):
        with T.Kernel(rows, threads=threads) as row:
            values = T.alloc_fragment((1, width), F32)
            squares = T.alloc_fragment((1, width), F32)
            total = T.alloc_fragment((1,), F32)
            spread = T.alloc_fragment((1,), F32)
            for i, j in T.Parallel(1, width):
                values[i, j] = T.if_then_else(j < columns, T.cast(x[row + i, j], F32), 0.0)
            T.reduce_sum(values, total, dim=1)
            for i, j in T.Parallel(1, width):
                values[i, j] = T.if_then_else(j < columns, values[i, j] - total[i] / columns, 0.0)
                squares[i, j] = values[i, j] * values[i, j]
            T.reduce_sum(squares, spread, dim=1)
            for i, j in T.Parallel(1, width):
                if j < columns:
                    scaled = values[i, j] * T.rsqrt(spread[i] / columns + eps) * T.cast(weight[j], F32)
                    out[row + i, j] = scaled + T.cast(bias[j], F32)

    return run


def _flat(**tensors: Tensor) -> tuple[Tensor, ...]:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InvalidInputError(f"{name} must be contiguous, but it has strides {tensor.stride()}.")
    return tuple(tensor.view(-1) for tensor in tensors.values())


@kernel("tilelang", "add_gelu", prepares=True)
def add_gelu(x: Tensor, y: Tensor, out: Tensor) -> Call:
    """See `operations.AddGelu`."""
    operands = _flat(x=x, y=y, out=out)
    return functools.partial(compiled(_add_gelu, out.numel(), operands=operands), *operands)


@kernel("tilelang", "mul_add", prepares=True)
def mul_add(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> Call:
    """See `operations.MulAdd`."""
    operands = _flat(x=x, y=y, z=z, out=out)
    return functools.partial(compiled(_mul_add, out.numel(), operands=operands), *operands)


@kernel("tilelang", "swiglu", prepares=True)
def swiglu(x: Tensor, out: Tensor) -> Call:
    """See `operations.SwiGLU`."""
    return functools.partial(compiled(_swiglu, *out.shape, operands=(x, out)), x, out)


@kernel("tilelang", RMSNorm.name, prepares=True)
def rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> Call:
    """See `operations.RMSNorm`."""
    operands = x, weight, out
    return functools.partial(compiled(_rms_norm, *out.shape, RMSNorm.EPS, operands=operands), *operands)


@kernel("tilelang", LayerNorm.name, prepares=True)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Call:
    """See `operations.LayerNorm`."""
    operands = x, weight, bias, out
    return functools.partial(compiled(_layer_norm, *out.shape, LayerNorm.EPS, operands=operands), *operands)
