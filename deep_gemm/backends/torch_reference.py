"""The reference: GEMMs of `deep_gemm.ops.reference`, which accumulate in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .. import ops
from ..ops import fp4_weights
from ..ops.batched import BHD
from ..ops.fp4 import Fp4Gemm
from ..ops.logits import MqaLogits
from ..ops.paged_logits import PagedMqaLogits
from ..ops.prenorm import HcPrenormGemm
from ..ops.reference import (
    Finish,
    b16_gemm_reference,
    batched_reference,
    fp8_gemm_reference,
    group_rows,
    k_grouped_reference,
    m_grouped_reference,
)
from ..runtime.operation import KernelOperation
from .attention_operations import PrenormOperation
from .batched_operations import EINSUMS, FP8_EINSUM, EinsumOperation
from .fp4_operations import FP4_PRODUCTS, Fp4Product
from .grouped_operations import ALIGNMENT, K_GROUPED, M_GROUPED, MGroupedOperation
from .operations import B16_GEMMS, GemmOperation, unpaired
from .registry import Call, get_operation, kernel
from .row_operations import FORMULAS


def dense(op: GemmOperation, a: Any, b: Any, d: Tensor, c: Tensor | None = None) -> None:
    if op.rate == "fp8":
        fp8_gemm_reference(a[0], a[1], b[0], b[1], d, c, op.scaling)
    else:
        b16_gemm_reference(*op.as_nt(a, b), d, c)


for _name in (ops.DEFAULT, ops.WGRAD, ops.ROWWISE, *B16_GEMMS):
    _op: Any = get_operation(_name)
    kernel("torch", _name)(functools.partial(dense, _op))


def m_grouped(op: MGroupedOperation, a: Any, b: Any, d: Tensor, layout: Tensor, expected_m: int = 0) -> None:
    (a, sfa), (b, sfb) = unpaired(a), unpaired(b)
    m_grouped_reference(a, b, layout, d, op.grouping, ALIGNMENT, sfa, sfb)


def grouped_mm(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> Call:
    """torch's own grouped GEMM. It needs no padding, and gets none."""
    groups = [(group, where) for group, where in group_rows(layout, "contiguous", len(a)) if group >= 0]
    ends = torch.tensor([where.stop - where.start for _, where in groups], device=a.device).cumsum(0).int()
    rows = torch.cat([a[where] for _, where in groups])
    return functools.partial(torch._grouped_mm, rows, b.transpose(1, 2), offs=ends)


def k_grouped(a: Any, b: Any, d: Tensor, ks: list[int], layout: Tensor) -> None:
    (a, sfa), (b, sfb) = unpaired(a), unpaired(b)
    k_grouped_reference(a, b, layout, d, sfa, sfb)


for _m_grouped in M_GROUPED:
    kernel("torch", _m_grouped.name)(functools.partial(m_grouped, _m_grouped))
    if _m_grouped.rate == "half" and _m_grouped.grouping == "contiguous":
        kernel("torch:grouped_mm", _m_grouped.name, prepares=True)(grouped_mm)
for _k_grouped in K_GROUPED:
    kernel("torch", _k_grouped.name)(k_grouped)


def each_head(op: EinsumOperation, a: Any, b: Any, d: Tensor) -> None:
    (a, sfa), (b, sfb) = unpaired(a), unpaired(b)
    a, d = a.transpose(0, 1), d.transpose(0, 1)
    sfa = None if sfa is None else sfa.transpose(0, 1)
    batched_reference(a, b.transpose(1, 2) if op.form == BHD else b, d, sfa, sfb)


for _einsum in (*EINSUMS, FP8_EINSUM):
    kernel("torch", _einsum.name)(functools.partial(each_head, _einsum))


def on_any_device(operation: KernelOperation, *arguments: Any) -> None:
    """An operation's reference, where its public function would run a kernel."""
    checked = operation.check(*arguments)
    if checked is not None:
        operation.reference(checked)


def fp4(op: Fp4Product, a: Any, b: tuple[Tensor, Tensor], *rest: Any) -> None:
    packed, scales = b
    grouping = op.grouping if isinstance(op, MGroupedOperation) else "none"
    on_any_device(Fp4Gemm(op.kind, grouping), a, fp4_weights.transform(packed, scales, op.kind), *rest)


for _fp4 in FP4_PRODUCTS:
    kernel("torch", _fp4.name)(functools.partial(fp4, _fp4))


kernel("torch", MqaLogits.name)(lambda *operands: on_any_device(MqaLogits(), *operands, True, 0))
kernel("torch", PagedMqaLogits.name)(functools.partial(on_any_device, PagedMqaLogits()))
kernel("torch", PrenormOperation.name)(
    lambda *operands: on_any_device(HcPrenormGemm(), *PrenormOperation.arguments(*operands), None)
)


def of_rows(function: Callable[..., Tensor], *operands: Tensor) -> None:
    """In float32."""
    *inputs, out = operands
    out.copy_(function(*(x.float() for x in inputs)))


def linear_gelu(a: Tensor, b: Tensor, bias: Tensor, d: Tensor) -> None:
    d.copy_(gelu((a @ b.t()).float() + bias, approximate="tanh"))


def compiled(function: Callable[..., None], *operands: Tensor) -> Call:
    """By `torch.compile`. On the CPU it generates no code."""
    made = torch.compile(function, dynamic=False, backend="inductor" if operands[0].is_cuda else "eager")
    return functools.partial(made, *operands)


for _function, (_, _formula) in FORMULAS.items():
    _plain = functools.partial(of_rows, _formula)
    kernel("torch", f"fused_{_function}")(_plain)
    kernel("torch:compile", f"fused_{_function}", prepares=True)(functools.partial(compiled, _plain))


@kernel("torch", "bf16_linear_gelu")
def reference_linear_gelu(a: Tensor, b: Tensor, bias: Tensor, d: Tensor) -> None:
    b16_gemm_reference(a, b, d, finish=Finish("gelu", bias=bias))


@kernel("torch:compile", "bf16_linear_gelu", prepares=True, easier=True)
def compiled_linear_gelu(*operands: Tensor) -> Call:
    """Its product is rounded to bfloat16 before the bias."""
    return compiled(linear_gelu, *operands)
