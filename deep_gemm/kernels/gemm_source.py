"""The source of a GEMM kernel: its name, its template's variables, and its parameters."""

from __future__ import annotations

import re
from dataclasses import replace

from ..params import KernelParams
from . import groups
from .base import Argument, parameters
from .template import Template, turns
from .tiles import segments

SCALE_PARAMETERS = {
    "none": (),
    "1d1d": parameters("TensorMap map_scale_a, TensorMap map_scale_b"),
    "1d2d": parameters("const float* scale_b=sfb, i64 scale_b_stride_n, i64 scale_b_stride_k, TensorMap map_scale_a"),
    "rowwise": parameters("const float* scale_a=sfa, i64 scale_a_stride, const float* scale_b=sfb, i64 scale_b_stride"),
}
"""TMA loads scales of 1x128. Threads read all others, with a stride of zero where all rows share one scale."""

NAMES = {
    "e4m3": "fp8",
    "bf16": "bf16",
    "f16": "fp16",
    "kk": "nt",
    "km": "nn",
    "mm": "tn",
    "mk": "tt",
    "none": "",
    "reads": "add",
    "reduces": "reduce",
}
"""In names of kernels: dtypes, BLAS names of majors, and ways to add C."""

_CONSTANTS = {
    "1d1d": "k1D1D",
    "1d2d": "k1D2D",
    "rowwise": "kRowwise",
    "bf16": "kBf16",
    "f16": "kF16",
    "f32": "kF32",
    "e4m3": "kE4m3",
    "reads": "kReads",
    "reduces": "kReduces",
    "contiguous": "kIndex",
    "psum": "kPsum",
    "masked": "kMasked",
    "k": "kAlongK",
    "batched": "kBatched",
    "summed": "kSummed",
    "summed in parts": "kSummedInParts",
    "heads": "kHeads",
}
"""In device code: scalings, elements of D, ways to add C, and forms of groups."""

_HEADS = {
    "none": "",
    "k": "k_grouped",
    "batched": "batched",
    "heads": "skip_head_mid",
    "summed": "bmn_bnk_mn_gemm_impl",  # profilers of DeepGEMM's callers look for this name
}
"""The beginnings of kernels' names, by the form of groups; that of all others is ``m_grouped``."""

_RASTERS = {
    "none": "Raster",
    "heads": "Raster",
    "k": "DepthRaster",
    "batched": "BatchRaster",
    "summed": "SumRaster",
}
"""Types of the order of tiles, by the form of groups; that of all others is ``GroupRaster``."""

_MMA_TYPES = {"e4m3": "k32.f32.e4m3.e4m3", "bf16": "k16.f32.bf16.bf16", "f16": "k16.f32.f16.f16"}


def entry(params: KernelParams, rules: Template, prefix: str, tile_prefix: str) -> str:
    """Such as ``fp8_gemm_128x128_s5_p2_c2x1_tma`` or ``m_grouped_bf16_gemm_nt_128x256_s4_masked_g32_tma``."""
    p, c = params, params.gemm
    head = f"{NAMES[p.dtype]}_gemm"
    if p.dtype == "e4m3":
        kind = [prefix or f"{head}_{p.scaling}_{p.output}"]
    else:
        kind = [head, NAMES[p.majors], p.output if p.output != p.dtype else ""]
    splits = c.cluster_k if rules.scales_have_edges or c.swap_ab else 0
    k = f"k{c.cluster_k}x{c.consumers_k}" if splits else f"k{c.cluster_k}"
    parts = [
        _HEADS.get(p.grouping, "m_grouped"),
        *kind,
        NAMES[p.accumulate],
        f"{tile_prefix}{c.block_m}x{c.block_n}_s{c.num_stages}",
        f"p{c.num_partials}" if rules.names_partials else "",
        f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_m * c.cluster_n > 1 else "",
        k if c.k_splits > 1 else "",
        f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        "" if c.persistent else "once",
        "b1" if c.buffers == 1 else "",
        "parts" if c.parts else "",
        "" if p.grouping in _HEADS else p.grouping,
        f"g{p.segments}" if p.grouping in groups.WITH_TABLE else "",
        re.sub(r"\W", "_", p.epilogue.label) if p.epilogue else "",
        p.store,
        *(f"{letter}{size}" for letter, size in zip("mnk", p.shape, strict=True) if size),
    ]
    return "_".join(filter(None, parts))


def constants(params: KernelParams, rules: Template) -> dict[str, str | int | bool]:
    """Those that all templates have, and those that this one names."""
    p, c = params, params.gemm
    producer, consumer = rules.registers(c)
    majors = p.majors[::-1] if c.swap_ab else p.majors  # of the operands of wgmma
    buffers, late = rules.staging(p)
    steps = {"k": "kStepKMajor", "m": "kStepMnMajor"}
    own: dict[str, str | int | bool] = {
        "block_n": c.block_n,
        "cluster_m": c.cluster_m,
        "cluster_n": c.cluster_n,
        "cluster_k": c.cluster_k,
        "num_partials": c.num_partials,
        "turns": turns(c),
        "persistent": c.persistent,
        "min_ctas": rules.min_ctas(c),
        "scaling": _CONSTANTS.get(p.scaling, ""),
        "element": _CONSTANTS[p.output],
        "accumulate": _CONSTANTS.get(p.accumulate, "kNothing"),
        "buffers": buffers,
        "late": late,
        "swapped": c.swap_ab,
        "mn_major_a": p.majors[0] == "m",
        "mn_major_b": p.majors[1] == "m",
        "grouping": _CONSTANTS.get(f"{p.grouping} in parts" if c.parts else p.grouping, "kUngrouped"),
        "segments": p.segments,
        "a_rows": groups.a_rows(p.grouping, p.dtype, c),
    }
    return {
        "block_m": c.block_m,
        "num_stages": c.num_stages,
        "num_consumers": c.num_consumers,
        "num_threads": c.num_threads,
        "producer_registers": producer,
        "consumer_registers": consumer,
        **{f"shape_{letter}": size for letter, size in zip("mnk", p.shape, strict=True)},
        "tma_store": p.store == "tma",
        "mma_n": rules.mma_n(c),
        "mma_types": _MMA_TYPES[p.dtype],
        "mma_majors": "" if p.dtype == "e4m3" else "".join(f", {int(major == 'm')}" for major in majors),
        "step_a": steps[majors[0]],
        "step_b": steps[majors[1]],
        **{name: own[name] for name in rules.constant_names},
    }


def arguments(params: KernelParams, rules: Template) -> tuple[Argument, ...]:
    """Parameters in the order of first use: those of the prologue share a line of the constant cache, and each line
    takes 110 cycles. Each operand also has a map of edge boxes (see ``edge_boxes.cuh``), which have ``last_rows``
    and ``last_columns`` rows; those of MN-major operands are the same. ``early_stages`` stages of B are loaded
    before the previous kernel has ended; 0 means that it may still write B and its scales. ``evict_first`` is a set
    of bits (see ``tma.cuh``). With groups along K, FP8 reads tensor maps of A and B from memory."""
    p = params
    order = _RASTERS.get(p.grouping, "GroupRaster")
    head = f"u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, {order} raster, "
    front = parameters(f"{head}u32 evict_first")
    scales, map_d = SCALE_PARAMETERS[p.scaling], _maps("map_d") if rules.has_map_d(p) else ()
    if rules.scales_have_edges:
        read, loaded = (tuple(x for x in scales if x.is_value == kind) for kind in (True, False))
        b, more = "" if rules.few_tokens else "map_b[0]", range(1, len(segments(p.gemm.block_n)))
        return (
            *(*front, *read, *parameters("u8* d, i64 d_stride"), *_maps("map_a")),
            *(Argument("map_b", "TensorMap", field=b), *loaded, *map_d),
            *(*_maps("map_a_last, map_b_last"), *(replace(x, name=f"{x.name}_last") for x in loaded)),
            *(Argument(f"map_b_{index}", "TensorMap", field=f"map_b[{index}]") for index in more),
        )
    reads = p.accumulate == "reads"
    c = parameters("const u8* c, i64 c_stride") if reads else ()
    in_memory = p.grouping == "k" and p.dtype == "e4m3"
    operands, lasts = ((), ()) if in_memory else (_maps("map_a, map_b"), _maps("map_a_last, map_b_last"))
    found = (*front, *parameters("u8* d, i64 d_stride"), *c, *scales, *operands, *map_d, *lasts)
    if rules.edge_map_d:
        found += _maps("map_d_last")
    if p.grouping == "k":
        found += parameters("u32 groups, const int* layout")
        found += parameters("const TensorMap* maps") if in_memory else ()
    if p.grouping in ("k", "batched"):
        found += parameters("i64 d_stride_g") + (parameters("i64 c_stride_g") if reads else ())
    elif p.grouping in groups.WITH_TABLE:
        found += parameters("u32 groups, u32 alignment, const int* layout")
    if p.scaling == "1d2d" and (p.grouping == "batched" or (p.grouping in groups.WITH_TABLE and p.grouping != "k")):
        found += parameters("i64 scale_b_stride_g")
    if p.gemm.parts:
        found += parameters("u8* memory")
    return found + (parameters("HeadColumns heads") if p.grouping == "heads" else ())


def _maps(names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "TensorMap") for name in names.split(", "))
