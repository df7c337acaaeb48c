"""GEMM kernels for NVIDIA GPUs that are compiled when they are first called.

Importing this package touches no GPU, disk, environment variable or compiler, so a process may fork afterwards.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

# The public names, each once: those that are imported "as" themselves, as for type checkers.
from .errors import CompileError as CompileError
from .errors import CompilerNotFoundError as CompilerNotFoundError
from .errors import DeepGemmError as DeepGemmError
from .errors import DriverError as DriverError
from .errors import InvalidInputError as InvalidInputError
from .errors import NotWarmError as NotWarmError
from .errors import SettingError as SettingError
from .errors import UnsupportedError as UnsupportedError
from .settings import settings as settings

# Each of these is imported when it is first used (see `_modules`), so that `deep-gemm --help`, or a program that only
# needs an error's class, does not wait for torch. A name that is also a module's, such as `settings`, cannot be here,
# unless the module is meant: importing the module would overwrite it.
if TYPE_CHECKING:
    from . import backends as backends
    from . import compat as compat
    from . import epilogue as epilogue
    from . import fused as fused
    from . import nn as nn
    from . import quantize as quantize
    from . import testing as testing
    from . import utils as utils
    from .aot.build import precompile as precompile
    from .attention import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
    from .attention import fp8_fp4_paged_mqa_logits as fp8_fp4_paged_mqa_logits
    from .attention import fp8_gemm_nt_skip_head_mid as fp8_gemm_nt_skip_head_mid
    from .attention import fp8_mqa_logits as fp8_mqa_logits
    from .attention import fp8_paged_mqa_logits as fp8_paged_mqa_logits
    from .attention import get_paged_mqa_logits_metadata as get_paged_mqa_logits_metadata
    from .batched import bf16_bmm as bf16_bmm
    from .batched import einsum as einsum
    from .batched import fp8_bmm as fp8_bmm
    from .batched import fp8_einsum as fp8_einsum
    from .batched import fp16_bmm as fp16_bmm
    from .cublaslt import cublaslt_gemm_nn as cublaslt_gemm_nn
    from .cublaslt import cublaslt_gemm_nt as cublaslt_gemm_nt
    from .cublaslt import cublaslt_gemm_tn as cublaslt_gemm_tn
    from .cublaslt import cublaslt_gemm_tt as cublaslt_gemm_tt
    from .custom.kernel import CustomKernel as CustomKernel
    from .custom.kernel import kernel as kernel
    from .custom.launch import LaunchConfig as LaunchConfig
    from .custom.launch import tensor_map as tensor_map
    from .dense import bf16_gemm_nn as bf16_gemm_nn
    from .dense import bf16_gemm_nt as bf16_gemm_nt
    from .dense import bf16_gemm_tn as bf16_gemm_tn
    from .dense import bf16_gemm_tt as bf16_gemm_tt
    from .dense import fp8_fp4_gemm_nn as fp8_fp4_gemm_nn
    from .dense import fp8_fp4_gemm_tn as fp8_fp4_gemm_tn
    from .dense import fp8_fp4_gemm_tt as fp8_fp4_gemm_tt
    from .dense import fp8_gemm_nn as fp8_gemm_nn
    from .dense import fp8_gemm_nt as fp8_gemm_nt
    from .dense import fp8_gemm_tn as fp8_gemm_tn
    from .dense import fp8_gemm_tt as fp8_gemm_tt
    from .dense import fp16_gemm_nn as fp16_gemm_nn
    from .dense import fp16_gemm_nt as fp16_gemm_nt
    from .dense import fp16_gemm_tn as fp16_gemm_tn
    from .dense import fp16_gemm_tt as fp16_gemm_tt
    from .fp4 import bf16_fp4_gemm_nt as bf16_fp4_gemm_nt
    from .fp4 import fp8_fp4_gemm_nt as fp8_fp4_gemm_nt
    from .fp4 import m_grouped_bf16_fp4_gemm_nt_contiguous as m_grouped_bf16_fp4_gemm_nt_contiguous
    from .fp4 import m_grouped_bf16_fp4_gemm_nt_masked as m_grouped_bf16_fp4_gemm_nt_masked
    from .fp4 import m_grouped_fp8_fp4_gemm_nt_contiguous as m_grouped_fp8_fp4_gemm_nt_contiguous
    from .fp4 import m_grouped_fp8_fp4_gemm_nt_masked as m_grouped_fp8_fp4_gemm_nt_masked
    from .fp4 import transform_fp4_weights as transform_fp4_weights
    from .fp4_moe import bf16_fp4_moe as bf16_fp4_moe
    from .fp4_moe import fp8_fp4_moe as fp8_fp4_moe
    from .grouped import bf16_m_grouped_gemm_nt_masked as bf16_m_grouped_gemm_nt_masked
    from .grouped import fp8_m_grouped_gemm_nt_masked as fp8_m_grouped_gemm_nt_masked
    from .grouped import k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous
    from .grouped import k_grouped_fp8_gemm_nt_contiguous as k_grouped_fp8_gemm_nt_contiguous
    from .grouped import k_grouped_fp8_gemm_nt_padded as k_grouped_fp8_gemm_nt_padded
    from .grouped import m_grouped_bf16_gemm_nn_contiguous as m_grouped_bf16_gemm_nn_contiguous
    from .grouped import m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous
    from .grouped import m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked
    from .grouped import m_grouped_fp8_fp4_gemm_nn_contiguous as m_grouped_fp8_fp4_gemm_nn_contiguous
    from .grouped import m_grouped_fp8_gemm_nn_contiguous as m_grouped_fp8_gemm_nn_contiguous
    from .grouped import m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous
    from .grouped import m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked
    from .jit.info import cache_info as cache_info
    from .layout import get_k_alignment_for_contiguous_layout as get_k_alignment_for_contiguous_layout
    from .layout import (
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor as get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,  # noqa: E501
    )
    from .layout import get_m_alignment_for_contiguous_layout as get_m_alignment_for_contiguous_layout
    from .layout import get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout
    from .layout import get_mn_major_tma_aligned_packed_ue8m0_tensor as get_mn_major_tma_aligned_packed_ue8m0_tensor
    from .layout import get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor
    from .layout import (
        get_theoretical_mk_alignment_for_contiguous_layout as get_theoretical_mk_alignment_for_contiguous_layout,
    )
    from .layout import get_tma_aligned_size as get_tma_aligned_size
    from .layout import set_mk_alignment_for_contiguous_layout as set_mk_alignment_for_contiguous_layout
    from .layout import transform_sf_into_required_layout as transform_sf_into_required_layout
    from .mega_moe import SymmBuffer as SymmBuffer
    from .mega_moe import fp8_mega_moe as fp8_mega_moe
    from .mega_moe import get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe
    from .mega_moe import get_symm_buffer_for_sm90_mega_moe as get_symm_buffer_for_sm90_mega_moe
    from .mega_moe import mega_moe_pre_dispatch_sm90 as mega_moe_pre_dispatch_sm90
    from .mega_moe import transform_weights_for_mega_moe_sm90 as transform_weights_for_mega_moe_sm90
    from .moe import fp8_moe as fp8_moe
    from .operators import register_operators as register_operators
    from .ops.cast_reference import ceil_to_ue8m0 as ceil_to_ue8m0
    from .ops.cast_reference import dequantise as dequantise
    from .ops.cast_reference import pack_ue8m0_to_int as pack_ue8m0_to_int
    from .ops.cast_reference import per_custom_dims_cast_to_fp8 as per_custom_dims_cast_to_fp8
    from .ops.epilogue import Epilogue as Epilogue
    from .ops.fp4_reference import cast_back_from_fp4 as cast_back_from_fp4
    from .ops.fp4_reference import per_token_cast_to_fp4 as per_token_cast_to_fp4
    from .ops.fp4_reference import transpose_packed_fp4 as transpose_packed_fp4
    from .options import get_batch_invariant as get_batch_invariant
    from .options import get_block_size_multiple_of as get_block_size_multiple_of
    from .options import get_deterministic_algorithms as get_deterministic_algorithms
    from .options import get_num_sms as get_num_sms
    from .options import get_pdl as get_pdl
    from .options import get_tc_util as get_tc_util
    from .options import set_batch_invariant as set_batch_invariant
    from .options import set_block_size_multiple_of as set_block_size_multiple_of
    from .options import set_ignore_compile_dims as set_ignore_compile_dims
    from .options import set_num_sms as set_num_sms
    from .options import set_pdl as set_pdl
    from .options import set_tc_util as set_tc_util
    from .options import use_deterministic_algorithms as use_deterministic_algorithms
    from .prenorm import tf32_hc_prenorm_gemm as tf32_hc_prenorm_gemm
    from .quantize import per_block_cast_to_fp8 as per_block_cast_to_fp8
    from .quantize import per_channel_cast_to_fp8 as per_channel_cast_to_fp8
    from .quantize import per_token_cast_to_fp8 as per_token_cast_to_fp8
    from .runtime.engine import debug_info as debug_info
    from .runtime.engine import dump_debug_info as dump_debug_info
    from .runtime.measuring import tuning as tuning
    from .runtime.monitor import monitor as monitor
    from .runtime.weight_promises import declare_constant as declare_constant
    from .runtime.weight_promises import retract_constant as retract_constant
    from .spec import align as align
    from .spec import ceil_div as ceil_div

__version__ = "0.1.0"


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


@functools.cache
def _modules() -> Mapping[str, str]:
    """The module of each public name: "" for a module of this package. Read from this file when it is first needed."""
    import ast

    with open(__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    nodes = [part for node in tree.body for part in (node.body if isinstance(node, ast.If) else [node])]
    return {
        alias.name: node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    module = _modules().get(name)
    if module == "":
        return importlib.import_module(f"{__name__}.{name}")
    if module is not None:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
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
    return sorted({*_modules(), "__version__", "__doc__", "__file__", "__name__", "__path__"})
