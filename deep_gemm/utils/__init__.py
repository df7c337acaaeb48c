"""Casts, layouts and small arithmetic, under the names that callers import them by."""

import deep_gemm.layout as _layout
from deep_gemm.utils.layout import *  # noqa: F403
from deep_gemm.utils.math import (
    cast_back_from_fp4,
    ceil_to_ue8m0,
    dequantise,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    transpose_packed_fp4,
)

__all__ = [
    "cast_back_from_fp4",
    "ceil_to_ue8m0",
    "dequantise",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transpose_packed_fp4",
]
__all__ += _layout.__all__
