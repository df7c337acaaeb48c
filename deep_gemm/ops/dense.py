"""Dense products of FP8, BF16 and FP16, in every form: ``d = (c +) a @ b^T``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import BLOCKS, b16_gemm_reference, fp8_gemm_reference
from deep_gemm.runtime.calls import make_entry

from ..errors import InvalidInputError
from ..parts import VECTORS, Parts, by_part
from ..spec import Major
from . import checks, layouts, scales
from .checks import shape_of
from .gemm import SCALES_OF_D, C, Gemm, GemmOperands
from .layouts import Preparation, is_k_major
from .table import BF16, FP8, FP16, PLAIN, PRODUCTS, TORCH
from .with_epilogue import EpilogueOperator, with_bias

_TAKES = {TORCH[PRODUCTS[name].dtype]: name for name in (BF16, FP16)}
"""The operations of 16-bit values."""

_RANKS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("the scales of a", "the scales of b"), (0, 1, 2)),
    **by_part((1,), (1,), (2,)),
    **dict.fromkeys(VECTORS, (1,)),
}
"""Of the operands that are no matrices."""


def _by_cublaslt(x: GemmOperands) -> None:
    from . import cublaslt  # here: only a fallback needs it

    (cublaslt.fp8_by_cublaslt if "sfa" in x.tensors else cublaslt.half_by_cublaslt)(x)


class Dense(Gemm):
    """See `deep_gemm.fp8_gemm_nt` and `deep_gemm.bf16_gemm_nt`."""

    def __init__(self, name: str, accumulates: bool = False, epilogue_tensors: tuple[str, ...] | None = None) -> None:
        super().__init__(name, accumulates, epilogue_tensors)
        self.parameters = (*self.first, C, *self.options, *self.epilogue_parameters, layouts.form(self.product.forms))
        self.absent = () if accumulates else ("c",)
        self.settings = ("forbid_transpose",) if self.is_scaled else ()
        self.fallbacks = MappingProxyType({"cublaslt": _by_cublaslt})

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`."""
        return {**layouts.axes(form), "sfd": "mn", **by_part("m", "n", "mn")}

    def check(self, *arguments: Any, **named_arguments: Any) -> GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is no product to compute.

        ``form`` says how a and b are given: "tn" for a (K, M) and b (K, N).
        """
        given = self.given(arguments, named_arguments)
        named, form, epilogue = self.named(given), given["form"], self.epilogue_of(given)
        asked, dims = self.check_options(given)
        device = checks.check_tensors(self.called(form), named, _RANKS, (2,), ("d", SCALES_OF_D))
        named = {name: x.t() if _is_flipped(name, form) else x for name, x in named.items()}
        self._check_values(named, form)
        scaling = scales.check_dense(named, asked, or_packed=True) if self.is_scaled else PLAIN
        self._check_outputs(named, form, epilogue)
        self.check_epilogue_tensors(named, epilogue)
        if checks.is_fake(named.values()):
            return None
        if self.is_scaled:
            for name in ("a", "b"):
                if named[name].numel() and is_k_major(named[name]):
                    layouts.check_start(name, named[name])
        accumulate = checks.check_places(named)
        if SCALES_OF_D in named:
            others = {name: x for name, x in named.items() if name != SCALES_OF_D}
            checks.check_written(SCALES_OF_D, named[SCALES_OF_D], others, has_columns=True)
        alpha = given.get("alpha", 1.0)
        (m, k), n = named["a"].shape, named["b"].shape[0]
        if m == 0 or n == 0:
            return None
        tensors = dict(zip(self.operands, named.values(), strict=True))
        x = GemmOperands(self.name, tensors, device, m, n, k, dims, scaling, accumulate, epilogue=epilogue, alpha=alpha)
        if k == 0:
            checks.write_empty_sum(named["d"], named.get("c"), accumulate, x.finish, n)
            return None
        return x

    def _check_values(self, named: Mapping[str, Tensor], form: str) -> None:
        """Check a (M, K) and b (N, K), without their scales."""
        for name in ("a", "b"):
            if self.is_scaled:
                scales.check_values(name, named[name], or_e5m2=self.product.grouping == "none")
                continue
            other = _TAKES.get(dtype := named[name].dtype)
            if dtype in (torch.float8_e4m3fn, scales.E5M2):
                other = "fp8_gemm_nt, with scales,"
            instead = f" {other} takes {dtype}." if other else f" Pass {name}.to({self.dtype})."
            self.check_dtype(name, named[name], self.called(form), instead)
        if not self.is_scaled:
            self._check_output_dtypes(named, form)
        a, b = named["a"], named["b"]
        if a.shape[1] != b.shape[1]:
            a_given = f"{shape_of(a)} (M, K)" if form[0] == "n" else f"{shape_of(a.t())} (K, M)"
            b_given = f"{shape_of(b)} (N, K)" if form[1] == "t" else f"{shape_of(b.t())} (K, N)"
            raise InvalidInputError(
                f"a and b must agree in K, but in the form {form}, a is {a_given} and b is {b_given}."
                f"{self._other_form(a, b, named['d'], form)}"
            )

    def _other_form(self, a: Tensor, b: Tensor, d: Tensor, form: str) -> str:
        """The form or the order in which these tensors agree, as a sentence; "" if there is none."""
        advised = ""
        for other in self.product.forms:
            x = a if other[0] == form[0] else a.t()
            y = b if other[1] == form[1] else b.t()
            if x.shape[1] == y.shape[1] and d.shape == (x.shape[0], y.shape[0]):
                advised = f" They agree in the form {other}: call {self.called(other)}."
        # As if d had been given first: what was given as b is a, and what was given as d is b.
        first, x = (a if form[0] == "n" else a.t()), (b if form[1] == "t" else b.t())
        x, y = (x if form[0] == "n" else x.t()), (d if form[1] == "t" else d.t())
        if x.shape[1] == y.shape[1] and first.shape == (x.shape[0], y.shape[0]):
            advised += f" {'If a is the result: d' if advised else 'They agree as d, a, b: d'} is the third argument."
        return advised

    def _check_output_dtypes(self, named: Mapping[str, Tensor], form: str) -> None:
        if SCALES_OF_D in named:
            return
        d, outputs = named["d"], [TORCH[dtype] for dtype in self.product.outputs]
        if d.dtype not in outputs:
            *most, last = map(str, outputs)
            of, known = (
                "" if self.is_scaled else f" of {self.called(form)}",
                f"{', '.join(most)} or {last}" if most else last,
            )
            raise InvalidInputError(f"d{of} must be {known}, but it is {d.dtype}. Cast d after the call.")

    def _check_outputs(self, named: Mapping[str, Tensor], form: str, parts: Parts) -> None:
        shape = (named["a"].shape[0], self.columns(named, parts))
        rows = "rows of a by rows of b" if self.is_scaled else "M x N of a and b"
        rows = f"{rows}, of which gate has half," if parts.is_gated else rows
        if self.is_scaled:
            self._check_output_dtypes(named, form)
        for name in ("c", "d"):
            if name in named and tuple(named[name].shape) != shape:
                from .. import advice

                raise InvalidInputError(
                    f"{name} must have the shape {shape}, {rows}, but it has {shape_of(named[name])}."
                    f"{advice.of_shape(name, named[name], shape)}"
                )
        for name in ("a", "b", "d"):
            checks.check_sizes(name, named[name])
        if "c" in named and named["c"].dtype != named["d"].dtype:
            wanted = named["d"].dtype
            raise InvalidInputError(
                f"c must have d's dtype, {wanted}, but it is {named['c'].dtype}. Pass c.to({wanted})."
            )

    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """FP8 that is not K-major, and scales that TMA cannot read, are transposed first; 16-bit values are copied."""
        majors = []
        for name, scaling in zip("ab", x.scaling, strict=True):
            majors.append(prepared.add_values(name, x.tensors[name]))
            if scaling in ("1x128", "ue8m0"):
                prepared.add_row_scales(f"sf{name}", x.tensors[f"sf{name}"])
            elif scaling == "row":
                prepared.strides[f"sf{name}"] = (_stride_of_rows(x.tensors[f"sf{name}"]),)
            elif scaling != "none":
                prepared.strides[f"sf{name}"] = x.tensors[f"sf{name}"].stride()
        return majors[0], majors[1]

    def special(self, x: GemmOperands) -> str:
        """Other libraries take FP8 with scales of blocks and K-major values, and write bfloat16."""
        if x.epilogue:
            return f"the epilogue {x.epilogue}"
        if not self.is_scaled:
            return ""
        if x.scaling != BLOCKS:
            return f"scales of {x.scaling[0]} and {x.scaling[1]}"
        if x.tensors["d"].dtype != torch.bfloat16:
            return f"a d of {x.tensors['d'].dtype}"
        return "" if all(is_k_major(x.tensors[name]) for name in "ab") else "values whose K is not contiguous"

    def reference(self, x: GemmOperands) -> None:
        """See `fp8_gemm_reference` and `b16_gemm_reference`."""
        if self.is_scaled:
            fp8_gemm_reference(**x.plain, scaling=x.scaling, finish=x.finish)
        else:
            b16_gemm_reference(**x.plain, finish=x.finish)


def _is_flipped(name: str, form: str) -> bool:
    """Whether an operand, or its scales, are given with K first."""
    return (name.endswith("a") and form[0] == "t") or (name.endswith("b") and form[1] == "n")


def _stride_of_rows(sf: Tensor) -> int:
    """The stride from one row's scale to the next: zero if all rows share one scale."""
    if sf.numel() == 1:
        return 0
    return next(stride for size, stride in zip(sf.shape, sf.stride(), strict=True) if size > 1)


fp8, bf16, fp16 = (make_entry(Dense(name), Dense(name, accumulates=True)) for name in (FP8, BF16, FP16))
"""The functions behind the public ones; ``form`` is their last argument."""
for _name in (FP8, BF16, FP16):
    EpilogueOperator(Dense, _name)
fp8_bias, bf16_bias, fp16_bias = (with_bias(Dense, _name) for _name in (FP8, BF16, FP16))
"""The same with a bias as the epilogue: see `with_epilogue.with_bias`."""
