"""Grouped GEMMs: the products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .layout import get_mk_alignment_for_contiguous_layout
from .ops import k_grouped, m_grouped
from .ops.epilogue import Epilogue


def m_grouped_fp8_gemm_nt_contiguous(
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
    """``d[rows of g] = (a[rows of g] * scales) @ (b[g] * scales)^T`` for each group g.

    A group is, for example, an expert and its tokens. The rows of all groups are in one matrix. A group's rows are
    consecutive. They begin at a multiple of `get_mk_alignment_for_contiguous_layout` rows, 128 unless set otherwise.
    Groups may be empty.

    Args:
        a: (M, K) E4M3 and its float32 scales, (M, ceil(K / 128)). K is contiguous and a multiple of 16. Rows are
            16-byte aligned, with any stride. Scales may have any strides; those from `get_mn_major_tma_aligned_tensor`,
            and slices of them, are read without a copy. Others cost a launch.
        b: (G, N, K) E4M3 and its float32 scales, (G, ceil(N / 128), ceil(K / 128)), with any strides. K is contiguous,
            and each group lies right after the one before.
        d: (M, N) bfloat16, row-major, with any row stride; written in place.
        grouped_layout: int32, contiguous, on the device of the other tensors. It is read on the device, when the kernel
            runs, so a CUDA graph can be replayed with other groups. On a GPU, only DG_CHECK=1 checks what it says.

            - The index form: (M,), the group of each row, or -1 for padding. Padding may be anywhere, but the rows of a
              group follow each other: on average, 64 rows or more of padding alone may interrupt a group once.
            - The psum form: (G,), the end row of each group, without padding. A group begins where the previous one
              ends, rounded up to the alignment. The end of an empty group is its own start, or the end before it.
        recipe: None or (1, 128, 128): the rows of a, the rows of b and the K that share a scale. Or (1, 1, 128) with
            int32 scales, as in `fp8_gemm_nt`: those of b are (G, N, ceil(K / 512)).
        recipe_a, recipe_b: the same as pairs, (1, 128) and (128, 128).
        compiled_dims: sizes to compile into the kernel, letters of "mnk". With None the library decides: it compiles
            none in, so that one kernel serves all shapes.
        disable_ue8m0_cast: no effect on Hopper, where scales stay float32 whatever their values.
        use_psum_layout: whether grouped_layout has the psum form.
        ensure_zero_padding: no effect on Hopper.
        expected_m_for_psum_layout: None, or an estimate of the rows of a group in the psum form. No effect.
        epilogue: None, or what is done with sums before they are rounded: see `Epilogue`.

    Rows with the label -1 are written, with zeros or with a result of their own; do not use them. In the psum form,
    rows between the end of a group and the next start may be written, and rows past the last group's aligned end are
    not. Rows of padding in a and its scales may hold anything, NaN too: they reach no other row.

    Results are bitwise repeatable. A row has the same bits whatever rows are beside it, and in every form. M = 0, N = 0
    or G = 0 does nothing. Tensors on the CPU are multiplied by the reference implementation. Before a call inside
    CUDA-graph capture, the shape must have been called once outside of it.

    The previous kernel or copy in the stream may write any operand, whatever library it belongs to. Only if both
    tensors of ``b`` were given to `declare_constant` are they read before that kernel has finished.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.

    >>> a = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(256, 1)
    >>> b = torch.ones(2, 64, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, torch.empty(256, 64).bfloat16(), labels)
    """
    if expected_m_for_psum_layout is not None:
        m_grouped.check_psum_estimate(expected_m_for_psum_layout, use_psum_layout)
    alignment = get_mk_alignment_for_contiguous_layout()
    options = recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, use_psum_layout
    m_grouped.fp8(a, b, d, grouped_layout, *options, epilogue, alignment, "nt")


def m_grouped_fp8_gemm_nn_contiguous(
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
    epilogue: Epilogue | None = None,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` with b given as (G, K, N), and its scales transposed likewise.

    b must be a transposed view of K-major storage, ``x.transpose(1, 2)``: Hopper's FP8 needs K contiguous in memory.

    Raises:
        UnsupportedError: also if N is contiguous in b.

    >>> a = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(256, 1)
    >>> b = torch.ones(2, 64, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, [part.mT for part in b], torch.empty(256, 64).bfloat16(), labels)
    """
    alignment = get_mk_alignment_for_contiguous_layout()
    options = recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, use_psum_layout
    m_grouped.fp8(a, b, d, grouped_layout, *options, epilogue, alignment, "nn")


def m_grouped_fp8_gemm_nt_masked(
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
    """``d[g, :m] = (a[g, :m] * scales) @ (b[g] * scales)^T`` with ``m = masked_m[g]``, for each group g.

    Each group has room for max_m rows, of which the first ones exist. How many is known on the device only, as when
    tokens are decoded in a CUDA graph.

    Args:
        a: (G, max_m, K) E4M3 and its float32 scales, (G, max_m, ceil(K / 128)). K is contiguous and a multiple of 16.
            Rows are 16-byte aligned, and each group lies right after the one before. Scales may have any strides; those
            from `get_mn_major_tma_aligned_tensor` are read without a copy. Others cost a launch.
        b: (G, N, K) E4M3 and its float32 scales, (G, ceil(N / 128), ceil(K / 128)), with any strides. K is contiguous,
            and each group lies right after the one before.
        d: (G, max_m, N) bfloat16, row-major, each group right after the one before; written in place.
        masked_m: (G,) int32, contiguous, on the device of the other tensors: the number of rows of each group, from 0
            to max_m. It is read when the kernel runs, so a CUDA graph can be replayed with other numbers. On a GPU,
            only DG_CHECK=1 checks them.
        expected_m: an estimate of the rows of a group, positive. It guides the choice of a kernel and nothing else: a
            wrong estimate is slow, and the result right.
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, epilogue: see `m_grouped_fp8_gemm_nt_contiguous`.
        enable_overlap, max_block_n, signal: must be left out in this version.

    Rows of d past masked_m are not written. Those of a and its scales may hold anything, NaN too.

    Results are bitwise repeatable. A row has the same bits as by `m_grouped_fp8_gemm_nt_contiguous`. max_m = 0, N = 0
    or G = 0 does nothing. Tensors on the CPU, capture in CUDA graphs and the order in the stream: see there.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.

    >>> a = torch.ones(2, 96, 128).to(torch.float8_e4m3fn), torch.ones(2, 96, 1)
    >>> b = torch.ones(2, 64, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> rows, d = torch.tensor([5, 60], dtype=torch.int32), torch.empty(2, 96, 64).bfloat16()
    >>> deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, rows, expected_m=32)
    """
    if enable_overlap or max_block_n is not None or signal is not None:
        m_grouped.refuse_overlap()
    expected_m = m_grouped.check_expected_m("expected_m", expected_m)
    options = recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    m_grouped.fp8_masked(a, b, d, masked_m, expected_m, *options, epilogue)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str | None = None,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """``d[rows of g] = a[rows of g] @ b[g]^T`` of bfloat16, for each group g.

    Args:
        a: (M, K) bfloat16, K contiguous.
        b: (G, N, K) bfloat16. K is contiguous, or N is, and then K is a multiple of 64. Each group lies right after the
            one before.
        d: (M, N) bfloat16, row-major, with any row stride; written in place.

    The address of a and of b, and the stride from row to row, are multiples of 16 bytes. Sums are float32. Everything
    else is as in `m_grouped_fp8_gemm_nt_contiguous`: the other arguments, padding, the same bits, errors.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((256, 64), (2, 32, 64), (256, 32)))
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, labels)
    """
    if expected_m_for_psum_layout is not None:
        m_grouped.check_psum_estimate(expected_m_for_psum_layout, use_psum_layout)
    alignment = get_mk_alignment_for_contiguous_layout()
    m_grouped.bf16(a, b, d, grouped_layout, compiled_dims, use_psum_layout, epilogue, alignment, "nt")


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str | None = None,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    epilogue: Epilogue | None = None,
) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous` with b given as (G, K, N). If N is contiguous, as in a tensor that is not a
    view, K is a multiple of 64 (otherwise `UnsupportedError`).

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((256, 64), (2, 64, 32), (256, 32)))
    >>> labels = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, b, d, labels)
    """
    alignment = get_mk_alignment_for_contiguous_layout()
    m_grouped.bf16(a, b, d, grouped_layout, compiled_dims, use_psum_layout, epilogue, alignment, "nn")


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    compiled_dims: str | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """``d[g, :m] = a[g, :m] @ b[g]^T`` of bfloat16, with ``m = masked_m[g]``, for each group g.

    Args:
        a: (G, max_m, K) bfloat16, K contiguous, each group right after the one before.
        b: (G, N, K) bfloat16, as in `m_grouped_bf16_gemm_nt_contiguous`.
        d: (G, max_m, N) bfloat16, row-major, each group right after the one before; written in place.

    The address of a and of b, and the stride from row to row, are multiples of 16 bytes. Sums are float32. Everything
    else is as in `m_grouped_fp8_gemm_nt_masked`: the other arguments, rows past masked_m, the same bits, errors.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((2, 96, 64), (2, 32, 64), (2, 96, 32)))
    >>> deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, torch.tensor([5, 60], dtype=torch.int32), expected_m=32)
    """
    expected_m = m_grouped.check_expected_m("expected_m", expected_m)
    m_grouped.bf16_masked(a, b, d, masked_m, expected_m, compiled_dims, epilogue)


m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


def k_grouped_fp8_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = k_grouped.RECIPE,
    compiled_dims: str | None = None,
    use_psum_layout: bool = False,
    use_padded_sf_layout: bool = False,
    epilogue: Any = None,
    *,
    ks: Sequence[int] | Tensor | None = None,
    ks_tensor: Tensor | None = None,
) -> None:
    """``d[g] = (c[g] +) (A_g * scales) @ (B_g * scales)^T`` for each group g: the weight gradients of experts.

    Args:
        a: E4M3 and its float32 scales. The values are the groups' matrices, one after the other, each K-major and (M,
            K_g). The tensor is contiguous and may have any shape. K_g is a multiple of 16; groups may be empty. The
            scales are (M, blocks), one for each row and 128 of K, with any strides; a group's begin with a new block.
        b: the same for matrices (N, K_g), with scales (N, blocks).
        d: (G, M, N) float32 or bfloat16, row-major, each group right after the one before; written in place.
        ks_cpu: K of each group, a list or tuple. It may be left out if ``grouped_layout`` is given.
        grouped_layout: the same as int32 (G,) on the device. It is read there when the kernel runs, so a CUDA graph can
            be replayed with other sizes; on a GPU, only DG_CHECK=1 checks them. Without it the list is copied, which
            waits for the GPU.
        c: None, or what is added: of d's dtype and shape. It may be d itself; otherwise it shares no memory with d. An
            empty group gives c, or zeros.
        recipe: (1, 1, 128); or (1, 128, 128), the mixed recipe: b has one scale for 128 x 128 values, of shape
            (ceil(N / 128), blocks). Its products take less time, and `quantize.blocks_transposed` casts for it.
        compiled_dims: sizes to compile into the kernel, letters of "mn".
        use_psum_layout: not supported.
        use_padded_sf_layout: must be False, and epilogue None.
        ks, ks_tensor: other names of ks_cpu and grouped_layout.

    Tensors on the CPU are multiplied by the reference implementation. See `fp8_gemm_nt` for streams and captures.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError, CompileError, DriverError: see `fp8_gemm_nt`.

    >>> a = torch.ones(16, 256).to(torch.float8_e4m3fn), torch.ones(16, 2)
    >>> b = torch.ones(32, 256).to(torch.float8_e4m3fn), torch.ones(32, 2)
    >>> sizes = torch.tensor([128, 128], dtype=torch.int32)
    >>> deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, torch.empty(2, 16, 32), [128, 128], sizes)
    """
    if grouped_layout is None or ks_cpu is not None or ks is not None or ks_tensor is not None or use_psum_layout:
        grouped_layout = k_grouped.sizes(a, d, ks_cpu, grouped_layout, ks, ks_tensor, use_psum_layout, 16)
    if recipe is not k_grouped.RECIPE:  # a warm call cannot tell 1.0 from 1
        k_grouped.check_recipe(recipe)
    k_grouped.fp8(a, b, d, grouped_layout, c, recipe, compiled_dims, use_padded_sf_layout, epilogue)


def k_grouped_fp8_gemm_nt_padded(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    recipe: tuple[int, int, int] = k_grouped.RECIPE,
) -> None:
    """``d[g] = (c[g] +) (A_g * scales) @ (B_g * scales)^T`` for each group g, where all A_g are parts of one matrix.

    `quantize.columns` and `quantize.rows_and_columns` write such operands from rows whose groups begin at multiples of
    128, as in `m_grouped_fp8_gemm_nt_contiguous`. So nothing is copied. DeepGEMM has no such function.

    Args:
        a: (M, K) E4M3 and its float32 scales, (M, ceil(K / 128)), one for each row and 128 of K. K is contiguous; rows
            are 16-byte aligned, with any stride. Scales have any strides. A_g are the columns of group g: they begin
            where the previous group ends, rounded up to a multiple of 128. Other columns may hold anything.
        b: (N, K) and (N, ceil(K / 128)), likewise.
        grouped_layout: int32 (G,) on the device of the other tensors: K of each group, any numbers from 0 on. It is
            read when the kernel runs, so a CUDA graph can be replayed with other sizes.

    The other arguments and errors are those of `k_grouped_fp8_gemm_nt_contiguous`.

    >>> (a, b), d = (deep_gemm.quantize.columns(torch.ones(256, n)) for n in (16, 32)), torch.empty(2, 16, 32)
    >>> deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, torch.tensor([128, 128], dtype=torch.int32))
    """
    if recipe is not k_grouped.RECIPE:
        k_grouped.check_recipe(recipe)
    k_grouped.padded(a, b, d, grouped_layout, c, compiled_dims, recipe)


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str | None = None,
    use_psum_layout: bool = False,
    epilogue: Any = None,
    *,
    ks: Sequence[int] | Tensor | None = None,
    ks_tensor: Tensor | None = None,
) -> None:
    """``d[g] = (c[g] +) A_g^T @ B_g`` for each group g: the weight gradients of experts.

    Args:
        a: (K, M) bfloat16, the groups' rows one after the other. Rows are contiguous and 16-byte aligned. Groups may
            have any number of rows, or none.
        b: (K, N) bfloat16, likewise.

    The other arguments and errors are those of `k_grouped_fp8_gemm_nt_contiguous`.

    >>> a, b, d = torch.ones(64, 16).bfloat16(), torch.ones(64, 32).bfloat16(), torch.empty(2, 16, 32)
    >>> deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, [40, 24], torch.tensor([40, 24], dtype=torch.int32))
    """
    if grouped_layout is None or ks_cpu is not None or ks is not None or ks_tensor is not None or use_psum_layout:
        grouped_layout = k_grouped.sizes(a, d, ks_cpu, grouped_layout, ks, ks_tensor, use_psum_layout)
    k_grouped.bf16(a, b, d, grouped_layout, c, compiled_dims, epilogue)
