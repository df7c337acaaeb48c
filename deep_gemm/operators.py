"""Registering the operators of torch."""

from __future__ import annotations

from deep_gemm.ops import (
    batched,
    cublaslt,
    dense,
    fp4,
    fp4_moe_chain,
    k_grouped,
    linear,
    logits,
    m_grouped,
    moe_chain,
    moe_rows,
    paged_logits,
    prenorm,
    quantize,
    row_functions,
    skip_head_mid,
)
from deep_gemm.runtime import operators

_WITH_ENTRIES = (
    *(batched, cublaslt, dense, fp4, fp4_moe_chain, k_grouped, linear, logits, m_grouped),
    *(moe_chain, moe_rows, paged_logits, prenorm, quantize, row_functions, skip_head_mid),
)


def register_operators() -> tuple[str, ...]:
    """Register every operator, ``torch.ops.deep_gemm_jit.NAME``, and return their names.

    An operator writes into the tensors that its function writes. ``NAME_functional`` takes the same arguments, leaves
    them as they are, and returns new tensors like those: a ``d`` then says the shape, the dtype and what stays where
    nothing is written.

    Only who calls operators by name, or loads a program that was exported in another process, needs this: a function
    of this package registers its operator when `torch.compile` or `torch.export` first sees it. Calling it again does
    nothing.

    >>> "bf16_gemm" in deep_gemm.register_operators()
    True
    """
    return operators.register_all()
