"""Every installed backend gives right results on a GPU, with small and odd shapes, and can be timed in every mode."""

import pytest

from deep_gemm import backends
from deep_gemm.backends import profiler

SHAPES = {3: ((70, 264, 272), (256, 512, 1024)), 4: ((3, 70, 264, 272), (5, 300, 512, 1024))}
OTHERS = {
    "fp8_mqa_logits": ((70, 264), (300, 8192)),
    "fp8_paged_mqa_logits": ((7, 1, 264), (40, 3, 2000)),
    "tf32_hc_prenorm_gemm": ((70, 1024), (137, 28672)),
    "bf16_linear_gelu": SHAPES[3],
    **{f"{kind}_fp4_gemm_nt": ((70, 264, 288), (256, 512, 1024)) for kind in ("fp8", "bf16")},
    **{op: ((3, 70, 264, 288), (5, 300, 512, 1024)) for op in backends.operation_names() if "fp4_gemm_nt_" in op},
    **{op: ((70, 3, 272, 264), (300, 5, 1024, 512)) for op in backends.operation_names() if "einsum" in op},
    **{op: ((70, 272), (300, 7168)) for op in backends.operation_names() if op.startswith("fused_")},
}


@pytest.mark.parametrize("op", backends.operation_names())
def test_every_backend_is_right(op: str) -> None:
    report = backends.compare(op, OTHERS.get(op) or SHAPES[len(backends.get_operation(op).dims)])
    wrong = [group for group in report.left_out() if group.shapes]
    # cuBLASLt's block scales need M a multiple of 4; TMA in TileLang and Triton needs rows at multiples of 16 bytes.
    refused = [group for group in wrong if not any(row.status == "wrong" for row in report.results)]
    assert wrong == refused, [str(group) for group in wrong]
    ran = {row.backend for row in report.results if row.status in ("ok", "easier")}
    assert {"torch", "cuda", *(() if "grouped" in op or op in OTHERS else ("cublaslt",))} <= ran, [
        str(group) for group in wrong
    ]
    for name in ("triton", "tilelang"):
        if name in backends.of(op):
            assert name in ran, [str(group) for group in wrong]
    for row in report.results:
        assert row.timing is None or 0.5 < row.timing.us < 1e5
        assert row.timing is None or (row.timing.of_roof or 0) < 1.2


@pytest.mark.parametrize("mode", profiler.MODES)
def test_every_mode(mode: str) -> None:
    report = backends.compare("bf16_gemm_nt", [(64, 4096, 4096)], ["cuda", "cublaslt"], mode=mode)
    assert [row.status for row in report.results] == ["ok", "ok"]
    assert all(row.timing and row.timing.mode == mode and row.timing.samples >= 10 for row in report.results)
    assert report.roof is not None
