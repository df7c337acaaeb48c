"""The programs here that call a DeepGEMM: which one each would get, and which of its calls this library serves."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import deep_gemm
from deep_gemm.log import counted
from deep_gemm.unsupported import REASONS

_ALIGNMENT = ("get_mk_alignment_for_contiguous_layout", "set_mk_alignment_for_contiguous_layout")
_THEORETICAL = "get_theoretical_mk_alignment_for_contiguous_layout"
_SETTINGS = ("get_num_sms", "set_num_sms", "set_pdl")
_SCALES = ("transform_sf_into_required_layout", "get_mn_major_tma_aligned_tensor")
_PACKED = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
_MEGA_MOE = ("transform_weights_for_mega_moe", "get_symm_buffer_for_mega_moe", "fp8_fp4_mega_moe")
_ENGINE = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "get_paged_mqa_logits_metadata", "fp8_einsum")
_HALF = tuple(f"m_grouped_bf16_gemm_{form}" for form in ("nt_contiguous", "nn_contiguous"))


class Client(NamedTuple):
    """A program that calls a DeepGEMM on Hopper. ``copy`` is the package of its own DeepGEMM, and ``elsewhere`` says
    where it takes one from if it does not import ``deep_gemm``."""

    distribution: str
    calls: tuple[str, ...]
    copy: str = ""
    elsewhere: str = ""


CLIENTS = {
    "vllm": Client(
        "vllm",
        (
            *(*_ENGINE, "fp8_m_grouped_gemm_nt_masked", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"),
            *("tf32_hc_prenorm_gemm", "cublaslt_gemm_nt", *_ALIGNMENT, _THEORETICAL, *_SETTINGS, *_SCALES, _PACKED),
            *("m_grouped_fp8_fp4_gemm_nt_contiguous", "pack_ue8m0_to_int", "per_block_cast_to_fp8"),
            "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        ),
        copy="vllm.third_party.deep_gemm",
    ),
    "sglang": Client(
        "sglang",
        (
            *(*_ENGINE, "m_grouped_fp8_gemm_nt_masked", "fp8_mqa_logits", "fp8_paged_mqa_logits", *_HALF[:1]),
            *("bf16_gemm_nt", "bf16_gemm_nn", "bf16_gemm_tn", "m_grouped_bf16_gemm_nt_masked", "tf32_hc_prenorm_gemm"),
            *(*_ALIGNMENT, _THEORETICAL, *_SETTINGS, *_SCALES, _PACKED, "use_deterministic_algorithms"),
            *(
                "get_deterministic_algorithms",
                "get_symm_buffer_for_mega_moe",
                "fp8_mega_moe",
                "mega_moe_pre_dispatch_sm90",
            ),
        ),
    ),
    "transformers": Client(
        "transformers",
        (
            *("fp8_fp4_gemm_nt", "m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nn_contiguous"),
            *(*_HALF, "per_token_cast_to_fp8", _SCALES[0], _ALIGNMENT[0], *_MEGA_MOE),
        ),
        elsewhere="kernels-community/deep-gemm of the Hugging Face hub",
    ),
    "torchao": Client("torchao", ("m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous")),
    "megatron": Client("megatron-core", ("bf16_gemm_nn", _HALF[0], "k_grouped_bf16_gemm_tn_contiguous", _ALIGNMENT[0])),
    "tensorrt_llm": Client(
        "tensorrt-llm",
        ("fp8_gemm_nt", "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms"),
        copy="tensorrt_llm.deep_gemm",
    ),
    "lmdeploy": Client(
        "lmdeploy",
        (
            *("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked", *_HALF[:1]),
            *("m_grouped_bf16_gemm_nt_masked", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "ceil_div"),
            *("get_paged_mqa_logits_metadata", "get_m_alignment_for_contiguous_layout", "set_pdl"),
        ),
    ),
}
"""By the name under which each is imported. What they call is read from their sources."""


def examine() -> list[dict[str, Any]]:
    """The clients that are installed, as plain data."""
    return [found for name, client in CLIENTS.items() if (found := _client(name, client))]


def _client(name: str, client: Client) -> dict[str, Any] | None:
    try:
        version = importlib.metadata.version(client.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    lacks = {call: _why(call) for call in client.calls if call not in deep_gemm.__all__}
    served = len(client.calls) - len(lacks)
    return {"name": name, "version": version, "gets": _gets(client), "served": served, "lacks": lacks}


def _why(call: str) -> str:
    return f"no {REASONS[call]}" if call in REASONS else "absent"


def _gets(client: Client) -> str:
    """Which DeepGEMM a new process of the client would take."""
    if client.elsewhere:
        return f"{client.elsewhere}; this library after deep_gemm.compat.enable()"
    first = f"this library, by import {deep_gemm.__name__}"
    found = find(deep_gemm.__name__)
    if found is None or found.origin != deep_gemm.__file__:
        first = f"another {deep_gemm.__name__}, {found.origin if found else 'which cannot be found'}"
    if client.copy and _has(client.copy):
        return f"{first}; {client.copy} is its own until deep_gemm.compat.enable()"
    return first


def find(name: str) -> ModuleSpec | None:
    """What an import of ``name`` would find that is not in the table of modules yet."""
    for finder in sys.meta_path:
        spec: ModuleSpec | None = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _has(package: str) -> bool:
    """Whether a package is installed inside another one, which is not imported."""
    top, *parts = package.split(".")
    spec = PathFinder.find_spec(top)
    places = (spec.submodule_search_locations if spec else None) or ()
    return any(Path(place, *parts, "__init__.py").is_file() for place in places)


def lines(found: dict[str, Any]) -> list[str]:
    """A client in words."""
    count = found["served"] + len(found["lacks"])
    lines = [f"{found['name']} {found['version']} gets {found['gets']}"]
    text = f"this library has {found['served']} of the {counted(count, 'function')} that it calls"
    for why in dict.fromkeys(found["lacks"].values()):
        text += f"; {', '.join(call for call, reason in found['lacks'].items() if reason == why)}: {why}"
    return [*lines, text]
