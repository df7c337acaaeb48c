"""Calls use the kernels that were compiled ahead."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from containers import read_only

import deep_gemm
from deep_gemm.aot import build
from deep_gemm.aot.build import precompile
from deep_gemm.aot.workload import GemmShape
from deep_gemm.jit.builder import default_builder
from deep_gemm.settings import settings
from deep_gemm.testing import calc_diff, random_operands


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


def test_after_precompiling_no_number_of_tokens_compiles(cache_dir: Path) -> None:
    n, k, max_m = 1488, 1552, 700
    summary = deep_gemm.precompile((n, k), max_m=max_m)
    assert not summary.failed
    with settings.override(forbid_compile=True):
        for m in {1, 5, 17, 100, 129, 250, 517, 700, *random.Random(0).sample(range(1, max_m), 12)}:
            a, b, x, y = random_operands(m, n, k)
            d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt(a, b, d)
            assert calc_diff(d, x.float() @ y.float().T) < 1e-3, m


def test_fp8_output_of_any_number_of_tokens_compiles_nothing(cache_dir: Path) -> None:
    """In two launches for few tokens and in one for many."""
    n, k = 1536, 2112
    summary = deep_gemm.precompile((n, k), op="bf16_gemm_nt", max_m=1100, epilogue="swiglu+fp8")
    assert not summary.failed
    launches = set()
    with settings.override(forbid_compile=True):
        for m in (1, 5, 17, 64, 65, 200, 341, 342, 500, 1100):
            a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
            values = torch.empty(m, n // 2, device="cuda", dtype=torch.float8_e4m3fn)
            d = values, torch.empty(n // 256, m, device="cuda").t()
            deep_gemm.bf16_gemm_nt(a, b, d, epilogue=deep_gemm.Epilogue(activation="swiglu"))
            launches.add(deep_gemm.debug_info()["castings"][-1]["launches"])
    assert launches == {1, 2}


CONTAINER = """
import json, sys, torch, deep_gemm
from deep_gemm.testing import calc_diff, random_operands
worst = 0.0
for m, n, k in json.loads(sys.argv[1]):
    a, b, x, y = random_operands(m, n, k)
    d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, d)
    worst = max(worst, float(calc_diff(d, x.float() @ y.float().T)))
print(json.dumps({"worst": worst, "statistics": deep_gemm.cache_info()["statistics"]}))
"""


@pytest.mark.parametrize("root", ["as it is", "read-only"])
def test_a_pack_is_all_that_a_container_needs(root: str, tmp_path: Path) -> None:
    """There is no compiler (the named one does not exist, so a search would raise) and no home. The cache directory, or
    with a read-only root every directory, cannot be written."""
    shapes = [GemmShape(1, 1488, 1680), GemmShape(77, 1488, 1680), GemmShape(1000, 1488, 1680)]
    pack = tmp_path / "kernels.dgpack"
    with settings.override(cache_dir=tmp_path / "cache"):
        build.pack(build.precompile(shapes), pack)
    bare = tmp_path / "bare"
    bare.mkdir(mode=0o500)
    before = read_only(tmp_path) if root == "read-only" else []
    environment = {
        "DG_JIT_PRECOMPILED": str(pack),
        "DG_JIT_FORBID_COMPILE": "1",
        "DG_JIT_NVCC_COMPILER": "/nonexistent",
        "DG_JIT_CACHE_DIR": str(bare / "cache"),
        **{name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")},
    }
    command = [*before, sys.executable, "-c", CONTAINER, json.dumps([(shape.m, shape.n, shape.k) for shape in shapes])]
    result = subprocess.run(command, env=environment, cwd=bare, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["worst"] < 1e-3
    assert found["statistics"]["compilations"] == found["statistics"]["misses"] == 0
    assert found["statistics"]["hits"]["pack"] >= len(shapes)
    assert not (bare / "cache").exists()
