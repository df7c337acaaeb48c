"""Our own functions, by name."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import deep_gemm
from deep_gemm import fused, ops

from .attention_operations import MqaLogitsOperation, PagedMqaLogitsOperation, PrenormOperation
from .batched_operations import EINSUMS, FP8_EINSUM
from .fp4_operations import FP4_PRODUCTS, Fp4Product, whole
from .grouped_operations import K_GROUPED, M_GROUPED
from .operations import B16_GEMMS, RECIPES
from .registry import Call, kernel
from .row_operations import FORMULAS


def prepare(op: str, *operands: Any) -> Call:
    """A direct call of the public function, without a wrapper that would be timed too."""
    return functools.partial(getattr(deep_gemm, op), *operands)


def scaled(recipe: Any, a: Any, b: Any, d: Tensor, c: Tensor | None = None) -> Call:
    """`deep_gemm.fp8_gemm_nt` with scales of another kind."""
    return functools.partial(deep_gemm.fp8_gemm_nt, a, b, d, c, recipe)


def adding(op: str, a: Any, b: Any, d: Tensor, *sizes: Any) -> Call:
    """A product that is added to ``d`` in place, which is zeroed once."""
    return functools.partial(getattr(deep_gemm, op), a, b, d.zero_(), *sizes, d)


for _op in (ops.DEFAULT, *B16_GEMMS, *(grouped.name for grouped in M_GROUPED)):
    kernel("cuda", _op, prepares=True)(functools.partial(prepare, _op))
for _op, _recipe in RECIPES.items():
    kernel("cuda", _op, prepares=True)(functools.partial(scaled, _recipe))
for _k_grouped in K_GROUPED:
    kernel("cuda", _k_grouped.name, prepares=True)(functools.partial(adding, _k_grouped.name))


for _einsum in EINSUMS:
    kernel("cuda", _einsum.name, prepares=True)(functools.partial(prepare, "einsum", _einsum.form))
kernel("cuda", FP8_EINSUM.name, prepares=True)(functools.partial(prepare, FP8_EINSUM.name, FP8_EINSUM.form))


def fp4(op: Fp4Product, a: Any, b: tuple[Tensor, Tensor], *rest: Any) -> Call:
    """A product of weights that a model transforms once."""
    packed, scales = b
    return prepare(op.name, a, deep_gemm.transform_fp4_weights(packed, scales, op.kind), *rest)


def whole_weights(op: Fp4Product, a: Any, b: tuple[Tensor, Tensor], *rest: Any) -> Call:
    """Our product of the same weights in 8 or 16 bits, which a model casts once."""
    packed, scales = b
    weights, sf = whole(op.kind, packed, scales)
    return prepare(op.name.replace("_fp4", ""), a, weights if sf is None else (weights, sf), *rest)


for _fp4 in FP4_PRODUCTS:
    kernel("cuda", _fp4.name, prepares=True)(functools.partial(fp4, _fp4))
    kernel(f"cuda:{_fp4.kind}_weights", _fp4.name, prepares=True)(functools.partial(whole_weights, _fp4))


def of_rows(function: str, *operands: Any) -> Call:
    """A call of a function of `deep_gemm.fused`."""
    return functools.partial(getattr(fused, function), *operands)


for _function in FORMULAS:
    kernel("cuda", f"fused_{_function}", prepares=True)(functools.partial(of_rows, _function))


@kernel("cuda", "bf16_linear_gelu", prepares=True)
def linear_gelu(a: Tensor, b: Tensor, bias: Tensor, d: Tensor) -> Call:
    """A product with an epilogue."""
    return functools.partial(deep_gemm.bf16_gemm_nt, a, b, d, epilogue=deep_gemm.Epilogue(bias, "gelu"))


@kernel("cuda", MqaLogitsOperation.name, prepares=True)
def logits(*operands: Any) -> Call:
    """A call that returns the logits."""
    return prepare(MqaLogitsOperation.name, *operands[:-1])


@kernel("cuda", PagedMqaLogitsOperation.name, prepares=True)
def paged_logits(*operands: Any) -> Call:
    """A call that returns the logits."""
    return prepare(PagedMqaLogitsOperation.name, *operands[:-1], operands[-1].shape[1])


@kernel("cuda", PrenormOperation.name, prepares=True)
def prenorm(a: Tensor, b: Tensor, out: Tensor) -> Call:
    """A call that writes both results."""
    return prepare(PrenormOperation.name, *PrenormOperation.arguments(a, b, out))
