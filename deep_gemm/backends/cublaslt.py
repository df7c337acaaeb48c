"""cuBLASLt through torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.batched import BHD
from ..ops.cublaslt import widened
from .batched_operations import EINSUMS, FP8_EINSUM, EinsumOperation
from .operations import B16_GEMMS
from .registry import Call, kernel

Pair = tuple[Tensor, Tensor]


@kernel("cublaslt", ops.DEFAULT, prepares=True)
def blockwise(a: Pair, b: Pair, d: Tensor) -> Call:
    """The same scales in other layouts, so the same problem. It returns its result."""
    from torch.nn.functional import ScalingType, pad, scaled_mm

    (values, sfa), weights, sfb = a, b[0].t(), b[1]
    sfa = sfa.t().contiguous().t()
    sfb = pad(sfb, (0, -sfb.shape[1] % 4)).t()
    recipe_a, recipe_b = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(values, weights, sfa, recipe_a, sfb, recipe_b, output_dtype=d.dtype)


@kernel("cublaslt:tensorwise", ops.DEFAULT, prepares=True, easier=True)
def tensorwise(a: Pair, b: Pair, d: Tensor) -> Call:
    """One scale per tensor and fast accumulation. This is an easier problem, without promotion."""
    one = torch.ones((), dtype=torch.float32, device=d.device)
    values, weights = a[0], b[0].t()
    return lambda: torch._scaled_mm(
        values, weights, scale_a=one, scale_b=one, out_dtype=d.dtype, use_fast_accum=True, out=d
    )


@kernel("cublaslt", ops.WGRAD, prepares=True)
def blockwise_both(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None) -> Call:
    """The same scales of 1 x 128 on both sides. It does not add c, which must be zeros, and returns its result."""
    from torch.nn.functional import ScalingType, scaled_mm

    (values, sfa), weights, sfb = a, b[0].t(), b[1]
    recipe = ScalingType.BlockWise1x128
    return lambda: scaled_mm(values, weights, sfa, recipe, sfb, recipe, output_dtype=d.dtype)


@kernel("cublaslt:tensorwise", ops.WGRAD, prepares=True, easier=True)
def tensorwise_float(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None) -> Call:
    """One scale per tensor, float32 output, and no c. This is an easier problem."""
    return tensorwise(a, b, d)


@kernel("cublaslt", ops.ROWWISE, prepares=True)
def rowwise(a: Pair, b: Pair, d: Tensor) -> Call:
    """The same scales of rows, with fast accumulation, that is without promotion."""
    values, weights, sfa, sfb = a[0], b[0].t(), a[1], b[1].t()
    return lambda: torch._scaled_mm(
        values, weights, scale_a=sfa, scale_b=sfb, out_dtype=d.dtype, use_fast_accum=True, out=d
    )


def half(form: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> Call:
    """A 16-bit product written into ``d``, with ``c`` added if there is one."""
    a, b = (a.t() if form[0] == "t" else a), (b if form[1] == "n" else b.t())
    wide: dict[str, Any] = {} if d.dtype == a.dtype else {"out_dtype": d.dtype}
    if c is not None:
        return lambda: torch.addmm(c, a, b, out=d, **wide)
    return lambda: torch.mm(a, b, out=d, **wide)


def each_head(op: EinsumOperation, a: Tensor, b: Tensor, d: Tensor) -> Call:
    """A batch of products, which are returned one after the other."""
    rows, weights = a.transpose(0, 1), b if op.form == BHD else b.transpose(1, 2)
    return lambda: torch.bmm(rows, weights).flatten(0, 1)


@kernel("cublaslt:bf16", FP8_EINSUM.name, prepares=True, easier=True)
def each_head_widened(a: Pair, b: Pair, d: Tensor) -> Call:
    """The same in bfloat16, with scales multiplied in before. Its operands have twice the bytes."""
    (values, sfa), (weights, sfb) = (x.transpose(0, 1) for x in a), b
    left = torch.stack([widened(x, sf, "1x128") for x, sf in zip(values, sfa, strict=True)])
    right = torch.stack([widened(x, sf, "128x128") for x, sf in zip(weights, sfb, strict=True)])
    return lambda: torch.bmm(left, right.transpose(1, 2)).flatten(0, 1)


for _einsum in EINSUMS:
    kernel("cublaslt", _einsum.name, prepares=True)(functools.partial(each_head, _einsum))
for _op in B16_GEMMS:
    kernel("cublaslt", _op, prepares=True)(functools.partial(half, _op[-2:]))
