"""The kernels that are no GEMMs of the selector: those that prepare operands, casts, indexer logits, the prenorm
product, products of MXFP4 weights, and what sends tokens to experts and adds their results."""

from __future__ import annotations

from collections.abc import Mapping

from .. import spec

OTHERS: Mapping[type, tuple[str, str, str]] = {
    spec.CopySpec: ("copy_rows", "helpers", "COPY_ROWS"),
    spec.KGroupMapsSpec: ("k_group_maps", "helpers", "K_GROUP_MAPS"),
    spec.QuantizeSpec: ("quantize", "quantize_kernels", "QUANTIZE"),
    spec.RowsSpec: ("rows", "row_kernels", "ROWS"),
    spec.TransposeBytesSpec: ("transpose_bytes", "helpers", "TRANSPOSE_BYTES"),
    spec.TransposeSpec: ("transpose_scales", "helpers", "TRANSPOSE_SCALES"),
    spec.LogitsSpec: ("sm90_fp8_mqa_logits", "sm90_fp8_mqa_logits", "PROMPT_LOGITS"),
    spec.PagedLogitsSpec: ("sm90_fp8_paged_mqa_logits", "sm90_fp8_paged_mqa_logits", "PAGED_LOGITS"),
    spec.LogitsScheduleSpec: ("paged_mqa_logits_metadata", "helpers", "LOGITS_SCHEDULE"),
    spec.PrenormSpec: ("sm90_tf32_hc_prenorm_gemm", "sm90_tf32_hc_prenorm_gemm", "PRENORM"),
    spec.Fp4Spec: ("sm90_fp4_gemm", "sm90_fp4_gemm", "FP4"),
    spec.DispatchSpec: ("moe_dispatch", "moe_kernels", "DISPATCH"),
    spec.CombineSpec: ("moe_combine", "moe_kernels", "COMBINE"),
    spec.DotsSpec: ("moe_dots", "moe_kernels", "DOTS"),
    spec.RouteSpec: ("moe_route", "moe_kernels", "ROUTE"),
    spec.ActivateSpec: ("moe_activate", "moe_kernels", "ACTIVATE"),
    spec.MeetSpec: ("moe_meet", "moe_ranks", "MEET"),
    spec.PullSpec: ("moe_pull", "moe_ranks", "PULL"),
    spec.ReturnSpec: ("moe_return", "moe_ranks", "RETURN"),
}
"""What each computes; its name, the module that has it, and what it is called there. A process imports only the modules
whose kernels it needs: all together would take a third of a first call."""
