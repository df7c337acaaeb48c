"""Dense GEMMs."""

from __future__ import annotations

from torch import Tensor

from .ops import dense
from .ops.epilogue import Epilogue


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
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """``d = (c +) (a * scales of a) @ (b * scales of b)^T``, on the current stream of the tensors' device.

    Args:
        a: (M, K) E4M3 and its float32 scales. K is a multiple of 16. If K is contiguous, values are read without a
            copy; rows must be 16-byte aligned, with any stride. If M is contiguous instead, a kernel transposes the
            values first, which costs a launch that reads and writes them; ``DG_FORBID_TRANSPOSE=1`` refuses that.
        b: (N, K) E4M3 and its float32 scales, likewise. With scales of whole rows, a, b or both may be E5M2.
        d: (M, N) bfloat16, float32 or float16, row-major, with any row stride; written in place.
        c: None, or what is added: (M, N) of d's dtype, row-major. It may be d itself (``d += ...``); otherwise it
            shares no memory with d. The sum is rounded once, from float32.
        recipe: the block that shares a scale, as (rows of a, rows of b, K):

            - (1, 128, 128), or None: a's are (M, ceil(K / 128)), b's (ceil(N / 128), ceil(K / 128)).
            - (1, 1, 128), as for weight gradients: a's are (M, ceil(K / 128)), b's (N, ceil(K / 128)).
            - None, with scales of whole rows: one for all of an operand, or one for each row: (M, 1) for a, (1, N) or
              (N, 1) for b, as `torch._scaled_mm` takes them. Sums are promoted to float32 all the same.
            - (1, 1, 128), or None, with int32 scales: exponents of UE8M0, four to an element, for GPUs other than
              Hopper. a's are (M, ceil(K / 512)), b's (N, ceil(K / 512)); see
              `get_mn_major_tma_aligned_packed_ue8m0_tensor`. An exponent of 0 or 255 is no scale.

            Scales may have any strides. Scales of 1 x 128 from `get_mn_major_tma_aligned_tensor`, and slices of them,
            are read without a copy; others cost a launch.
        recipe_a, recipe_b: the same as pairs: (1, 128), and (128, 128) or (1, 128).
        compiled_dims: sizes to compile into the kernel, letters of "mnk". With None the library decides: it compiles
            none in, so that one kernel serves all shapes.
        disable_ue8m0_cast: no effect on Hopper, where scales stay float32 whatever their values.
        alpha: None, or a factor of the product: short for ``epilogue=Epilogue(alpha=alpha)``.
        epilogue: None, or what is done with sums before they are rounded: see `Epilogue`.

    The tensor cores' sums are scaled and promoted to float32 after every 128 of K. Results are bitwise repeatable.
    M = 0 or N = 0 does nothing, and K = 0 writes zeros, or c. Tensors on the CPU are multiplied by the reference
    implementation. Before a call inside CUDA-graph capture, the shape must have been called once outside of it.

    The previous kernel or copy in the stream may write any operand, whatever library it belongs to. Only if both
    tensors of ``b`` were given to `declare_constant` are they read before that kernel has finished.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.

    >>> x, w, d = (torch.ones(*shape).bfloat16() for shape in ((8, 256), (32, 256), (8, 32)))
    >>> deep_gemm.fp8_gemm_nt(deep_gemm.quantize.rows(x), deep_gemm.quantize.blocks(w), d)
    >>> d[0, 0].item()
    256.0
    """
    dense.fp8(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha, epilogue, "nt")


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
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp8_gemm_nt` with b given as (K, N), and its scales transposed likewise.

    Hopper's FP8 needs K contiguous in memory, as in a transposed view of K-major storage. Other operands are transposed
    first (see `fp8_gemm_nt`).

    >>> a, b = deep_gemm.quantize.rows(torch.ones(8, 256)), deep_gemm.quantize.blocks(torch.ones(32, 256))
    >>> deep_gemm.fp8_gemm_nn(a, [part.t() for part in b], torch.empty(8, 32))
    """
    dense.fp8(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha, epilogue, "nn")


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
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp8_gemm_nt` with a given as (K, M) and b as (K, N), with scales likewise.

    >>> a, b = deep_gemm.quantize.rows(torch.ones(8, 256)), deep_gemm.quantize.blocks(torch.ones(32, 256))
    >>> deep_gemm.fp8_gemm_tn([part.t() for part in a], [part.t() for part in b], torch.empty(8, 32))
    """
    dense.fp8(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha, epilogue, "tn")


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
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp8_gemm_nt` with a given as (K, M), and its scales transposed likewise.

    >>> a, b = deep_gemm.quantize.rows(torch.ones(8, 256)), deep_gemm.quantize.blocks(torch.ones(32, 256))
    >>> deep_gemm.fp8_gemm_tt([part.t() for part in a], b, torch.empty(8, 32))
    """
    dense.fp8(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha, epilogue, "tt")


fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt


def bf16_gemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """``d = (c +) a @ b^T`` of bfloat16, on the current stream of the tensors' device.

    Args:
        a: (M, K) bfloat16, with any strides. K-major and M-major storage is read without a copy if TMA can address it:
            one stride is 1, the other a multiple of 8 elements, and the address a multiple of 16 bytes. A kernel copies
            other storage first.
        b: (N, K) bfloat16, likewise. The usual weight of a linear layer.
        d: (M, N) bfloat16 or float32, row-major, with any row stride; written in place.
        c: None, or what is added: (M, N) of d's dtype, row-major. It may be d itself (the same address, shape and
            strides); otherwise it shares no memory with d. The sum is rounded once, from float32.
        compiled_dims: sizes to compile into the kernel, letters of "mnk". With None the library decides: it compiles
            none in, so that one kernel serves all shapes.
        alpha: None, or a factor of the product: short for ``epilogue=Epilogue(alpha=alpha)``.
        epilogue: None, or what is done with sums before they are rounded: see `Epilogue`.

    Sums are float32. Results are bitwise repeatable. While `set_batch_invariant` is on, a row's bits depend neither on
    M nor on the form. M = 0 or N = 0 does nothing, and K = 0 writes zeros, or c. Tensors on the CPU are multiplied by
    the reference implementation. Before a call inside CUDA-graph capture, the shape must have been called once outside
    of it.

    The previous kernel or copy in the stream may write any operand, whatever library it belongs to. Only if ``b`` was
    given to `declare_constant` is it read before that kernel has finished.

    Raises:
        InvalidInputError: an argument is wrong; the message names it. float16 operands are `fp16_gemm_nt`'s.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.bf16_gemm_nt(a, b, d)
    >>> d[0, 0].item()
    64.0
    """
    dense.bf16(a, b, d, c, compiled_dims, alpha, epilogue, "nt")


def bf16_gemm_nn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`bf16_gemm_nt` with b given as (K, N), of any strides.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (64, 32), (8, 32)))
    >>> deep_gemm.bf16_gemm_nn(a, b, d)
    """
    dense.bf16(a, b, d, c, compiled_dims, alpha, epilogue, "nn")


def bf16_gemm_tn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`bf16_gemm_nt` with a given as (K, M) and b as (K, N), of any strides.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((64, 8), (64, 32), (8, 32)))
    >>> deep_gemm.bf16_gemm_tn(a, b, d)
    """
    dense.bf16(a, b, d, c, compiled_dims, alpha, epilogue, "tn")


def bf16_gemm_tt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`bf16_gemm_nt` with a given as (K, M), of any strides.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((64, 8), (32, 64), (8, 32)))
    >>> deep_gemm.bf16_gemm_tt(a, b, d)
    """
    dense.bf16(a, b, d, c, compiled_dims, alpha, epilogue, "tt")


def fp16_gemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`bf16_gemm_nt` for float16: a and b are float16, d and c float16 or float32. Sums past 65504 are infinite in a
    float16 d.

    >>> a, b, d = (torch.ones(*shape).half() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.fp16_gemm_nt(a, b, d)
    """
    dense.fp16(a, b, d, c, compiled_dims, alpha, epilogue, "nt")


def fp16_gemm_nn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp16_gemm_nt` with b given as (K, N), of any strides.

    >>> a, b, d = (torch.ones(*shape).half() for shape in ((8, 64), (64, 32), (8, 32)))
    >>> deep_gemm.fp16_gemm_nn(a, b, d)
    """
    dense.fp16(a, b, d, c, compiled_dims, alpha, epilogue, "nn")


def fp16_gemm_tn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp16_gemm_nt` with a given as (K, M) and b as (K, N), of any strides.

    >>> a, b, d = (torch.ones(*shape).half() for shape in ((64, 8), (64, 32), (8, 32)))
    >>> deep_gemm.fp16_gemm_tn(a, b, d)
    """
    dense.fp16(a, b, d, c, compiled_dims, alpha, epilogue, "tn")


def fp16_gemm_tt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    alpha: float | Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """`fp16_gemm_nt` with a given as (K, M), of any strides.

    >>> a, b, d = (torch.ones(*shape).half() for shape in ((64, 8), (32, 64), (8, 32)))
    >>> deep_gemm.fp16_gemm_tt(a, b, d)
    """
    dense.fp16(a, b, d, c, compiled_dims, alpha, epilogue, "tt")
