"""Batches of products, ``d[i] = a[i] @ b[i]^T``, and their sums: matrices of equal size, of any strides."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import b16_gemm_reference, batched_reference
from deep_gemm.runtime.calls import byte_range, make_entry

from ..errors import InvalidInputError, UnsupportedError
from ..spec import SCALE_BLOCK, Major, ceil_div
from . import checks, layouts, scales
from .checks import shape_of
from .cublaslt import batched_by_cublaslt, summed_by_cublaslt
from .gemm import C, Gemm, GemmOperands
from .layouts import TMA_BYTES, Preparation
from .table import BMM_BF16, BMM_FP8, BMM_FP16, DTYPES, PRODUCTS, SUM_BF16, TORCH

PLAIN, BHR, BHD, SUM = "bmk,bnk->bmn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bmk,bnk->mn"
"""What is multiplied, as einsum writes it."""

BLOCK_K = 64
"""K of products that are summed is a multiple of the kernels' steps."""

_TAKES = {TORCH[PRODUCTS[name].dtype]: name for name in (BMM_BF16, BMM_FP16)}

_FORMS = {BMM_FP8: (PLAIN, BHR), BMM_BF16: (PLAIN, BHR, BHD), BMM_FP16: (PLAIN, BHR, BHD)}


def _axes(form: str) -> dict[str, str]:
    operands, d = form.split("->")
    a, b = operands.split(",")
    return {"a": a, "b": b, "c": d, "d": d}


class Batched(Gemm):
    """See `deep_gemm.bf16_bmm`, `deep_gemm.fp8_bmm` and `deep_gemm.einsum`. Operands are views with the batch in
    front."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parameters = (*self.first, *self.options, layouts.form(_FORMS[name]))
        self.fallbacks = MappingProxyType({"cublaslt": batched_by_cublaslt})

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`."""
        return _axes(form or PLAIN)

    def check(self, *arguments: Any, **named_arguments: Any) -> GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        asked, dims = self.check_options(given)
        named, form = self.named(given), given["form"]
        called = self.called(form)
        if self.is_scaled:
            scales.check_blocks(asked, given, "batches of products")
        axes = self.axes(form)
        checks.check_flat({**axes, "the scales of b": f"{axes['b'][0]}xy"}, named)
        device = checks.check_tensors(called, named, {}, (3,))
        _check_shapes({name: named[name] for name in "abd"}, form)
        _check_dtypes(self, named, called)
        if self.is_scaled:
            _check_scales(named, form)
        if checks.is_fake(named.values()):
            return None
        views = {name: _view(name, x, form) for name, x in named.items()}
        (groups, m, k), n = views["a"].shape, views["b"].shape[1]
        if 0 in (groups, m, n):
            return None
        check_places(views)
        if k == 0:
            _write_zeros(named["d"])
            return None
        for name in ("a", "b"):
            strides(name, views[name])
        tensors = dict(zip(self.operands, views.values(), strict=True))
        return GemmOperands(self.name, tensors, device, m, n, k, dims, self.product.scaling, groups=groups)

    def called(self, form: str = PLAIN) -> str:
        """The public function, for messages."""
        return self.name if form == PLAIN else f"{'fp8_' if self.is_scaled else ''}einsum {form}"

    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """Operands are read as they are, but for scales of a that TMA cannot read."""
        if self.is_scaled:
            prepared.add_product_scales("sfa", x.tensors["sfa"])
            prepared.strides["sfb"] = x.tensors["sfb"].stride()
        return place_operands(prepared, x)

    def place_outputs(self, prepared: Preparation, x: GemmOperands) -> bool:
        d = x.tensors["d"]
        piece = TMA_BYTES // d.element_size()
        row = layouts.row_stride(d[0])
        prepared.strides["d"] = (_product_stride(d, x.m * row), row, 1)
        return layouts.tma_writable(d[0]) and prepared.strides["d"][0] % piece == 0

    def reference(self, x: GemmOperands) -> None:
        """See `batched_reference`."""
        batched_reference(**x.tensors)

    def shape(self, x: GemmOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.groups} x {x.m}x{x.n}x{x.k}"

    def flops(self, x: GemmOperands) -> int:
        """Floating-point operations, for reports."""
        return 2 * x.groups * x.m * x.n * x.k


class Summed(Gemm):
    """``d = (c +)`` the sum of all ``a[i] @ b[i]^T``. See `deep_gemm.einsum`."""

    def __init__(self, name: str, accumulates: bool = False) -> None:
        super().__init__(name, accumulates)
        self.parameters = (*self.first, C, *self.options)
        self.absent = () if accumulates else ("c",)
        self.fallbacks = MappingProxyType({"cublaslt": summed_by_cublaslt})

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`."""
        return _axes(SUM)

    def check(self, *arguments: Any, **named_arguments: Any) -> GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        dims, named = checks.check_compiled_dims(given["compiled_dims"]), self.named(given)
        checks.check_flat(self.axes(None), named)
        device = checks.check_tensors(f"einsum {SUM}", named, {"c": (2,), "d": (2,)}, (3,))
        _check_shapes({name: x for name, x in named.items() if name != "c"}, SUM)
        _check_dtypes(self, named, f"einsum {SUM}")
        (groups, m, k), n = named["a"].shape, named["b"].shape[1]
        c = named.get("c")
        if c is not None and (c.dtype, c.shape) != (named["d"].dtype, named["d"].shape):
            raise InvalidInputError(
                f"c must have d's dtype and shape, {named['d'].dtype} {shape_of(named['d'])}, but it has {c.dtype} "
                f"{shape_of(c)}."
            )
        if k % BLOCK_K:
            raise UnsupportedError(
                f"K of {SUM} must be a multiple of {BLOCK_K}, but it is {k}. Pad a and b with zeros along K."
            )
        if checks.is_fake(named.values()):
            return None
        accumulate = checks.check_places(named)
        if 0 in (m, n):
            return None
        if groups * k == 0:
            checks.write_empty_sum(named["d"], c, accumulate)
            return None
        for name in ("a", "b"):
            if strides(name, named[name])[-1] != 1:
                raise UnsupportedError(
                    f"{name} of {SUM} must be contiguous along k, but it is {shape_of(named[name])} with strides "
                    f"{named[name].stride()}. Pass .contiguous()."
                )
        return GemmOperands(
            *(self.name, named, device, m, n, groups * k, dims, self.product.scaling, accumulate), groups=groups
        )

    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """Operands are read as they are."""
        return place_operands(prepared, x)

    def reference(self, x: GemmOperands) -> None:
        """The product of all of K in one matrix."""
        a, b = (x.tensors[name].transpose(0, 1).flatten(1) for name in ("a", "b"))
        b16_gemm_reference(a, b, x.tensors["d"], x.tensors.get("c"))

    def shape(self, x: GemmOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k} in {x.groups} products"


def _view(name: str, x: Tensor, form: str) -> Tensor:
    """An operand of ``form`` as (batch, rows, K), or d as (batch, M, N)."""
    if form == PLAIN:
        return x
    if name.endswith("b"):
        return x.transpose(1, 2) if form == BHD else x
    return x.transpose(0, 1)


def _check_shapes(named: Mapping[str, Tensor], form: str) -> None:
    """Check that each letter of an einsum has one size."""
    inputs, output = form.split("->")
    sizes: dict[str, int] = {}
    for (name, x), letters in zip(named.items(), (*inputs.split(","), output), strict=True):
        for letter, size in zip(letters, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                given = ", ".join(f"{each} {shape_of(y)}" for each, y in named.items())
                raise InvalidInputError(
                    f"{name} must have the shape ({', '.join(letters)}) of {form}, but {letter} is {size} in it and "
                    f"{sizes[letter]} before: {given}.{_instead(named, form)}"
                )
        checks.check_sizes(name, x)


def _sizes(shapes: Sequence[Sequence[int]], form: str) -> dict[str, int] | None:
    """The size of each letter, in a, b and d of these shapes; None where they disagree."""
    found: dict[str, int] = {}
    for letters, shape in zip(form.replace("->", ",").split(","), shapes, strict=True):
        if len(letters) != len(shape):
            return None
        if any(found.setdefault(x, size) != size for x, size in zip(letters, shape, strict=True)):
            return None
    return found


def _instead(named: Mapping[str, Tensor], form: str) -> str:
    """What to do where sizes disagree, as a sentence; "" if no single change makes them agree."""
    a, b, d = (x.shape for x in named.values())
    for name, (i, j) in itertools.product("ab", ((1, 2), (0, 1), (0, 2))):
        transposed = named[name].transpose(i, j).shape
        if _sizes((transposed, b, d) if name == "a" else (a, transposed, d), form):
            return f" They agree with {name}.transpose({i}, {j}): pass that."
    if _sizes((b, a, d), form):
        return " They agree with a and b swapped."
    if _sizes((b, d, a), form):
        return " They agree as d, a, b: d is the third of them."
    letters = form.rpartition(">")[2]
    found = _sizes((a, b), form.partition("->")[0])
    return f" Pass torch.empty({tuple(found[x] for x in letters)}) of the same dtype and device." if found else ""


def _check_scales(named: Mapping[str, Tensor], form: str) -> None:
    """Check the shapes of the scales of FP8 operands, with the batch where those have it."""
    (*rows, k), (groups, n, _) = named["a"].shape, named["b"].shape
    blocks = ceil_div(k, SCALE_BLOCK)
    scales.check_scales_shape(
        "a", named["the scales of a"], (*rows, blocks), f"one per row per {SCALE_BLOCK} of K of each product's a"
    )
    of_b = (groups, ceil_div(n, SCALE_BLOCK), blocks)
    scales.check_scales_shape(
        "b", named["the scales of b"], of_b, f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block of each product's b"
    )


def _check_dtypes(operation: Gemm, named: Mapping[str, Tensor], called: str) -> None:
    for name in ("a", "b"):
        dtype = named[name].dtype
        if operation.is_scaled:
            scales.check_e4m3(name, named[name])
            scales.check_scales_dtype(name, named[f"the scales of {name}"])
            scales.check_k(k := named[name].shape[-1], f"it is {k}")
            continue
        other = _TAKES.get(dtype, "") if called == operation.name else ""
        instead = f" {other} takes {dtype}." if other else f" Pass {name}.to({operation.dtype})."
        if dtype == torch.float8_e4m3fn:
            instead = f" {BMM_FP8}, with scales, takes {dtype}."
        operation.check_dtype(name, named[name], called, instead)
    if DTYPES.get(named["d"].dtype) not in operation.product.outputs:
        known = " or ".join(str(TORCH[each]) for each in operation.product.outputs)
        raise InvalidInputError(f"d of {called} must be {known}, but it is {named['d'].dtype}. Cast d after the call.")


def _product_stride(x: Tensor, instead: int) -> int:
    """Elements from one product's matrix to the next. A single one may have any stride."""
    return x.stride(0) if x.shape[0] > 1 else instead


def strides(name: str, x: Tensor) -> tuple[int, int, int]:
    """The strides of A or B (batch, rows, K), one of the last two being 1. Refuses what TMA cannot read."""
    layouts.check_start(name, x)
    way = layouts.addressed(x[0])
    if x.element_size() == 1 and way is not None and way[1] != 1:
        raise UnsupportedError(
            f"K of {name} must be contiguous, because Hopper multiplies FP8 only where it is, but as (batch, rows, K) "
            f"it is {shape_of(x)} with strides {x.stride()}. Store it so: pass .contiguous()."
        )
    if way is None:
        which = "last" if x.element_size() == 1 else "last or the middle"
        raise InvalidInputError(
            f"the {which} dimension of {name}, as (batch, rows, K), must be contiguous, and rows begin at "
            f"multiples of {TMA_BYTES} bytes and not overlap, but it is {shape_of(x)} with strides {x.stride()}. Pass "
            "a contiguous copy, with padded rows if need be."
        )
    rows, k = x.shape[1:]
    step = _product_stride(x, rows * way[0] if way[1] == 1 else k * way[1])
    if step <= 0 or step * x.element_size() % TMA_BYTES:
        raise InvalidInputError(
            f"matrices of {name} must lie at multiples of {TMA_BYTES} bytes from one another, and not in one place, "
            f"but they are {step * x.element_size()} bytes apart: it is {shape_of(x)} with strides {x.stride()}. Pass "
            ".contiguous()."
        )
    return step, *way


def place_operands(prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
    """Add A and B, whose strides have been checked. Returns the dimensions that are contiguous in them."""
    prepared.strides |= {name: strides(name, x.tensors[name]) for name in ("a", "b")}
    of_a, of_b = ("k" if prepared.strides[name][-1] == 1 else "mn" for name in ("a", "b"))
    return of_a, of_b  # type: ignore[return-value]


def check_places(named: Mapping[str, Tensor]) -> None:
    """Check the memory of d (batch, M, N): contiguous rows, no two of them at one place, none of it shared with another
    operand."""
    d = named["d"]
    if not checks.has_own_elements(d) or (d.shape[-1] > 1 and d.stride(-1) != 1):
        raise InvalidInputError(
            "d must have contiguous rows of their own (stride 1 along its last dimension), but as (batch, rows, "
            f"columns) it is {shape_of(d)} with strides {d.stride()}. Pass a contiguous tensor and copy afterwards."
        )
    (start, end), others = byte_range(d), {name: x for name, x in named.items() if name != "d"}
    near = {name: x for name, x in others.items() if _meets(x, start, end)}
    for each in d if near else ():
        first, last = byte_range(each)
        checks.check_no_overlap("d", each, {name: x for name, x in near.items() if _meets(x, first, last)})


def _meets(x: Tensor, start: int, end: int) -> bool:
    own = byte_range(x)
    return own[0] < end and start < own[1]


def _write_zeros(d: Tensor) -> None:
    with torch.inference_mode():  # d may be an inference tensor
        d.zero_()


fp8, bf16, fp16 = (make_entry(Batched(name)) for name in (BMM_FP8, BMM_BF16, BMM_FP16))
"""The functions behind the public ones: a, b, d, options, form."""
bf16_sum = make_entry(Summed(SUM_BF16), Summed(SUM_BF16, accumulates=True))
"""Arguments: a, b, d, c, compiled_dims."""
