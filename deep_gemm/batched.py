"""Batches of products of equal size, and einsum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import InvalidInputError, UnsupportedError
from .ops import batched, checks, cublaslt

__all__ = ["bf16_bmm", "einsum", "fp16_bmm"]


def bf16_bmm(a: Tensor, b: Tensor, d: Tensor, compiled_dims: str | None = None) -> None:
    """``d[i] = a[i] @ b[i]^T`` for each i, on the current stream of the tensors' device.

    Args:
        a: (B, M, K) bfloat16. K or M is contiguous, in steps of 16 bytes; all other strides, that of the batch too, are
            free: multiples of 16 bytes. A (M, B, K) tensor is passed as ``a.transpose(0, 1)``.
        b: (B, N, K) bfloat16, likewise. For (B, K, N) pass ``b.transpose(1, 2)``.
        d: (B, M, N) bfloat16 or float32, with contiguous rows and any other strides; written in place.
        compiled_dims: sizes to compile into the kernel, letters of "mnk".

    Sums are float32, over K in order, in one accumulator: each product has the bits of the same product in a batch of
    one, and repeats give the same bits. Any size may be 0. Nothing is read from a neighbour in the batch. Tensors on
    the CPU are multiplied by the reference implementation.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.
    """
    batched.bf16(a, b, d, compiled_dims, batched.PLAIN)


def fp16_bmm(a: Tensor, b: Tensor, d: Tensor, compiled_dims: str | None = None) -> None:
    """`bf16_bmm` for float16: a and b are float16, d float16 or float32."""
    batched.fp16(a, b, d, compiled_dims, batched.PLAIN)


def einsum(expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, use_cublaslt: bool = False) -> None:
    """``torch.einsum(expr, a, b)`` of bfloat16, written into d.

    Args:
        expr: one of

            - "bhr,hdr->bhd" and "bhd,hdr->bhr": a product for each h. Strides are free, as in `bf16_bmm`; c is None.
            - "bmk,bnk->mn": the sum of a product for each b. K is contiguous and a multiple of 64. d is bfloat16 or
              float32, row-major; c is None, d itself (``d += ...``), or what is added, of d's dtype and shape.
        a, b: bfloat16.
        d: bfloat16; float32 too.
        use_cublaslt: let torch multiply, that is cuBLAS, which may copy operands.

    Sums are float32 and repeat bitwise, those of "bmk,bnk->mn" too.

    Raises:
        InvalidInputError, UnsupportedError, NotWarmError, CompileError, DriverError: as `bf16_bmm`.
    """
    checks.check_bool("use_cublaslt", use_cublaslt)
    summed = isinstance(expr, str) and expr == batched.SUM
    if not summed:
        _check_expression(expr, (batched.BHR, batched.BHD, batched.SUM))
        _refuse_c(expr, c)
    if use_cublaslt:
        operation = batched.Summed(batched.SUM_BF16, c is not None) if summed else batched.Batched(batched.BMM_BF16)
        x = operation.check(a, b, d, *((c, None) if summed else (None, expr)))
        if x is not None:
            on_gpu = cublaslt.summed_by_cublaslt if summed else cublaslt.batched_by_cublaslt
            (operation.reference if x.device.type == "cpu" else on_gpu)(x)
    elif summed:
        batched.bf16_sum(a, b, d, c, None)
    else:
        batched.bf16(a, b, d, None, expr)


def _check_expression(expr: Any, known: tuple[str, ...]) -> None:
    if not isinstance(expr, str) or expr not in known:
        raise UnsupportedError(f"expr must be one of {' and '.join(known)}, but it is {expr!r}. Use torch.einsum.")


def _refuse_c(expr: str, c: Any) -> None:
    if c is not None:
        raise InvalidInputError(f"c must be None for {expr}: nothing is added to its products. Add it after the call.")
