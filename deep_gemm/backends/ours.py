"""Our own functions, by name."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import deep_gemm
from deep_gemm import fused, ops

from .attention_operations import MqaLogitsOperation, PagedMqaLogitsOperation, PrenormOperation
from .batched_operations import EINSUMS, FP8_EINSUM
from .grouped_operations import K_GROUPED, M_GROUPED
from .operations import HALF_GEMMS, RECIPES
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


for _op in (ops.DEFAULT, *HALF_GEMMS, *(grouped.name for grouped in M_GROUPED)):
    kernel("cuda", _op, prepares=True)(functools.partial(prepare, _op))
for _op, _recipe in RECIPES.items():
    kernel("cuda", _op, prepares=True)(functools.partial(scaled, _recipe))
for _k_grouped in K_GROUPED:
    kernel("cuda", _k_grouped.name, prepares=True)(functools.partial(adding, _k_grouped.name))


for _einsum in EINSUMS:
    kernel("cuda", _einsum.name, prepares=True)(functools.partial(prepare, "einsum", _einsum.form))
kernel("cuda", FP8_EINSUM.name, prepares=True)(functools.partial(prepare, FP8_EINSUM.name, FP8_EINSUM.form))


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
