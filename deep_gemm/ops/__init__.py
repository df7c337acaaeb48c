"""Operations: one module each, with its operands, its checks, its spec, its reference and its cases."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..spec import GemmSpec
from . import fp8_checks, fp8_dense, half_dense

DEFAULT = fp8_dense.NAME
"""The operation of a model's layer by default."""

WGRAD = "fp8_gemm_nt_1d1d"
"""`fp8_gemm_nt` as weight gradients call it: scales of 1 x 128 on both sides, added to a float32 d."""

ROWWISE = "fp8_gemm_nt_rowwise"
"""`fp8_gemm_nt` with one scale for each row of a and of b."""

_SPECS: dict[str, Callable[..., GemmSpec]] = {
    fp8_dense.NAME: fp8_dense.spec,
    WGRAD: functools.partial(
        fp8_dense.spec, scaling=fp8_checks.ROWS_ON_BOTH_SIDES, output="f32", accumulate="in place"
    ),
    ROWWISE: functools.partial(fp8_dense.spec, scaling=fp8_checks.WHOLE_ROWS),
    half_dense.BF16: functools.partial(half_dense.spec, half_dense.BF16),
    half_dense.FP16: functools.partial(half_dense.spec, half_dense.FP16),
}
NAMES = tuple(_SPECS)
"""Operations that layers can run."""


def spec(m: int, n: int, k: int, num_sms: int, op: str = DEFAULT, whole_gpu: bool = True) -> GemmSpec:
    """The spec of a call of ``op`` with freshly allocated tensors of these sizes, under the options of this process.
    Raises KeyError for an unknown operation."""
    return _SPECS[op](m, n, k, num_sms=num_sms, whole_gpu=whole_gpu)


def helpers(op: str) -> tuple[str, ...]:
    """The kernels that may run before the GEMM of ``op``: they copy or transpose operands that TMA cannot read as they
    are, and cast the operands of weight gradients."""
    if op in (half_dense.BF16, half_dense.FP16):
        return ("copy_rows",)
    transposes = ("transpose_scales", "transpose_bytes")
    return (*transposes, "quantize") if op == WGRAD else transposes
