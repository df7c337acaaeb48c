"""GEMM kernels for NVIDIA GPUs that are compiled when they are first called.

Importing this package touches no GPU, disk, environment variable or compiler, so a process may fork afterwards.
"""

from deep_gemm import testing
from deep_gemm.errors import (
    CompileError,
    CompilerNotFoundError,
    DeepGemmError,
    DriverError,
    InvalidInputError,
    NotWarmError,
    SettingError,
    UnsupportedError,
)
from deep_gemm.params import align, ceil_div
from deep_gemm.quantisation import (
    dequantise,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
)
from deep_gemm.settings import settings
from deep_gemm.unsupported import (
    fp8_fp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    transform_weights_for_mega_moe,
)

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CompilerNotFoundError",
    "DeepGemmError",
    "DriverError",
    "InvalidInputError",
    "NotWarmError",
    "SettingError",
    "UnsupportedError",
    "align",
    "ceil_div",
    "dequantise",
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
    "settings",
    "testing",
    "transform_weights_for_mega_moe",
]
