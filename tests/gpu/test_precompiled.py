"""What is compiled ahead is what a call then uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deep_gemm
from deep_gemm.ahead import precompile
from deep_gemm.jit.builder import default_builder
from deep_gemm.testing import random_operands
from deep_gemm.workload import GemmShape


@pytest.mark.parametrize(("m", "n"), [(1, 1488), (100, 1488), (1000, 1488), (100, 1491)])
def test_a_call_after_precompiling_compiles_nothing(m: int, n: int, cache_dir: Path) -> None:
    # Sizes that no other test uses, so that no plan exists yet.
    shape = GemmShape(m, n, 1456)
    summary = precompile([shape])
    assert not summary.failed
    assert summary.count("compiled") > 0
    before = default_builder().stats["compiled"]
    a, b, _, _ = random_operands(shape.m, shape.n, shape.k)
    d = torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, d)
    torch.cuda.synchronize()
    assert default_builder().stats["compiled"] == before
