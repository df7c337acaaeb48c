"""Operations: one module each, with its operands, its checks, its spec, its reference and its cases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..spec import Dtype, GemmSpec
from . import fp8_checks, fp8_dense, half_dense

if TYPE_CHECKING:
    from .m_grouped import Form

DEFAULT = fp8_dense.NAME
"""The operation of a model's layer by default."""

WGRAD = "fp8_gemm_nt_1d1d"
"""`fp8_gemm_nt` as weight gradients call it: scales of 1 x 128 on both sides, added to a float32 d."""

ROWWISE = "fp8_gemm_nt_rowwise"
"""`fp8_gemm_nt` with one scale for each row of a and of b."""

M_GROUPED: dict[str, tuple[Dtype, Form]] = {
    "m_grouped_fp8_gemm_nt_contiguous": ("e4m3", "contiguous"),
    "m_grouped_fp8_gemm_nt_contiguous_psum": ("e4m3", "psum"),
    "m_grouped_fp8_gemm_nt_masked": ("e4m3", "masked"),
    "m_grouped_bf16_gemm_nt_contiguous": ("bf16", "contiguous"),
    "m_grouped_bf16_gemm_nt_contiguous_psum": ("bf16", "psum"),
    "m_grouped_bf16_gemm_nt_masked": ("bf16", "masked"),
}
"""Operations with groups along M, each with the dtype of its operands and its form. The names that end in "psum" are
those before them as they are called with the ends of groups (use_psum_layout)."""

_SPECS: dict[str, Callable[..., GemmSpec]] = {
    fp8_dense.NAME: fp8_dense.spec,
    WGRAD: functools.partial(
        fp8_dense.spec, scaling=fp8_checks.ROWS_ON_BOTH_SIDES, output="f32", accumulate="in place"
    ),
    ROWWISE: functools.partial(fp8_dense.spec, scaling=fp8_checks.WHOLE_ROWS),
    half_dense.BF16: functools.partial(half_dense.spec, half_dense.BF16),
    half_dense.FP16: functools.partial(half_dense.spec, half_dense.FP16),
}
NAMES = (*_SPECS, *M_GROUPED)
"""Operations that layers can run."""


def spec(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    op: str = DEFAULT,
    whole_gpu: bool = True,
    *,
    groups: int = 1,
    alignment: int = 128,
    expected_m: int = 0,
) -> GemmSpec:
    """The spec of a call of ``op`` with freshly allocated tensors of these sizes, under the options of this process.
    ``groups``, ``alignment`` and ``expected_m`` are for operations with groups, as `m_grouped.spec` takes them. Raises
    KeyError for an unknown operation."""
    if op in M_GROUPED:
        from . import m_grouped  # here, so that callers of other operations do not import it

        dtype, form = M_GROUPED[op]
        return m_grouped.spec(dtype, form, m, n, k, groups, num_sms, whole_gpu, alignment, expected_m)
    return _SPECS[op](m, n, k, num_sms=num_sms, whole_gpu=whole_gpu)


def helpers(op: str) -> tuple[str, ...]:
    """The kernels that may run before the GEMM of ``op``: they copy or transpose operands that TMA cannot read as they
    are, and cast the operands of weight gradients."""
    if op in M_GROUPED:
        return ("transpose_scales",) if M_GROUPED[op][0] == "e4m3" else ()
    if op in (half_dense.BF16, half_dense.FP16):
        return ("copy_rows",)
    transposes = ("transpose_scales", "transpose_bytes")
    return (*transposes, "quantize") if op == WGRAD else transposes
