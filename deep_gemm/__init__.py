"""GEMM kernels for NVIDIA GPUs that are compiled when they are first called.

Importing this package touches no GPU, disk, environment variable or compiler, so a process may fork afterwards.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deep_gemm import utils
from deep_gemm.constant import declare_constant, retract_constant
from deep_gemm.dense import (
    fp8_fp4_gemm_nn,
    fp8_fp4_gemm_nt,
    fp8_fp4_gemm_tn,
    fp8_fp4_gemm_tt,
    fp8_gemm_nn,
    fp8_gemm_nt,
    fp8_gemm_tn,
    fp8_gemm_tt,
)
from deep_gemm.engine import debug_info, dump_debug_info
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
from deep_gemm.jit.info import cache_info
from deep_gemm.layout import (
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from deep_gemm.options import (
    get_block_size_multiple_of,
    get_num_sms,
    get_pdl,
    get_tc_util,
    set_block_size_multiple_of,
    set_ignore_compile_dims,
    set_num_sms,
    set_pdl,
    set_tc_util,
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

if TYPE_CHECKING:
    from deep_gemm import testing
    from deep_gemm.aot.build import precompile

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
    "cache_info",
    "ceil_div",
    "debug_info",
    "declare_constant",
    "dequantise",
    "dump_debug_info",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_fp4_mega_moe",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "get_block_size_multiple_of",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_pdl",
    "get_symm_buffer_for_mega_moe",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
    "precompile",
    "retract_constant",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "settings",
    "testing",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "utils",
]

_LATE = {"precompile": ("deep_gemm.aot.build", "precompile"), "testing": ("deep_gemm.testing", "")}
"""What a caller of kernels does not need, a fifth of the import: (module, attribute), imported when first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATE[name]
    found = importlib.import_module(module)
    globals()[name] = getattr(found, attribute) if attribute else found
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
