"""The budgets of a deployment (`benchmarks/budgets.json`): number of kernels, compile time, imports."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import compile_cost
import pytest
from census import dense_layers

import deep_gemm
from deep_gemm.aot import attention_layers
from deep_gemm.aot.build import choose
from deep_gemm.aot.layers import BATCHED_OPS, Layer
from deep_gemm.aot.workload import for_every_m, plan, shapes
from deep_gemm.arch import SM90
from deep_gemm.bench.shapes import DEEPSEEK_V3
from deep_gemm.jit.compilers import Compiler
from deep_gemm.kernels.quantize_kernels import Variant
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.select import representatives
from deep_gemm.spec import PrenormSpec

pytestmark = pytest.mark.long

_LLAMA_3: dict[str, int | str] = {"num_key_value_heads": 8, "torch_dtype": "bfloat16"}
LLAMA_3: dict[str, dict[str, int | str]] = {
    "8B": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": _LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
"""Of the published `config.json`, in BF16."""

BUDGETS = json.loads((Path(__file__).parents[2] / "benchmarks" / "budgets.json").read_text())


@pytest.fixture(scope="module")
def kernels() -> list[KernelParams]:
    return compile_cost.kernels()


def test_few_kernels_serve_a_model(kernels: list[KernelParams]) -> None:
    assert 20 <= len(kernels) <= BUDGETS["kernels"]


def test_few_kernels_serve_a_model_with_its_experts() -> None:
    """DeepSeek-V3 on one of eight GPUs, TP 8 and EP 8, for every fourth bucket of M. All buckets need one kernel more:
    61 in all, of which six are grouped (two for each form)."""
    found = compile_cost.serving_kernels(step=4)
    grouped = [params for params in found if params.kernel == "sm90_fp8_grouped"]
    assert 40 <= len(found) <= BUDGETS["serving_kernels"]
    assert 3 <= len(grouped) <= BUDGETS["expert_kernels"]
    batched = [params for params in found if params.grouping == "batched"]
    assert 3 <= len(batched) <= BUDGETS["batched_kernels"]
    assert {params.grouping for params in grouped} == {"contiguous", "psum", "masked"}


@pytest.mark.parametrize("tp", [1, 8])
def test_few_kernels_serve_the_products_of_each_head(tp: int) -> None:
    """Of MLA (DeepSeek-V3), for every M."""
    layers = [layer for layer in plan(DEEPSEEK_V3, tp).served if layer.op in BATCHED_OPS]
    work = choose(shapes(for_every_m(layers, 16384), ()))
    assert len(layers) == 2
    assert not work.impossible
    assert 3 <= len(work.kernels) <= BUDGETS["batched_kernels"]


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    return compile_cost.nvrtc()


def in_trials(compiler: Compiler, params: KernelParams, turns: int) -> float:
    """CPU time of compiling a kernel, relative to the trial kernel: machines differ, and other work runs on them."""
    took, trial = compile_cost.cpu_seconds(compiler, [engine.build_request(params), compile_cost.trial()], turns)
    return took / trial


@pytest.mark.compile
def test_a_first_build_is_short(kernels: list[KernelParams], nvrtc: Compiler) -> None:
    slowest = max(kernels, key=compile_cost.size)
    assert in_trials(nvrtc, slowest, turns=2) <= BUDGETS["slowest_in_trials"]


@pytest.mark.compile
def test_kernels_compile_fast(kernels: list[KernelParams], nvrtc: Compiler) -> None:
    """Measured with three of them. `python benchmarks/compile_cost.py` measures all."""
    each = [in_trials(nvrtc, params, turns=2) for params in compile_cost.sample(kernels)]
    assert statistics.mean(each) <= BUDGETS["sample_in_trials"]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", LLAMA_3)
def test_few_kernels_serve_a_bf16_model(model: str, tp: int) -> None:
    """For every fourth bucket of M. All buckets need 11 to 16 kernels more."""
    layers = plan(LLAMA_3[model], tp).served
    work = choose(shapes(layers, representatives(16384)[::4]))
    assert {layer.op for layer in layers} == {"bf16_gemm_nt"}
    assert not work.impossible
    assert 15 <= len(work.kernels) <= BUDGETS["bf16_kernels"][model][str(tp)]


def test_few_kernels_train_a_model() -> None:
    """Forward, gradients and casts of DeepSeek-V3's dense layers, for every fourth bucket of M."""
    work = choose(shapes(dense_layers(DEEPSEEK_V3), representatives(16384)[::4], training=True))
    assert not work.impossible
    kinds = {params.kernel for params in work.kernels}
    assert {"sm90_fp8_gemm", "sm90_fp8_scaled", "quantize"} <= kinds
    casts = [Variant(*params.options) for params in work.kernels if params.options]  # type: ignore[arg-type]
    assert not any(cast.gathered or cast.factors for cast in casts), "only experts need these"
    assert 40 <= len(work.kernels) <= BUDGETS["training_kernels"]


def test_few_kernels_serve_an_indexer_and_a_prenorm_product() -> None:
    indexer = [Layer("indexer.wq_b", 64 * 128, 1536), Layer("indexer.weights_proj", 64, 7168)]
    assert 1 <= len(attention_layers.kernels_of(indexer, SM90)) <= BUDGETS["indexer_kernels"]
    specs = [PrenormSpec(m, 24, 28672, splits, 132) for m in range(1, 20000, 7) for splits in (1, 4, 16)]
    assert len({PRENORM.config_of(spec, SM90) for spec in specs}) <= 6


@pytest.mark.parametrize("operation", ["fp8_gemm_nt", "bf16_gemm_nt"])
def test_a_cold_call_enters_few_functions(operation: str) -> None:
    script = Path(__file__).parents[1] / "cold_calls.py"
    found = subprocess.run([sys.executable, script, operation], capture_output=True, text=True, check=True, timeout=120)
    first, next_m = json.loads(found.stdout)
    most = BUDGETS["python_calls"][operation]
    assert 100 < first <= most[0]
    assert 100 < next_m <= most[1]


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
