"""GEMM kernels for NVIDIA GPUs that are compiled when they are first called.

Importing this package touches no GPU, disk, environment variable or compiler, so a process may fork afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

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
from deep_gemm.settings import settings

if TYPE_CHECKING:
    from deep_gemm import backends, compat, epilogue, fused, nn, quantize, testing, utils
    from deep_gemm.aot.build import precompile
    from deep_gemm.attention import (
        fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits,
        fp8_gemm_nt_skip_head_mid,
        fp8_mqa_logits,
        fp8_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )
    from deep_gemm.batched import bf16_bmm, einsum, fp8_bmm, fp8_einsum, fp16_bmm
    from deep_gemm.cublaslt import cublaslt_gemm_nn, cublaslt_gemm_nt, cublaslt_gemm_tn, cublaslt_gemm_tt
    from deep_gemm.custom.kernel import CustomKernel, kernel
    from deep_gemm.custom.launch import LaunchConfig, tensor_map
    from deep_gemm.dense import (
        bf16_gemm_nn,
        bf16_gemm_nt,
        bf16_gemm_tn,
        bf16_gemm_tt,
        fp8_fp4_gemm_nn,
        fp8_fp4_gemm_tn,
        fp8_fp4_gemm_tt,
        fp8_gemm_nn,
        fp8_gemm_nt,
        fp8_gemm_tn,
        fp8_gemm_tt,
        fp16_gemm_nn,
        fp16_gemm_nt,
        fp16_gemm_tn,
        fp16_gemm_tt,
    )
    from deep_gemm.fp4 import (
        bf16_fp4_gemm_nt,
        fp8_fp4_gemm_nt,
        m_grouped_bf16_fp4_gemm_nt_contiguous,
        m_grouped_bf16_fp4_gemm_nt_masked,
        m_grouped_fp8_fp4_gemm_nt_contiguous,
        m_grouped_fp8_fp4_gemm_nt_masked,
        transform_fp4_weights,
    )
    from deep_gemm.grouped import (
        bf16_m_grouped_gemm_nt_masked,
        fp8_m_grouped_gemm_nt_masked,
        k_grouped_bf16_gemm_tn_contiguous,
        k_grouped_fp8_gemm_nt_contiguous,
        k_grouped_fp8_gemm_nt_padded,
        m_grouped_bf16_gemm_nn_contiguous,
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_masked,
        m_grouped_fp8_fp4_gemm_nn_contiguous,
        m_grouped_fp8_gemm_nn_contiguous,
        m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked,
    )
    from deep_gemm.jit.info import cache_info
    from deep_gemm.layout import (
        get_k_alignment_for_contiguous_layout,
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
        get_m_alignment_for_contiguous_layout,
        get_mk_alignment_for_contiguous_layout,
        get_mn_major_tma_aligned_packed_ue8m0_tensor,
        get_mn_major_tma_aligned_tensor,
        get_theoretical_mk_alignment_for_contiguous_layout,
        get_tma_aligned_size,
        set_mk_alignment_for_contiguous_layout,
        transform_sf_into_required_layout,
    )
    from deep_gemm.moe import fp8_moe
    from deep_gemm.operators import register_operators
    from deep_gemm.ops.cast_reference import ceil_to_ue8m0, dequantise, pack_ue8m0_to_int, per_custom_dims_cast_to_fp8
    from deep_gemm.ops.epilogue import Epilogue
    from deep_gemm.ops.fp4_reference import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4
    from deep_gemm.options import (
        get_batch_invariant,
        get_block_size_multiple_of,
        get_deterministic_algorithms,
        get_num_sms,
        get_pdl,
        get_tc_util,
        set_batch_invariant,
        set_block_size_multiple_of,
        set_ignore_compile_dims,
        set_num_sms,
        set_pdl,
        set_tc_util,
        use_deterministic_algorithms,
    )
    from deep_gemm.prenorm import tf32_hc_prenorm_gemm
    from deep_gemm.quantize import per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8
    from deep_gemm.runtime.engine import debug_info, dump_debug_info
    from deep_gemm.runtime.measuring import tuning
    from deep_gemm.runtime.monitor import monitor
    from deep_gemm.runtime.weight_promises import declare_constant, retract_constant
    from deep_gemm.spec import align, ceil_div

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CompilerNotFoundError",
    "CustomKernel",
    "DeepGemmError",
    "DriverError",
    "Epilogue",
    "InvalidInputError",
    "LaunchConfig",
    "NotWarmError",
    "SettingError",
    "UnsupportedError",
    "align",
    "backends",
    "bf16_bmm",
    "bf16_fp4_gemm_nt",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "bf16_m_grouped_gemm_nt_masked",
    "cache_info",
    "cast_back_from_fp4",
    "ceil_div",
    "ceil_to_ue8m0",
    "compat",
    "cublaslt_gemm_nn",
    "cublaslt_gemm_nt",
    "cublaslt_gemm_tn",
    "cublaslt_gemm_tt",
    "debug_info",
    "declare_constant",
    "dequantise",
    "dump_debug_info",
    "einsum",
    "epilogue",
    "fp8_bmm",
    "fp8_einsum",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_moe",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fp16_bmm",
    "fp16_gemm_nn",
    "fp16_gemm_nt",
    "fp16_gemm_tn",
    "fp16_gemm_tt",
    "fused",
    "get_batch_invariant",
    "get_block_size_multiple_of",
    "get_deterministic_algorithms",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_pdl",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_nt_padded",
    "kernel",
    "m_grouped_bf16_fp4_gemm_nt_contiguous",
    "m_grouped_bf16_fp4_gemm_nt_masked",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "monitor",
    "nn",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "precompile",
    "quantize",
    "register_operators",
    "retract_constant",
    "set_batch_invariant",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "settings",
    "tensor_map",
    "testing",
    "tf32_hc_prenorm_gemm",
    "transform_fp4_weights",
    "transform_sf_into_required_layout",
    "transpose_packed_fp4",
    "tuning",
    "use_deterministic_algorithms",
    "utils",
]

_LATE = {
    "deep_gemm.aot.build": ("precompile",),
    "deep_gemm.attention": (
        "fp8_fp4_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "fp8_gemm_nt_skip_head_mid",
        "fp8_mqa_logits",
        "fp8_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    ),
    "deep_gemm.batched": ("bf16_bmm", "einsum", "fp8_bmm", "fp8_einsum", "fp16_bmm"),
    "deep_gemm.runtime.weight_promises": ("declare_constant", "retract_constant"),
    "deep_gemm.cublaslt": ("cublaslt_gemm_nn", "cublaslt_gemm_nt", "cublaslt_gemm_tn", "cublaslt_gemm_tt"),
    "deep_gemm.custom.kernel": ("CustomKernel", "kernel"),
    "deep_gemm.custom.launch": ("LaunchConfig", "tensor_map"),
    "deep_gemm.dense": (
        "bf16_gemm_nn",
        "bf16_gemm_nt",
        "bf16_gemm_tn",
        "bf16_gemm_tt",
        "fp16_gemm_nn",
        "fp16_gemm_nt",
        "fp16_gemm_tn",
        "fp16_gemm_tt",
        "fp8_fp4_gemm_nn",
        "fp8_fp4_gemm_tn",
        "fp8_fp4_gemm_tt",
        "fp8_gemm_nn",
        "fp8_gemm_nt",
        "fp8_gemm_tn",
        "fp8_gemm_tt",
    ),
    "deep_gemm.fp4": (
        "bf16_fp4_gemm_nt",
        "fp8_fp4_gemm_nt",
        "m_grouped_bf16_fp4_gemm_nt_contiguous",
        "m_grouped_bf16_fp4_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_masked",
        "transform_fp4_weights",
    ),
    "deep_gemm.runtime.engine": ("debug_info", "dump_debug_info"),
    "deep_gemm.grouped": (
        "bf16_m_grouped_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "k_grouped_bf16_gemm_tn_contiguous",
        "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_fp8_gemm_nt_padded",
        "m_grouped_bf16_gemm_nn_contiguous",
        "m_grouped_bf16_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nn_contiguous",
        "m_grouped_fp8_gemm_nn_contiguous",
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
    ),
    "deep_gemm.jit.info": ("cache_info",),
    "deep_gemm.layout": (
        "get_k_alignment_for_contiguous_layout",
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_m_alignment_for_contiguous_layout",
        "get_mk_alignment_for_contiguous_layout",
        "get_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_mn_major_tma_aligned_tensor",
        "get_theoretical_mk_alignment_for_contiguous_layout",
        "get_tma_aligned_size",
        "set_mk_alignment_for_contiguous_layout",
        "transform_sf_into_required_layout",
    ),
    "deep_gemm.runtime.measuring": ("tuning",),
    "deep_gemm.runtime.monitor": ("monitor",),
    "deep_gemm.moe": ("fp8_moe",),
    "deep_gemm.operators": ("register_operators",),
    "deep_gemm.options": (
        "get_batch_invariant",
        "get_block_size_multiple_of",
        "get_deterministic_algorithms",
        "get_num_sms",
        "get_pdl",
        "get_tc_util",
        "set_batch_invariant",
        "set_block_size_multiple_of",
        "set_ignore_compile_dims",
        "set_num_sms",
        "set_pdl",
        "set_tc_util",
        "use_deterministic_algorithms",
    ),
    "deep_gemm.prenorm": ("tf32_hc_prenorm_gemm",),
    "deep_gemm.spec": ("align", "ceil_div"),
    "deep_gemm.ops.cast_reference": (
        "ceil_to_ue8m0",
        "dequantise",
        "pack_ue8m0_to_int",
        "per_custom_dims_cast_to_fp8",
    ),
    "deep_gemm.ops.epilogue": ("Epilogue",),
    "deep_gemm.ops.fp4_reference": ("cast_back_from_fp4", "per_token_cast_to_fp4", "transpose_packed_fp4"),
    "deep_gemm.quantize": (
        "per_block_cast_to_fp8",
        "per_channel_cast_to_fp8",
        "per_token_cast_to_fp8",
    ),
}
"""The modules of the public names, except the errors and the settings. A module is imported when one of its names is
used.

So `deep-gemm --help`, or a program that only needs an error's class, does not wait for torch. A name that is also a
module's, such as `settings`, cannot be in this table: importing the module would overwrite it.
"""

_PLACES = {name: module for module, names in _LATE.items() for name in names}
_MODULES = ("backends", "compat", "epilogue", "fused", "nn", "quantize", "testing", "utils")


def _check_unpacked() -> None:
    if type(__spec__.loader).__name__ == "zipimporter":
        where = f"deep_gemm cannot be imported from a zip file ({__file__})"
        raise ImportError(f"{where}: compilers read its headers as files. Unpack it, or install it with pip.")


_check_unpacked()


def _find_checkout(beside: str) -> None:
    """In a checkout, ``jit`` and ``templates`` are not in this package's directory but beside it. Python started there
    imports this package from the checkout, even if another is installed."""
    if not os.path.isdir(os.path.join(beside, "jit")):
        __path__.append(os.path.dirname(beside))


_find_checkout(os.path.dirname(os.path.abspath(__file__)))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"deep_gemm.{name}")
    if name in _PLACES:
        found = getattr(importlib.import_module(_PLACES[name]), name)
    else:
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{__name__}.{name}"):  # `from deep_gemm import arch` asks here first
            raise missing
        from deep_gemm.unsupported import REASONS, RENAMED, unsupported

        if name in RENAMED:
            missing = AttributeError(f"{missing}, a name of DeepGEMM 1. Call deep_gemm.{RENAMED[name]}.")
        if name not in REASONS:
            raise missing
        found = unsupported(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"})
