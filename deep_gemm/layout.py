"""Layouts of scale factors, and conversions to the layout that the kernels read.

The kernels read the scales of A column by column through TMA. This layout is called MN-major: stride 1 along rows, and
each column starts at a multiple of 16 bytes. Scales of B are read with any strides. This module also has the alignment
of groups in contiguous grouped layouts, which callers need when they lay out tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops import checks
from deep_gemm.ops.cast_reference import pack_exponents
from deep_gemm.ops.layouts import TMA_BYTES
from deep_gemm.ops.scales import check_granularities
from deep_gemm.ops.transpose_scales import transpose_scales
from deep_gemm.settings import settings
from deep_gemm.spec import SCALE_BLOCK, align, ceil_div
from deep_gemm.tensors import check_tensor, is_traced

__all__ = [
    "align",
    "ceil_div",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]

_mk_alignment = checks.DEFAULT_ALIGNMENT


def get_mk_alignment_for_contiguous_layout() -> int:
    """In a contiguous grouped layout each group starts at a multiple of this many rows; 128 unless set otherwise.

    >>> deep_gemm.get_mk_alignment_for_contiguous_layout()
    128
    """
    return _mk_alignment


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Set the alignment of groups for the whole process.

    Raises:
        InvalidInputError: not a positive multiple of 16, or above 2^30, which kernels cannot count with.

    >>> deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    >>> deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    """
    global _mk_alignment
    _mk_alignment = checks.check_alignment(alignment)


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The alignment to choose for ``expected_m`` rows in ``num_groups`` groups: 128, the tile that suits all sizes.

    >>> deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=30, num_groups=8)
    128
    """
    return checks.DEFAULT_ALIGNMENT


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The number of elements, at least ``x``, whose size in bytes is a multiple of 16.

    ``element_size`` is in bytes and must divide 16.

    >>> deep_gemm.get_tma_aligned_size(5, element_size=4)
    8
    """
    if not isinstance(element_size, int) or element_size not in (1, 2, 4, 8, 16):
        raise InvalidInputError(f"element_size must be 1, 2, 4, 8 or 16 bytes, but it is {checks.shown(element_size)}.")
    return align(x, TMA_BYTES // element_size)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Scales with the same shape and values, MN-major, each column padded to a multiple of 16 bytes.

    Args:
        sf: float32, (mn, columns) or (groups, mn, columns), of any strides.

    Returns:
        A tensor of the same shape with strides (1, align(mn, 4)), or (align(mn, 4) * columns, 1, align(mn, 4)) with
        groups. ``sf`` itself if it has these strides already. On a GPU it is written on the current stream.

    Raises:
        InvalidInputError: wrong dtype or rank.
        UnsupportedError: on a GPU without kernels, unless DG_FALLBACK lets torch do it.

    >>> deep_gemm.get_mn_major_tma_aligned_tensor(torch.ones(6, 2)).stride()
    (1, 8)
    """
    _check_scales(sf)
    strides = _mn_major_strides(sf)
    # What is traced has no address. Products check it, and transpose scales that TMA cannot read.
    if sf.stride() == strides and (is_traced([sf]) or sf.data_ptr() % TMA_BYTES == 0):
        return sf
    if sf.is_cuda:
        try:
            return transpose_scales(sf)
        except UnsupportedError:
            if not settings.fallback:
                raise
    out = torch.empty_strided(sf.shape, strides, dtype=sf.dtype, device=sf.device)
    return out.copy_(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """The exponents of scales that are powers of two, four to an int32, as GPUs after Hopper read them.

    Args:
        sf: float32, (mn, columns) or (groups, mn, columns), with any strides. Only exponents are kept.
        psum_layout: accepted for callers that also run on newer hardware. Padding rows are packed like any other.

    Returns:
        int32, (mn, ceil(columns / 4)) or (groups, mn, ceil(columns / 4)), MN-major, each column padded to a multiple of
        16 bytes. Byte i of element j is the biased exponent of column 4 j + i, or 0 if there is no such column.
        `fp8_gemm_nt` and its forms in groups along M take such scales on other GPUs than Hopper.

    Raises:
        InvalidInputError: wrong dtype or rank.

    >>> deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(6, 4)).shape
    torch.Size([6, 1])
    """
    _check_scales(sf)
    mn, columns = sf.shape[-2:]
    packed = pack_exponents(torch.nn.functional.pad(sf, (0, -columns % 4)))
    out = torch.zeros((*packed.shape[:-2], packed.shape[-1], align(mn, 4)), dtype=torch.int32, device=sf.device)
    out[..., :mn] = packed.mT
    return out.mT[..., :mn, :]


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor,
    grouped_layout: Tensor | None,
    ks_cpu: Any = None,
    gran_k: int = SCALE_BLOCK,
    k_alignment: int | None = None,
    use_psum_layout: bool = False,
    use_padded_sf_layout: bool = False,
    *,
    ks: Any = None,
) -> Tensor:
    """The exponents of the scales of groups along K, four to an int32, as GPUs after Hopper read them.

    Args:
        sf: float32, (sum of k / gran_k over groups, mn): one group's scales after the other's. Only exponents are kept.
        grouped_layout: accepted for callers that also run on newer hardware.
        ks_cpu: the K of each group, a list or a tuple of multiples of ``gran_k``.
        gran_k: elements of K that share a scale.
        k_alignment, use_psum_layout, use_padded_sf_layout: None or any number, False and False. Other layouts are for
            GPUs after Hopper.
        ks: another name of ks_cpu.

    Returns:
        int32, (sum of ceil(k / (4 gran_k)) over groups, mn), contiguous along mn, each row padded to a multiple of 16
        bytes. A group's first four scales are in its first row; missing ones are 0. No kernel for Hopper takes such
        scales.

    Raises:
        InvalidInputError: a wrong dtype, rank, or number of scales.
        UnsupportedError: another layout.

    >>> sf = torch.ones(6, 8)
    >>> deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [256, 512], gran_k=128).shape
    torch.Size([2, 8])
    """
    _check_scales(sf)
    if use_psum_layout or use_padded_sf_layout:
        raise UnsupportedError(
            "use_psum_layout and use_padded_sf_layout must be False: such scales are for GPUs after Hopper. Pass the K "
            "of each group as ks_cpu."
        )
    (gran_k,) = check_granularities("gran_k", (gran_k,), 1)
    ks_cpu = ks_cpu if ks is None else checks.one_of_two("ks_cpu", ks_cpu, "ks", ks)
    what = f"a list of multiples of gran_k = {gran_k} whose sum is {gran_k} times the rows of sf"
    ks_cpu = checks.check_group_sizes(ks_cpu, what)
    if sf.dim() != 2 or sf.shape[0] * gran_k != sum(ks_cpu) or any(k % gran_k for k in ks_cpu):
        raise InvalidInputError(
            f"ks_cpu must be {what}, but they are {ks_cpu!r}, and sf has the shape {tuple(sf.shape)}."
        )
    groups = sf.split([k // gran_k for k in ks_cpu])
    packed = [get_mn_major_tma_aligned_packed_ue8m0_tensor(group.t()).t() for group in groups if len(group)]
    rows, mn = sum(group.shape[0] for group in packed), sf.shape[1]
    out = torch.zeros((rows, align(mn, 4)), dtype=torch.int32, device=sf.device)[:, :mn]
    return torch.cat(packed, out=out) if packed else out


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Any,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Convert scales to the layout that kernels on Hopper read without a copy. Call it when weights are loaded.

    Args:
        sf: float32, (ceil(mn / gran_mn), ceil(k / gran_k)), with ``num_groups`` in front if that is given.
        mn, k: the sizes of the operand that the scales belong to.
        recipe: (gran_m, gran_n, gran_k), of which ``is_sfa`` picks gran_m (True) or gran_n (False) as gran_mn; or
            (gran_mn, gran_k), with ``is_sfa`` left out.
        disable_ue8m0_cast, psum_layout: accepted for callers that also run on newer hardware. Here scales stay float32,
            whatever their values, and padding rows are converted like any other.

    Returns:
        Per-row scales in the layout of `get_mn_major_tma_aligned_tensor`; scales of 128 x 128 blocks, and int32 of
        `get_mn_major_tma_aligned_packed_ue8m0_tensor`, unchanged.

    Raises:
        InvalidInputError: the shape or an argument is wrong.
        UnsupportedError: packed UE8M0 scales of blocks, or granularities other than (1, 128) and (128, 128).

    >>> sf = torch.ones(6, 2)
    >>> deep_gemm.transform_sf_into_required_layout(sf, 6, 256, (1, 128)).stride()
    (1, 8)
    """
    gran_mn, gran_k = _granularity(recipe, is_sfa)
    check_tensor("sf", sf, by_torch=True)
    packed = sf.dtype == torch.int32
    if packed and gran_mn != 1:
        raise UnsupportedError("sf is torch.int32, packed UE8M0 scales, which are those of rows. Pass torch.float32.")
    if sf.dtype != torch.float32 and not packed:
        raise InvalidInputError(f"sf must be torch.float32, but it is {sf.dtype}.")
    if gran_k != SCALE_BLOCK or gran_mn not in (1, SCALE_BLOCK):
        raise UnsupportedError(
            f"scales of blocks of {gran_mn} x {gran_k} are not supported on Hopper: only 1 x {SCALE_BLOCK} and "
            f"{SCALE_BLOCK} x {SCALE_BLOCK} are."
        )
    groups = () if num_groups is None else (num_groups,)
    expected = (*groups, ceil_div(mn, gran_mn), ceil_div(k, 4 * gran_k if packed else gran_k))
    if tuple(sf.shape) != expected:
        raise InvalidInputError(
            f"sf must have the shape {expected} for mn = {mn}, k = {k}, blocks of {gran_mn} x {gran_k} and "
            f"num_groups = {num_groups}, but it has {tuple(sf.shape)}."
        )
    return sf if packed or gran_mn != 1 else get_mn_major_tma_aligned_tensor(sf)


def _check_scales(sf: Any) -> None:
    if isinstance(sf, (tuple, list)):
        raise InvalidInputError(f"sf is a {type(sf).__name__}. Pass the scales alone, the second of a pair.")
    check_tensor("sf", sf, (2, 3), by_torch=True)
    if sf.dtype != torch.float32:
        raise InvalidInputError(f"sf must be a torch.float32 tensor, but it is {sf.dtype}. Pass .float().")


def _granularity(recipe: Any, is_sfa: bool | None) -> tuple[int, int]:
    if isinstance(recipe, (tuple, list)) and len(recipe) == 2:
        if is_sfa is not None:
            raise InvalidInputError("is_sfa must be left out with a recipe of two numbers, which says it already.")
        gran_mn, gran_k = check_granularities("recipe", recipe, 2)
        return gran_mn, gran_k
    gran_m, gran_n, gran_k = check_granularities("recipe", recipe, 3)
    if not isinstance(is_sfa, bool):
        raise InvalidInputError(
            "is_sfa must be True or False with a recipe of three numbers, to choose between gran_m and gran_n, but it "
            f"is {checks.shown(is_sfa)}."
        )
    return (gran_m if is_sfa else gran_n), gran_k


def _mn_major_strides(sf: Tensor) -> tuple[int, ...]:
    mn, columns = sf.shape[-2:]
    aligned = get_tma_aligned_size(mn, sf.element_size())
    return (1, aligned) if sf.dim() == 2 else (aligned * columns, 1, aligned)
