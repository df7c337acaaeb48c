"""Products by torch, that is by cuBLAS, for comparisons."""

from __future__ import annotations

from torch import Tensor

from .ops import cublaslt


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``d = (c +) a @ b^T`` by torch, that is by cuBLAS, for comparisons.

    a (M, K) and b (N, K) are bfloat16, float16 or, without scales, FP8. d (M, N) has a dtype that torch can write. c is
    None, d, or another tensor of d's dtype and shape. Tensors on the CPU are multiplied by the reference
    implementation.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: torch cannot do it; the message contains torch's own.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.cublaslt_gemm_nt(a, b, d)
    """
    cublaslt.gemm(a, b, d, c, "nt")


def cublaslt_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` with b given as (K, N).

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (64, 32), (8, 32)))
    >>> deep_gemm.cublaslt_gemm_nn(a, b, d)
    """
    cublaslt.gemm(a, b, d, c, "nn")


def cublaslt_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` with a given as (K, M) and b as (K, N).

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((64, 8), (64, 32), (8, 32)))
    >>> deep_gemm.cublaslt_gemm_tn(a, b, d)
    """
    cublaslt.gemm(a, b, d, c, "tn")


def cublaslt_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` with a given as (K, M).

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((64, 8), (32, 64), (8, 32)))
    >>> deep_gemm.cublaslt_gemm_tt(a, b, d)
    """
    cublaslt.gemm(a, b, d, c, "tt")
