"""Products grouped by M, of FP8 with scales and of BF16: each row of A is multiplied by the matrix B of its group.

Kernels see the matrices of all groups as one matrix, one below the other. A tensor with a group in front therefore has
its groups right after one another.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import m_grouped_reference
from deep_gemm.runtime.calls import Parameter, make_entry

from ..errors import InvalidInputError, UnsupportedError
from ..parts import PARTS, by_part
from ..runtime.operation import Fault
from ..spec import SCALE_BLOCK, Major, align, ceil_div
from . import checks, device_values, layouts, scales
from .checks import MAX_SIZE, shape_of
from .gemm import EPILOGUE, SCALES_OF_D, TENSOR, Gemm, GemmOperands
from .layouts import Preparation, flat_stride
from .table import EXPONENTS, M_BF16, M_BF16_MASKED, M_FP8, M_FP8_MASKED, PRODUCTS, PSUM
from .with_epilogue import EpilogueOperator

MAJOR_K_MULTIPLE = 64
"""If N of a 16-bit B is contiguous, K is a multiple of the kernels' steps, so that none reads rows of two groups."""

_OVERLAP = (
    Parameter("enable_overlap", "bool", False, "public_only", keyword=True),
    Parameter("max_block_n", "int | None", None, "public_only", keyword=True),
    Parameter("signal", "Any", None, "public_only", keyword=True),
)


class MGrouped(Gemm):
    """See `deep_gemm.m_grouped_fp8_gemm_nt_contiguous` and `deep_gemm.m_grouped_fp8_gemm_nt_masked`."""

    kept = ("d", "sfd")  # rows past a group's last
    asking = (EPILOGUE,)

    def __init__(self, name: str, accumulates: bool = False, epilogue_tensors: tuple[str, ...] | None = None) -> None:
        self.is_masked = PRODUCTS[name].grouping == "masked"
        """Whether a and d have the group in front."""
        self.layout = "masked_m" if self.is_masked else "grouped_layout"
        super().__init__(name, epilogue_tensors=epilogue_tensors)
        self.settings = ("check",)
        tensors = *self.first, Parameter(self.layout, TENSOR)
        if self.is_masked:
            overlap = _OVERLAP if self.is_scaled else ()
            expected_m = Parameter("expected_m", "int")
            self.parameters = (*tensors, expected_m, *self.options, *self.epilogue_parameters, *overlap)
            return
        self.parameters = (
            *(*tensors, *self.options, Parameter("use_psum_layout", "bool", False)),
            Parameter("ensure_zero_padding", "bool", True, "public_only"),
            Parameter("expected_m_for_psum_layout", "int | None", None, "public_only"),
            *self.epilogue_parameters,
            Parameter("alignment", "int", checks.DEFAULT_ALIGNMENT, "internal"),
            layouts.form(self.product.forms),
        )

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`. Rows of groups are divided with the groups, in the masked form."""
        if self.is_masked:
            rest = {self.layout: "g", "sfd": "gMn", **by_part("gM", "gn", "gMn")}
            return {"a": "gMk", "b": "gnk", "d": "gMn", **rest}
        rest = {self.layout: "M", "sfd": "Mn", **by_part("M", "Gn", "Mn")}
        return {"a": "Mk", "b": "Gkn" if form == "nn" else "Gnk", "d": "Mn", **rest}

    def check(self, *arguments: Any, **named_arguments: Any) -> GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute.

        ``form`` is "nn" for b given as (G, K, N).
        """
        given = self.given(arguments, named_arguments)
        named, form = self.named(given), given.get("form", "nt")
        sizes = (
            {"expected_m": check_expected_m("expected_m", given["expected_m"])}
            if self.is_masked
            else {"alignment": checks.check_alignment(given["alignment"])}
        )
        epilogue, alpha = self.epilogue_of(given), given.get("alpha", 1.0)
        if epilogue.expression is not None:
            raise UnsupportedError("a GEMM grouped by M takes no Epilogue.custom. Apply its expression after the call.")
        asked, dims = self.check_options(given)
        packed = self.is_scaled and scales.are_packed(named)
        if self.is_scaled and not packed:
            scales.check_blocks(asked, given, "GEMMs grouped by M")
        rank = 3 if self.is_masked else 2
        ranks = {self.layout: (1,), "b": (3,), "the scales of b": (3,)}
        ranks |= by_part((1, rank - 1), (2,), (rank,))
        axes = self.axes(form)
        checks.check_flat({name: axes[name] for name in "abd"}, named)
        device = checks.check_tensors(self.called(form), named, ranks, (rank,), ("d", SCALES_OF_D))
        if form == "nn":
            named |= {name: named[name].transpose(1, 2) for name in ("b", "the scales of b") if name in named}
        a, b, layout, d = (named[name] for name in ("a", "b", self.layout, "d"))
        self._check_dtypes(named, form, packed)
        checks.check_int32(self.layout, layout)
        if d.dtype != torch.bfloat16 and SCALES_OF_D not in named:
            raise InvalidInputError(
                f"d of a GEMM grouped by M must be torch.bfloat16, but it is {d.dtype}. Pass a bfloat16 d, and cast it "
                "after the call."
            )
        is_psum = bool(given.get("use_psum_layout"))
        columns = self.columns(named, epilogue)
        check_shapes(a, b, d, columns, self.layout, layout, form, is_psum)
        scaling = scales.check_packed(named, asked) if packed else self.product.scaling
        if self.is_scaled and not packed:
            _check_scales(a, named["the scales of a"], b, named["the scales of b"])
        self.check_epilogue_tensors(named, epilogue)
        of_rows = [part.name for part in PARTS if part.axes == "m" and part.name in named]
        named |= {name: _flat_rows(name, named[name]) for name in of_rows}
        if checks.is_fake(named.values()):
            return None
        (groups, n, k), m = b.shape, a.shape[-2]
        if 0 in (m, n, groups):
            return None
        layouts.check_k_major("a", a)
        self._weights(b)
        _check_places(named)
        tensors = dict(zip(self.operands, named.values(), strict=True))
        op = self.name + PSUM * is_psum
        more = {"groups": groups, **sizes, "epilogue": epilogue, "alpha": alpha}
        return GemmOperands(op, tensors, device, m, n, k, dims, scaling, **more)

    def _check_dtypes(self, named: Mapping[str, Tensor], form: str, packed: bool) -> None:
        for name in ("a", "b"):
            if self.is_scaled:
                scales.check_e4m3(name, named[name])
                if not packed:
                    scales.check_scales_dtype(name, named[f"the scales of {name}"])
                scales.check_k(k := named[name].shape[-1], f"it is {k}")
            else:
                self.check_dtype(name, named[name], self.called(form), f" Pass {name}.to({self.dtype}).")

    def _weights(self, b: Tensor) -> tuple[Major, tuple[int, int]]:
        """The contiguous dimension of the view b (G, N, K), which must be K for FP8, and its strides as one matrix of
        all groups' rows. Refuses what TMA cannot read."""
        other = flat_stride(b.transpose(1, 2))
        if flat_stride(b) is not None or other is None:
            return "k", (layouts.check_k_major("b", b), 1)
        if self.is_scaled:
            raise UnsupportedError(
                f"N of b is contiguous, and Hopper multiplies FP8 only where K is: b as (G, N, K) is {shape_of(b)} "
                f"with strides {b.stride()}. Store b K-major, as (G, N, K) contiguous; for the form nn pass "
                ".transpose(1, 2) of that."
            )
        layouts.check_stride("b", b, other, "K")
        if b.shape[2] % MAJOR_K_MULTIPLE:
            raise UnsupportedError(
                f"K must be a multiple of {MAJOR_K_MULTIPLE} if N of b is contiguous, but it is {b.shape[2]}. Pad a "
                f"and b with zeros up to K = {align(b.shape[2], MAJOR_K_MULTIPLE)}, or store b K-major, as (G, N, K) "
                "contiguous."
            )
        return "mn", (1, other)

    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """Scales of a are transposed first if TMA cannot read them as they are."""
        prepared.strides["a"] = (layouts.check_k_major("a", x.tensors["a"]), 1)
        major, prepared.strides["b"] = self._weights(x.tensors["b"])
        if self.is_scaled:
            prepared.add_row_scales("sfa", x.tensors["sfa"])
            if x.scaling == EXPONENTS:
                prepared.add_row_scales("sfb", x.tensors["sfb"])
            else:
                prepared.strides["sfb"] = x.tensors["sfb"].stride()
        return "k", major

    def faults(self, x: GemmOperands) -> Sequence[Fault]:
        """Labels, ends or counts."""
        layout = x.tensors["layout"]
        if self.is_masked:
            return device_values.counts(self.layout, layout, x.m, "rows of a group")
        if x.op.endswith(PSUM):
            return device_values.ends(layout, x.m, x.alignment)
        return device_values.labels(layout, x.groups, x.alignment)

    def reference(self, x: GemmOperands) -> None:
        """See `m_grouped_reference`."""
        grouping = "psum" if x.op.endswith(PSUM) else self.product.grouping
        m_grouped_reference(**x.plain, grouping=grouping, alignment=x.alignment, finish=x.finish, scaling=x.scaling)

    def special(self, x: GemmOperands) -> str:
        """Other libraries have no epilogues, and take scales of blocks."""
        if x.scaling == EXPONENTS:
            return "scales of UE8M0"
        return f"the epilogue {x.epilogue}" if x.epilogue else ""

    def shape(self, x: GemmOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k} in {x.groups} groups"

    def flops(self, x: GemmOperands) -> int:
        """Floating-point operations, for reports: of all rows, or in the masked form of those that are expected."""
        rows = x.groups * min(x.expected_m, x.m) if self.is_masked else x.m
        return 2 * rows * x.n * x.k


def check_expected_m(name: str, expected_m: Any) -> int:
    """An estimate of the rows of a group, rounded up to a power of two, so that few kernels are chosen for the many
    estimates of a server."""
    if isinstance(expected_m, (bool, Tensor)):  # without another function: each call comes here
        value = 0
    else:
        try:
            value = operator.index(expected_m)
        except TypeError:
            value = 0
    if value < 1:
        given = checks.shown(expected_m)
        raise InvalidInputError(
            f"{name} must be a positive integer, an estimate of the rows of a group, but it is {given}."
        )
    return 1 << (value - 1).bit_length()


def check_psum_estimate(expected_m: Any, use_psum_layout: Any) -> None:
    """Check expected_m_for_psum_layout, which has no effect yet."""
    if expected_m is None:
        return
    if not use_psum_layout:
        raise InvalidInputError(
            f"expected_m_for_psum_layout is {checks.shown(expected_m)}, but use_psum_layout is not set. Leave it out, "
            "or pass use_psum_layout=True and the end row of each group."
        )
    check_expected_m("expected_m_for_psum_layout", expected_m)


def refuse_overlap() -> None:
    """Refuse enable_overlap, max_block_n and signal."""
    raise UnsupportedError(
        "enable_overlap, max_block_n and signal are not supported by this version: a masked GEMM does not signal the "
        "tiles that it has finished. Leave them out, and combine after the call."
    )


def check_shapes(
    a: Tensor, b: Tensor, d: Tensor, columns: int, layout_name: str, layout: Tensor, form: str, psum: bool
) -> None:
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
    wanted = (*leading, rows, columns)
    if tuple(d.shape) != wanted:
        gate = "" if columns == n else " of which gate has half,"
        raise InvalidInputError(
            f"d must have the shape {wanted}, rows of a by rows of a group of b,{gate} but it has {shape_of(d)}."
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
        if any(size > MAX_SIZE for size in (total, groups * k, *x.shape)):  # as checks.check_sizes
            raise UnsupportedError(
                f"{name} is {shape_of(x)}: more than {MAX_SIZE} rows in all, or a dimension above that, is not "
                "supported. Split the call."
            )


def _check_scales(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor) -> None:
    """Check the shapes of the scales of a (.., rows, K) and of the view b (G, N, K)."""
    blocks = ceil_div(a.shape[-1], SCALE_BLOCK)
    of_b = (b.shape[0], ceil_div(b.shape[1], SCALE_BLOCK), blocks)
    scales.check_scales_shape("a", sfa, (*a.shape[:-1], blocks), f"one per row per {SCALE_BLOCK} of K of a")
    scales.check_scales_shape("b", sfb, of_b, f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block of each group of b")


def _flat_rows(name: str, x: Tensor) -> Tensor:
    """The elements of all groups' rows, one after the other."""
    try:
        return x.view(-1)
    except RuntimeError:  # there is no such view
        raise InvalidInputError(
            f"{name} of the epilogue must have its groups right after one another, but it is {shape_of(x)} with "
            f"strides {x.stride()}. Pass {name}.contiguous()."
        ) from None


def _check_scales_of_d(sf: Tensor, others: Mapping[str, Tensor]) -> None:
    """Check the memory of the scales of d, which are written: with either dimension contiguous."""
    if sf.dim() == 3:
        known = [x for x in (sf, sf.mT) if flat_stride(x) is not None]
        if not known:
            raise InvalidInputError(
                f"{SCALES_OF_D} must be contiguous along one dimension, with each group right after the one before, "
                f"but they are {shape_of(sf)} with strides {sf.stride()}. Pass a contiguous tensor."
            )
        sf = layouts.flat(known[0])
    checks.check_written(SCALES_OF_D, sf, others, has_columns=True)


def _check_places(named: Mapping[str, Tensor]) -> None:
    """Check the memory of d: row-major, groups right after one another, none of it shared with another operand."""
    d = named["d"]
    if d.dim() == 2:
        checks.check_row_major("d", d)
    elif flat_stride(d) is None:
        raise InvalidInputError(
            "d must be row-major, with rows of their own and each group right after the one before, but it is "
            f"{shape_of(d)} with strides {d.stride()}. Pass a contiguous tensor and copy afterwards."
        )
    checks.check_no_overlap("d", layouts.flat(d), {name: x for name, x in named.items() if name != "d"})
    if SCALES_OF_D in named:
        others = {name: x for name, x in named.items() if name != SCALES_OF_D}
        _check_scales_of_d(named[SCALES_OF_D], others)


_NAMES = M_FP8, M_FP8_MASKED, M_BF16, M_BF16_MASKED

fp8, fp8_masked, bf16, bf16_masked = (make_entry(MGrouped(name)) for name in _NAMES)
"""The functions behind the public ones; in the contiguous form, ``alignment`` and ``form`` are their last arguments."""
for _name in _NAMES:
    EpilogueOperator(MGrouped, _name)
