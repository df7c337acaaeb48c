"""Casts to FP8 and small arithmetic, under the names that callers import them by."""

from deep_gemm.ops.cast_reference import ceil_to_ue8m0 as ceil_to_ue8m0
from deep_gemm.ops.cast_reference import dequantise as dequantise
from deep_gemm.ops.cast_reference import pack_ue8m0_to_int as pack_ue8m0_to_int
from deep_gemm.ops.cast_reference import per_custom_dims_cast_to_fp8 as per_custom_dims_cast_to_fp8
from deep_gemm.ops.cast_reference import unpack_ue8m0_from_int as unpack_ue8m0_from_int
from deep_gemm.ops.fp4_reference import cast_back_from_fp4 as cast_back_from_fp4
from deep_gemm.ops.fp4_reference import per_token_cast_to_fp4 as per_token_cast_to_fp4
from deep_gemm.ops.fp4_reference import transpose_packed_fp4 as transpose_packed_fp4
from deep_gemm.quantize import per_block_cast_to_fp8 as per_block_cast_to_fp8
from deep_gemm.quantize import per_channel_cast_to_fp8 as per_channel_cast_to_fp8
from deep_gemm.quantize import per_token_cast_to_fp8 as per_token_cast_to_fp8
from deep_gemm.spec import align as align
from deep_gemm.spec import ceil_div as ceil_div
