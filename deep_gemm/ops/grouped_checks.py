"""Checks of the arguments of grouped GEMMs.

Kernels see the matrices of all groups as one matrix, one below the other. A tensor with a group in front therefore has
its groups right after one another.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError, UnsupportedError
from ..spec import SCALE_BLOCK, Major, align, ceil_div
from . import checks
from .checks import MAX_SIZE, TMA_BYTES, shape_of
from .fp8_checks import BLOCKS, FP4_CARRIERS, check_recipe, check_scales_dtype

MAJOR_K_MULTIPLE = 64
"""If N of a 16-bit B is contiguous, K is a multiple of the kernels' steps, so that none reads rows of two groups."""


def flat_stride(x: Tensor) -> int | None:
    """Elements from row to row of x (rows, columns), or of x (groups, rows, columns) as one matrix of all rows. None if
    its columns are not contiguous, its rows overlap, or its groups do not lie right after one another."""
    groups, rows, columns = x.shape if x.dim() == 3 else (1, *x.shape)
    if columns > 1 and x.stride(-1) != 1:
        return None
    if rows > 1:
        stride = x.stride(-2)
        if groups > 1 and x.stride(0) != rows * stride:
            return None
    else:
        stride = x.stride(0) if groups > 1 else align(columns, TMA_BYTES // x.element_size())
    return stride if stride >= columns else None


def flat(x: Tensor) -> Tensor:
    """x as one matrix of all rows, a view. `flat_stride` must not be None."""
    return x.as_strided((x.numel() // max(1, x.shape[-1]), x.shape[-1]), (flat_stride(x) or 0, 1))


def check_expected_m(name: str, expected_m: Any) -> int:
    """An estimate of the rows of a group, rounded up to a power of two, so that few kernels are chosen for the many
    estimates of a server."""
    if isinstance(expected_m, (bool, Tensor)):
        value = 0
    else:
        try:
            value = operator.index(expected_m)
        except TypeError:
            value = 0
    if value < 1:
        raise InvalidInputError(
            f"{name} must be a positive integer, an estimate of the rows of a group, but it is {expected_m!r}."
        )
    return 1 << (value - 1).bit_length()


def check_psum_estimate(expected_m: Any, use_psum_layout: Any) -> None:
    """Check expected_m_for_psum_layout, which has no effect yet."""
    if expected_m is None:
        return
    if not use_psum_layout:
        raise InvalidInputError(
            f"expected_m_for_psum_layout is {expected_m!r}, but use_psum_layout is not set. Leave it out, or pass "
            "use_psum_layout=True and the end row of each group."
        )
    check_expected_m("expected_m_for_psum_layout", expected_m)


def check_1d2d(recipe: Any, recipe_a: Any, recipe_b: Any) -> None:
    """Refuse every recipe except (1, 128, 128)."""
    if check_recipe(recipe, recipe_a, recipe_b) not in (None, BLOCKS):
        given = f"recipe {tuple(recipe)}" if recipe is not None else f"recipe_b {tuple(recipe_b)}"
        raise UnsupportedError(
            f"{given} is not supported by GEMMs grouped by M: only (1, {SCALE_BLOCK}, {SCALE_BLOCK}) is, one scale for "
            f"each row and {SCALE_BLOCK} of K of a, and for each {SCALE_BLOCK} x {SCALE_BLOCK} block of b."
        )


def check_shapes(a: Tensor, b: Tensor, d: Tensor, layout_name: str, layout: Tensor, form: str, psum: bool) -> None:
    """Check the shapes of a (M, K) or (G, max_m, K), of the view b (G, N, K), of d, and of the layout."""
    *leading, rows, k = a.shape
    groups, n, k_of_b = b.shape
    if k != k_of_b:
        given = f"{shape_of(b)} (G, N, K)" if form == "nt" else f"{(groups, k_of_b, n)} (G, K, N)"
        raise InvalidInputError(
            f"a and b must agree in K, but a is {shape_of(a)}, with K as its last dimension, and b is {given}."
        )
    if leading and leading[0] != groups:
        raise InvalidInputError(
            f"a and b must agree in the number of groups, their first dimension, but a is {shape_of(a)} and b has "
            f"{groups} groups."
        )
    if k == 0:
        raise InvalidInputError(f"K must be positive, but a is {shape_of(a)}.")
    wanted = (*leading, rows, n)
    if tuple(d.shape) != wanted:
        raise InvalidInputError(
            f"d must have the shape {wanted}, rows of a by rows of a group of b, but it has {shape_of(d)}."
        )
    per_group = bool(leading) or psum
    length, meaning = (groups, "one number for each group of b") if per_group else (rows, "one label for each row of a")
    if tuple(layout.shape) != (length,):
        hint = ""
        if not leading and layout.shape[0] == (rows if psum else groups):
            hint = f" Layouts of that length are for use_psum_layout={not psum}."
        raise InvalidInputError(
            f"{layout_name} must have the shape {(length,)}, {meaning}, but it has {shape_of(layout)}.{hint}"
        )
    for name, x in (("a", a), ("b", b), ("d", d)):
        total = x.numel() // max(1, x.shape[-1])
        if max(total, groups * k, *x.shape) > MAX_SIZE:
            raise UnsupportedError(
                f"{name} is {shape_of(x)}: more than {MAX_SIZE} rows in all, or a dimension above that, is not "
                "supported. Split the call."
            )


def check_layout(name: str, layout: Tensor) -> None:
    """Refuse a layout that is not contiguous int32."""
    if layout.dtype != torch.int32:
        raise InvalidInputError(f"{name} must be torch.int32, but it is {layout.dtype}. Pass .to(torch.int32).")
    if layout.shape[0] > 1 and layout.stride(0) != 1:
        raise InvalidInputError(f"{name} must be contiguous, but its stride is {layout.stride(0)}. Pass .contiguous().")


def check_output_dtype(d: Tensor) -> None:
    """Refuse a d that is not bfloat16."""
    if d.dtype != torch.bfloat16:
        raise InvalidInputError(
            f"d of a GEMM grouped by M must be torch.bfloat16, but it is {d.dtype}. Pass a bfloat16 d, and cast it "
            "after the call."
        )


def check_values(name: str, x: Tensor, sf: Tensor) -> None:
    """Check the dtypes of an FP8 operand and of its scales."""
    if x.dtype in FP4_CARRIERS:
        raise UnsupportedError(
            f"{name} is {x.dtype}, as packed FP4 operands are: FP4 is not supported by this version or on Hopper. "
            "Pass torch.float8_e4m3fn."
        )
    if x.dtype != torch.float8_e4m3fn:
        raise InvalidInputError(f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}.")
    check_scales_dtype(name, sf)


def check_e4m3(name: str, x: Tensor, sf: Tensor) -> None:
    """Check the dtypes of an FP8 operand and of its scales, and that K is whole pieces of 16 bytes."""
    check_values(name, x, sf)
    if x.shape[-1] % TMA_BYTES:
        raise InvalidInputError(
            f"K must be a multiple of {TMA_BYTES}, because rows of FP8 are read in pieces of {TMA_BYTES} bytes, but it "
            f"is {x.shape[-1]}. Pad a and b with zero columns up to K = {align(x.shape[-1], TMA_BYTES)}."
        )


def check_scale_shapes(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor) -> None:
    """Check the shapes of the scales of a (.., rows, K) and of the view b (G, N, K)."""
    blocks = ceil_div(a.shape[-1], SCALE_BLOCK)
    of_a = (*a.shape[:-1], blocks)
    of_b = (b.shape[0], ceil_div(b.shape[1], SCALE_BLOCK), blocks)
    for name, sf, wanted, meaning in (
        ("a", sfa, of_a, f"one per row per {SCALE_BLOCK} of K of a"),
        ("b", sfb, of_b, f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block of each group of b"),
    ):
        if tuple(sf.shape) != wanted:
            raise InvalidInputError(
                f"the scales of {name} must have the shape {wanted}, {meaning}, but they have {shape_of(sf)}."
            )


def check_k_major(name: str, x: Tensor) -> int:
    """The row stride of all rows of a K-major operand; refuse what TMA cannot read."""
    stride = flat_stride(x)
    if stride is None:
        groups = ", with each group right after the one before" if x.dim() == 3 else ""
        raise InvalidInputError(
            f"{name} must be K-major: K contiguous, rows of their own{groups}. But it is {shape_of(x)} with strides "
            f"{x.stride()}. Pass .contiguous()."
        )
    _check_tma(name, x, stride, "row")
    return stride


def check_fp8_weights(b: Tensor) -> tuple[Major, tuple[int, int]]:
    """The contiguous dimension of the view b (G, N, K) of FP8 values, which must be K, and its strides as one matrix of
    all groups' rows."""
    if flat_stride(b) is None and flat_stride(b.transpose(1, 2)) is not None:
        raise UnsupportedError(
            f"N of b is contiguous, and Hopper multiplies FP8 only where K is: b as (G, N, K) is {shape_of(b)} with "
            f"strides {b.stride()}. Store b K-major, as (G, N, K) contiguous; for the form nn pass .transpose(1, 2) of "
            "that."
        )
    return "k", (check_k_major("b", b), 1)


def check_half_weights(b: Tensor) -> tuple[Major, tuple[int, int]]:
    """The contiguous dimension of the view b (G, N, K) of 16-bit values, and its strides as one matrix of all groups'
    rows."""
    other = flat_stride(b.transpose(1, 2))
    if flat_stride(b) is not None or other is None:
        return "k", (check_k_major("b", b), 1)
    _check_tma("b", b, other, "K")
    if b.shape[2] % MAJOR_K_MULTIPLE:
        raise UnsupportedError(
            f"K must be a multiple of {MAJOR_K_MULTIPLE} if N of b is contiguous, but it is {b.shape[2]}. Pad a and b "
            f"with zeros up to K = {align(b.shape[2], MAJOR_K_MULTIPLE)}, or store b K-major, as (G, N, K) contiguous."
        )
    return "mn", (1, other)


def _check_tma(name: str, x: Tensor, stride: int, dimension: str) -> None:
    size = x.element_size()
    if stride * size % TMA_BYTES:
        raise InvalidInputError(
            f"the {dimension} stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is {stride * size}. "
            "Allocate its rows with padding."
        )
    if past := x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
            "It is probably a view into a larger tensor: pass a copy (.clone())."
        )


def check_places(named: Mapping[str, Tensor]) -> None:
    """Check the memory of d: row-major, groups right after one another, none of it shared with another operand."""
    d = named["d"]
    if d.dim() == 2:
        checks.check_row_major("d", d)
    elif flat_stride(d) is None:
        raise InvalidInputError(
            "d must be row-major, with rows of their own and each group right after the one before, but it is "
            f"{shape_of(d)} with strides {d.stride()}. Pass a contiguous tensor and copy afterwards."
        )
    checks.check_no_overlap("d", flat(d), {name: x for name, x in named.items() if name != "d"})
