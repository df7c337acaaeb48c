"""Dense GEMMs."""

from __future__ import annotations

from torch import Tensor

from .ops import fp8_dense
from .ops.fp8_dense import as_nt

__all__ = [
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
]


def fp8_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d = (a * scales of a) @ (b * scales of b)^T``, on the current stream of the tensors' device.

    Args:
        a: (M, K) E4M3 and its float32 scales (M, ceil(K / 128)): one per row per 128 of K. K a multiple of 16, K-major,
            rows 16-byte aligned and any distance apart. Scales of any strides: those from
            `get_mn_major_tma_aligned_tensor`, and slices of them, are read as they are, others cost a launch.
        b: (N, K) E4M3 and its float32 scales (ceil(N / 128), ceil(K / 128)): one per 128 x 128 block, of any strides.
        d: (M, N) bfloat16, row-major, rows any distance apart; written in place.
        c: must be None in this version.
        recipe: None or (1, 128, 128).
        recipe_a, recipe_b: None, or (1, 128) and (128, 128).
        compiled_dims: sizes to bake into the kernel, letters of "mnk". None leaves it to the library, which bakes in
            none, so that one kernel serves all shapes.
        disable_ue8m0_cast: of no effect on Hopper, where scales stay float32 whatever their values.

    The tensor cores' sums are promoted to float32 every 128 of K, where the scales are applied. Results are bitwise
    repeatable. M = 0 does nothing and K = 0 writes zeros. Tensors on the CPU are multiplied by the reference
    implementation. Inside CUDA-graph capture the shape must have been called before.

    Every operand may be written by the kernel or copy just before, of any library: nothing is assumed of who wrote it
    or when. Only where both tensors of ``b`` were given to `declare_constant` are those two read earlier.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.
    """
    fp8_dense.call(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_nn(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` with b given as (K, N) and its scales as (ceil(K / 128), ceil(N / 128)).

    Hopper's FP8 needs K contiguous in memory: b must be a transposed view of K-major storage, else UnsupportedError.
    """
    fp8_dense.call(a, as_nt(b, "b"), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` with a given as (K, M) and b as (K, N), with scales likewise; both views of K-major storage."""
    fp8_dense.call(as_nt(a, "a"), as_nt(b, "b"), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` with a given as (K, M) and its scales likewise; a view of K-major storage."""
    fp8_dense.call(as_nt(a, "a"), b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
