"""Casts to FP8 and small arithmetic."""

from deep_gemm.quantisation import (
    ceil_to_ue8m0,
    dequantise,
    pack_ue8m0_to_int,
    per_custom_dims_cast_to_fp8,
    unpack_ue8m0_from_int,
)
from deep_gemm.quantize import per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.spec import align, ceil_div

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "dequantise",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
    "unpack_ue8m0_from_int",
]
