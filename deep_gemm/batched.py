"""Batches of products of equal size, and einsum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import InvalidInputError, UnsupportedError
from .ops import batched, checks, cublaslt, table


def bf16_bmm(a: Tensor, b: Tensor, d: Tensor, compiled_dims: str | None = None) -> None:
    """``d[i] = a[i] @ b[i]^T`` for each i, on the current stream of the tensors' device.

    Args:
        a: (B, M, K) bfloat16. K or M is contiguous, in steps of 16 bytes; all other strides, that of the batch too, are
            free: multiples of 16 bytes, not 0. A (M, B, K) tensor is passed as ``a.transpose(0, 1)``.
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

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((2, 8, 64), (2, 32, 64), (2, 8, 32)))
    >>> deep_gemm.bf16_bmm(a, b, d)
    """
    batched.bf16(a, b, d, compiled_dims, batched.PLAIN)


def fp16_bmm(a: Tensor, b: Tensor, d: Tensor, compiled_dims: str | None = None) -> None:
    """`bf16_bmm` for float16: a and b are float16, d float16 or float32.

    >>> a, b, d = (torch.ones(*shape).half() for shape in ((2, 8, 64), (2, 32, 64), (2, 8, 32)))
    >>> deep_gemm.fp16_bmm(a, b, d)
    """
    batched.fp16(a, b, d, compiled_dims, batched.PLAIN)


def fp8_bmm(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d[i] = (a[i] * scales of a[i]) @ (b[i] * scales of b[i])^T`` for each i, as `fp8_gemm_nt` multiplies one.

    Args:
        a: (B, M, K) E4M3 and its float32 scales (B, M, ceil(K / 128)). K is contiguous and a multiple of 16; all other
            strides, that of the batch too, are free: multiples of 16, not 0. Scales may have any strides: if M is
            contiguous, and all other strides are multiples of 4, they are read without a copy. Others cost a launch.
        b: (B, N, K) E4M3, likewise, and its float32 scales (B, ceil(N / 128), ceil(K / 128)), of any strides.
        d: (B, M, N) bfloat16, with contiguous rows and any other strides; written in place.
        recipe, recipe_a, recipe_b: None, or (1, 128, 128), also as (1, 128) and (128, 128).
        compiled_dims, disable_ue8m0_cast: as for `fp8_gemm_nt`.

    Each product has the bits of the same product in a batch of one, and repeats give the same bits. Any size may be 0.
    Nothing is read from a neighbour in the batch. Tensors on the CPU are multiplied by the reference implementation.

    Raises:
        InvalidInputError, UnsupportedError, NotWarmError, CompileError, DriverError: as `fp8_gemm_nt`.

    >>> a = torch.ones(2, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 8, 1)
    >>> b = torch.ones(2, 32, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> deep_gemm.fp8_bmm(a, b, torch.empty(2, 8, 32).bfloat16())
    """
    batched.fp8(a, b, d, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, batched.PLAIN)


def fp8_einsum(
    expr: str,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 128, 128),
    epilogue: Any = None,
) -> None:
    """``torch.einsum(expr, a, b)`` of FP8 operands with scales, written into d.

    Args:
        expr: "bhr,hdr->bhd", a product for each h. Others need another architecture.
        a: (b, h, r) E4M3 and its float32 scales (b, h, ceil(r / 128)). r is contiguous; other strides, those of scales
            too, are free as in `fp8_bmm`.
        b: (h, d, r) E4M3 and its float32 scales (h, ceil(d / 128), ceil(r / 128)).
        d: (b, h, d) bfloat16, with contiguous rows and any other strides.
        c: must be None.
        recipe: (1, 128, 128).
        epilogue: must be None.

    b may be 0.

    Raises:
        InvalidInputError, UnsupportedError, NotWarmError, CompileError, DriverError: as `fp8_gemm_nt`.

    >>> a = torch.ones(8, 2, 128).to(torch.float8_e4m3fn), torch.ones(8, 2, 1)
    >>> b = torch.ones(2, 32, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> deep_gemm.fp8_einsum("bhr,hdr->bhd", a, b, torch.empty(8, 2, 32).bfloat16())
    """
    checks.refuse_epilogue(epilogue)
    if not isinstance(expr, str) or expr != batched.BHR:
        raise UnsupportedError(
            f"expr of FP8 must be {batched.BHR} on Hopper, but it is {checks.shown(expr)}. Pass views of "
            "operands that are contiguous along K to fp8_bmm, or bfloat16 to einsum."
        )
    if c is not None:
        raise InvalidInputError(f"c must be None for {expr}: nothing is added to its products. Add it after the call.")
    batched.fp8(a, b, d, recipe, None, None, None, False, expr)


def einsum(
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    use_cublaslt: bool = False,
    epilogue: Any = None,
) -> None:
    """``torch.einsum(expr, a, b)`` of bfloat16, written into d.

    Args:
        expr: one of

            - "bhr,hdr->bhd" and "bhd,hdr->bhr": a product for each h. Strides are free, as in `bf16_bmm`; c is None.
            - "bmk,bnk->mn": the sum of a product for each b. K is contiguous and a multiple of 64. d is bfloat16 or
              float32, row-major; c is None, d itself (``d += ...``), or what is added, of d's dtype and shape.
        a, b: bfloat16.
        d: bfloat16; float32 too.
        use_cublaslt: let torch multiply, that is cuBLAS, which may copy operands.
        epilogue: must be None.

    Sums are float32 and repeat bitwise, those of "bmk,bnk->mn" too.

    Raises:
        InvalidInputError, UnsupportedError, NotWarmError, CompileError, DriverError: as `bf16_bmm`.

    >>> a, b, d = torch.ones(2, 8, 64).bfloat16(), torch.ones(2, 32, 64).bfloat16(), torch.zeros(8, 32)
    >>> deep_gemm.einsum("bmk,bnk->mn", a, b, d, c=d)
    >>> d[0, 0].item()
    128.0
    """
    checks.refuse_epilogue(epilogue)
    if use_cublaslt is not False or not isinstance(expr, str):
        _by_torch(expr, a, b, d, c, use_cublaslt)
    elif c is None and expr in _EACH:
        batched.bf16(a, b, d, None, expr)
    elif expr == batched.SUM:
        batched.bf16_sum(a, b, d, c, None)
    else:
        _by_torch(expr, a, b, d, c, use_cublaslt)


def _by_torch(expr: Any, a: Any, b: Any, d: Any, c: Any, use_cublaslt: Any) -> None:
    """Let torch multiply, or refuse the arguments."""
    checks.check_bool("use_cublaslt", use_cublaslt)
    if not isinstance(expr, str) or expr not in (*_EACH, batched.SUM):
        raise UnsupportedError(
            f"expr must be {', '.join(_EACH)} or {batched.SUM}, but it is {checks.shown(expr)}. Use torch.einsum."
        )
    if expr == batched.SUM:
        x, way = batched.Summed(table.SUM_BF16, c is not None).check(a, b, d, c, None), cublaslt.summed_by_cublaslt
    elif c is None:
        x, way = batched.Batched(table.BMM_BF16).check(a, b, d, None, expr), cublaslt.batched_by_cublaslt
    else:
        raise InvalidInputError(f"c must be None for {expr}: nothing is added to its products. Add it after the call.")
    if x is not None:
        way(x)


_EACH = (batched.BHR, batched.BHD)
"""What is multiplied for each h."""
