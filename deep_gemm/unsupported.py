"""Names that callers look up and that this version does not implement: each raises `UnsupportedError` when called."""

from __future__ import annotations

from typing import Any, NoReturn

from deep_gemm.errors import UnsupportedError


def fp8_fp4_mega_moe(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Not supported: the fused FP8 x FP4 mixture-of-experts layer."""
    _refuse("fp8_fp4_mega_moe")


def get_symm_buffer_for_mega_moe(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Not supported: the symmetric-memory buffer of the fused mixture-of-experts layer."""
    _refuse("get_symm_buffer_for_mega_moe")


def transform_weights_for_mega_moe(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Not supported: the weight layout of the fused mixture-of-experts layer."""
    _refuse("transform_weights_for_mega_moe")


def _refuse(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name} is not implemented: this version has no fused mixture-of-experts layer. Build it from separate GEMMs."
    )
