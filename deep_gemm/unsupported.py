"""Names of DeepGEMM's interface that this version does not implement: each raises `UnsupportedError` when it is called.

Clients look names up when they are imported, and choose another way by the error of a call. Names that clients ask for
by ``hasattr``, to learn what a library can do, are left absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from deep_gemm.errors import UnsupportedError

_TN = "FP8 products of MN-major groups. Call k_grouped_fp8_gemm_nt_contiguous with K-major ones"
_MEGA_MOE = "fused mixture-of-experts layer of Blackwell. Call fp8_mega_moe, or fp8_fp4_moe with MXFP4 weights"

REASONS = {
    "k_grouped_fp8_gemm_tn_contiguous": _TN,
    "transform_weights_for_mega_moe": _MEGA_MOE,
    "fp8_fp4_mega_moe": _MEGA_MOE,
    "bf16_mega_moe": _MEGA_MOE,
}
"""What this version lacks, by name, and what to do instead."""


RENAMED = {
    "gemm_fp8_fp8_bf16_nt": "fp8_gemm_nt",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "m_grouped_fp8_gemm_nt_masked",
    "wgrad_gemm_fp8_fp8_fp32_nt": "fp8_gemm_nt with c=d and recipe=(1, 1, 128)",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": "k_grouped_fp8_gemm_nt_contiguous",
    "get_col_major_tma_aligned_tensor": "get_mn_major_tma_aligned_tensor",
    "calc_diff": "testing.calc_diff",
    "bench_kineto": "testing.bench_kineto",
}
"""Names of DeepGEMM 1, which are absent here, and what to call instead."""


def unsupported(name: str) -> Callable[..., NoReturn]:
    """The function of that name. KeyError for others."""
    reason = REASONS[name]

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not implemented: this version has no {reason}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not supported: this version has no {reason}."
    return refuse
