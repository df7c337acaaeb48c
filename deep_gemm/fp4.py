"""Products of MXFP4 weights with activations in FP8 and in BF16.

``b`` is a pair (packed, scales), as checkpoints have it and as `quantize.mxfp4` returns it, or what
`transform_fp4_weights` made of it once, at load. Weights as they are in a checkpoint are transformed in each call: that
takes several times as long as the product and ten times the memory of a group's weights, and is there for trying out.
Nothing is kept. With transformed weights a model keeps 4.125 bits a weight, or 4.25 where exponents need 8 bits.

Kernels are made for few rows a group, where reading weights takes the time. Any number of rows is right. With many
rows a group, products of weights that `quantize.mxfp4_to_fp8` cast at load may be faster; they use twice the memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .dense import fp8_gemm_nt
from .grouped import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from .layout import get_mk_alignment_for_contiguous_layout
from .ops import fp4, fp4_weights, m_grouped
from .ops.epilogue import Epilogue
from .ops.fp4_weights import Fp4Weights


def transform_fp4_weights(packed: Tensor, scales: Tensor, activations: str = "fp8") -> Fp4Weights:
    """MXFP4 weights in the order in which kernels read them, once for a model: the b of this module's products.

    Args:
        packed: (..., N, K / 2) uint8 or int8, the even k in the low four bits; or (..., N, K / 32, 16). K is a multiple
            of 32. Weights of experts have their group in front.
        scales: (..., N, K / 32) float8_e8m0fnu, uint8 exponents or float32 powers of two; or int32 with four exponents.
        activations: "fp8" for products with FP8, "bf16" for those with BF16. Their kernels read different orders.

    Returns:
        A pair of tensors, to be saved and loaded as they are: ``packed`` (..., ceil(N / 64), ceil(K / 128), bytes) and
        ``factors`` (..., 64 ceil(N / 64)) float32. No weight is rounded. Where the exponents of a row span at most 15,
        in all rows of all groups, a weight takes 4.125 bits. Otherwise, or with a NaN, it takes 4.25, and products take
        longer.

    Computed by torch, on the device of the tensors, one matrix after the other.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.

    >>> weights = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(64, 256)))
    >>> weights.packed.shape, weights.factors.shape
    (torch.Size([1, 2, 4224]), torch.Size([64]))
    """
    return fp4_weights.transform(packed, scales, activations)


def fp8_fp4_gemm_nt(
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
    """``d = (a * scales) @ b^T`` with b in MXFP4. If b is FP8 with its scales, this is `fp8_gemm_nt`.

    Args:
        a: (M, K) E4M3 and its float32 scales, (M, ceil(K / 128)). K is contiguous and a multiple of 32. Rows are
            16-byte aligned, with any stride. Scales may have any strides; those from `get_mn_major_tma_aligned_tensor`
            are read without a copy. Others cost a launch.
        b: (N, K), a pair of `transform_fp4_weights` for "fp8", or MXFP4 as it takes it.
        d: (M, N) bfloat16, row-major, with any row stride; written in place.
        recipe_a, recipe_b: None, or (1, 128) and (1, 32).
        compiled_dims, disable_ue8m0_cast: no effect.
        c, recipe, alpha, epilogue: for FP8 weights only.

    Sums are float32, and those of each 128 of K are promoted, as in `fp8_gemm_nt`; so results differ from those on
    weights of `quantize.mxfp4_to_fp8` by the order of sums only. They are bitwise repeatable. M = 0 or N = 0 does
    nothing. Tensors on the CPU are multiplied by the reference implementation. Streams, captures in CUDA graphs, and
    `declare_constant` of both tensors of b: see `fp8_gemm_nt`.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError, CompileError, DriverError: see `fp8_gemm_nt`.

    >>> a = torch.ones(16, 256).to(torch.float8_e4m3fn), torch.ones(16, 2)
    >>> weights = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(64, 256)))
    >>> deep_gemm.fp8_fp4_gemm_nt(a, weights, torch.empty(16, 64).bfloat16())
    """
    if not fp4.is_fp4(b):
        fp8_gemm_nt(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha, epilogue)
        return
    fp4.check_options(recipe, recipe_a, recipe_b, c=c, alpha=alpha, epilogue=epilogue)
    fp4.fp8(a, fp4.prepared(b, "fp8", grouped=False), d)


def bf16_fp4_gemm_nt(a: Tensor, b: tuple[Tensor, Tensor], d: Tensor) -> None:
    """``d = a @ b^T`` with b in MXFP4 and a in bfloat16.

    Weights are decoded exactly, so results are those of `bf16_gemm_nt` on dequantised weights, but for the order of
    sums. Exponents that BF16 does not have are right too.

    Args:
        a: (M, K) bfloat16, K contiguous and a multiple of 32. Rows are 16-byte aligned, with any stride.
        b: (N, K), a pair of `transform_fp4_weights` for "bf16", or MXFP4 as it takes it.
        d: (M, N) bfloat16, row-major, with any row stride; written in place.

    Everything else is as in `fp8_fp4_gemm_nt`.

    >>> weights = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(64, 256)), "bf16")
    >>> deep_gemm.bf16_fp4_gemm_nt(torch.ones(16, 256).bfloat16(), weights, torch.empty(16, 64).bfloat16())
    """
    fp4.bf16(a, fp4.prepared(b, "bf16", grouped=False), d)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """``d[rows of g] = (a[rows of g] * scales) @ b[g]^T`` with b (G, N, K) in MXFP4, for each group g.

    a, d, ``grouped_layout`` and ``use_psum_layout`` are as in `m_grouped_fp8_gemm_nt_contiguous`, which this is if b is
    FP8, with K a multiple of 32. b and the other arguments are as in `fp8_fp4_gemm_nt`.

    >>> a = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(256, 1)
    >>> b = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(2, 64, 128)))
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, torch.empty(256, 64).bfloat16(), labels)
    """
    if not fp4.is_fp4(b):
        options = recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, use_psum_layout, ensure_zero_padding
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, *options, expected_m_for_psum_layout, epilogue)
        return
    fp4.check_options(recipe, recipe_a, recipe_b, epilogue=epilogue)
    m_grouped.check_psum_estimate(expected_m_for_psum_layout, use_psum_layout)
    weights = fp4.prepared(b, "fp8", grouped=True)
    fp4.fp8_contiguous(a, weights, d, grouped_layout, use_psum_layout, get_mk_alignment_for_contiguous_layout())


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
    epilogue: Epilogue | None = None,
    *,
    enable_overlap: bool = False,
    max_block_n: int | None = None,
    signal: Any = None,
) -> None:
    """``d[g, :m] = (a[g, :m] * scales) @ b[g]^T`` with ``m = masked_m[g]`` and b (G, N, K) in MXFP4, for each group g.

    a, d, ``masked_m`` and ``expected_m`` are as in `m_grouped_fp8_gemm_nt_masked`, which this is if b is FP8, with K a
    multiple of 32. b and the other arguments are as in `fp8_fp4_gemm_nt`.

    >>> a = torch.ones(2, 96, 128).to(torch.float8_e4m3fn), torch.ones(2, 96, 1)
    >>> b = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(2, 64, 128)))
    >>> rows, d = torch.tensor([5, 60], dtype=torch.int32), torch.empty(2, 96, 64).bfloat16()
    >>> deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, rows, expected_m=32)
    """
    if not fp4.is_fp4(b):
        options = recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, epilogue
        overlap = {"enable_overlap": enable_overlap, "max_block_n": max_block_n, "signal": signal}
        m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m, *options, **overlap)
        return
    if enable_overlap or max_block_n is not None or signal is not None:
        m_grouped.refuse_overlap()
    fp4.check_options(recipe, recipe_a, recipe_b, epilogue=epilogue)
    fp4.fp8_masked(a, fp4.prepared(b, "fp8", grouped=True), d, masked_m, fp4.expected_m(expected_m))


def m_grouped_bf16_fp4_gemm_nt_contiguous(
    a: Tensor, b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor, use_psum_layout: bool = False
) -> None:
    """``d[rows of g] = a[rows of g] @ b[g]^T`` with a in bfloat16 and b (G, N, K) in MXFP4, for each group g.

    a, d and ``grouped_layout`` are as in `m_grouped_bf16_gemm_nt_contiguous`, b as in `bf16_fp4_gemm_nt`.

    >>> b = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(2, 64, 128)), "bf16")
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> a, d = torch.ones(256, 128).bfloat16(), torch.empty(256, 64).bfloat16()
    >>> deep_gemm.m_grouped_bf16_fp4_gemm_nt_contiguous(a, b, d, labels)
    """
    weights = fp4.prepared(b, "bf16", grouped=True)
    fp4.bf16_contiguous(a, weights, d, grouped_layout, use_psum_layout, get_mk_alignment_for_contiguous_layout())


def m_grouped_bf16_fp4_gemm_nt_masked(
    a: Tensor, b: tuple[Tensor, Tensor], d: Tensor, masked_m: Tensor, expected_m: int
) -> None:
    """``d[g, :m] = a[g, :m] @ b[g]^T`` with ``m = masked_m[g]``, a in bfloat16 and b in MXFP4, for each group g.

    a, d, ``masked_m`` and ``expected_m`` are as in `m_grouped_bf16_gemm_nt_masked`, b as in `bf16_fp4_gemm_nt`.

    >>> b = deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.ones(2, 64, 128)), "bf16")
    >>> a, d, rows = torch.ones(2, 8, 128).bfloat16(), torch.empty(2, 8, 64).bfloat16(), torch.tensor([5, 8]).int()
    >>> deep_gemm.m_grouped_bf16_fp4_gemm_nt_masked(a, b, d, rows, expected_m=8)
    """
    fp4.bf16_masked(a, fp4.prepared(b, "bf16", grouped=True), d, masked_m, fp4.expected_m(expected_m))
