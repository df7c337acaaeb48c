"""What a deployment may cost: kernels, compiling them, the slowest of them, importing (`benchmarks/budgets.json`)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import deep_gemm
from deep_gemm import engine
from deep_gemm.aot.build import choose
from deep_gemm.aot.workload import model_layers, shapes
from deep_gemm.benchmarks.shapes import DEEPSEEK_V3
from deep_gemm.jit import Builder, BuildRequest
from deep_gemm.jit.compilers.nvrtc import Nvrtc
from deep_gemm.params import KernelParams
from deep_gemm.select import representatives

BUDGETS = json.loads((Path(__file__).parents[2] / "benchmarks" / "budgets.json").read_text())

TRIAL = """
extern "C" __global__ void __launch_bounds__(128) trial(const float* in, float* out) {
  float sums[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = 0;
  for (int block = 0; block < 64; ++block) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
#pragma unroll
      for (int j = 0; j < 16; ++j) sums[i] += in[block * 1024 + i * 16 + j] * in[j * 128 + threadIdx.x];
    }
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i * 128 + threadIdx.x] = sums[i];
}
"""
"""A kernel of fixed size. Builds are compared with it, so that a slow machine is not a slow build."""


@pytest.fixture(scope="module")
def kernels() -> list[KernelParams]:
    """All that DeepSeek-V3's dense layers can ask for."""
    return list(choose(shapes(model_layers(DEEPSEEK_V3), representatives(16384))).kernels)


def test_few_kernels_serve_a_model(kernels: list[KernelParams]) -> None:
    assert 20 <= len(kernels) <= BUDGETS["kernels"]


@pytest.mark.compile
def test_all_of_them_compile_within_the_budget(kernels: list[KernelParams], tmp_path: Path) -> None:
    builder = Builder(root=tmp_path, compiler=Nvrtc())
    requests = [engine.build_request(params) for params in kernels]
    start = time.process_time()
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(builder.build, requests))
    assert {binary.layer for binary in built} == {"compiled"}
    assert time.process_time() - start <= BUDGETS["compile_cpu_seconds"]


@pytest.mark.compile
def test_no_build_is_much_slower_than_a_trial_kernel(kernels: list[KernelParams], tmp_path: Path) -> None:
    largest = sorted(kernels, key=lambda params: params.config.tile[0] * params.config.tile[1])[-6:]
    compiler = Nvrtc()

    def seconds(request: BuildRequest, index: int) -> float:
        builder = Builder(root=tmp_path / str(index), compiler=compiler)
        start = time.process_time()
        builder.build(request)
        return time.process_time() - start

    trial = BuildRequest(name="trial", source=TRIAL, arch="sm_90a", meta={})
    least = min(seconds(trial, index) for index in range(3))
    slowest = max(
        min(seconds(engine.build_request(params), 10 * n + i) for i in range(2)) for n, params in enumerate(largest, 1)
    )
    assert slowest <= BUDGETS["slowest_build_over_trial"] * least, (slowest, least)


def test_importing_is_cheap() -> None:
    code = (
        "import torch, sys; before = len(sys.modules); import deep_gemm; imported = len(sys.modules); "
        "deep_gemm.fp8_gemm_nt; print(imported - before, len(sys.modules) - imported)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    imported, first = map(int, found.stdout.split())
    assert imported <= BUDGETS["import_modules"]
    assert first <= BUDGETS["first_function_modules"]
    assert deep_gemm.__version__
