"""What a deployment may cost: how many kernels it needs, and importing (`benchmarks/budgets.json`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import deep_gemm
from deep_gemm.aot.build import choose
from deep_gemm.aot.workload import model_layers, shapes
from deep_gemm.benchmarks.shapes import DEEPSEEK_V3, LLAMA_3
from deep_gemm.params import KernelParams
from deep_gemm.select import representatives

BUDGETS = json.loads((Path(__file__).parents[2] / "benchmarks" / "budgets.json").read_text())


@pytest.fixture(scope="module")
def kernels() -> list[KernelParams]:
    """All that DeepSeek-V3's dense layers can ask for."""
    return list(choose(shapes(model_layers(DEEPSEEK_V3), representatives(16384))).kernels)


def test_few_kernels_serve_a_model(kernels: list[KernelParams]) -> None:
    assert 20 <= len(kernels) <= BUDGETS["kernels"]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", LLAMA_3)
def test_few_kernels_serve_a_bf16_model(model: str, tp: int) -> None:
    """Of every fourth number of tokens that is ranked for itself, which ask for at most five kernels fewer than all."""
    layers = model_layers(LLAMA_3[model], tp)
    work = choose(shapes(layers, representatives(16384)[::4]))
    assert {layer.op for layer in layers} == {"bf16_gemm_nt"}
    assert not work.impossible
    assert 15 <= len(work.kernels) <= BUDGETS["bf16_kernels"][model][str(tp)]


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
