"""Triton's kernels, and those of the plugin in TileLang, compile for sm_90a without a GPU, and use wgmma and TMA."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deep_gemm import backends
from deep_gemm.settings import child_environment

PLUGIN = Path(__file__).parents[2] / "examples" / "tilelang_backend"

TRITON = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deep_gemm.backends import triton_gemm, triton_mode

assert not triton_mode.interpreted
found = {}

def build(kernel, types, config):
    constants = {kernel.arg_names.index(name): value for name, value in config.kwargs.items()}
    signature = types | {name: "constexpr" for name in config.kwargs}
    source = ASTSource(kernel, signature, {(at,): value for at, value in constants.items()})
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    found[kernel.__name__] = [text for text in ("wgmma.mma_async", "cp.async.bulk.tensor") if text in ptx]

def gemm(kernel, dtype, config, more):
    m, n, k = (config.kwargs["BLOCK_" + name] for name in "MNK")
    types = {"a": f"tensordesc<{dtype}[{m},{k}]>", "b": f"tensordesc<{dtype}[{n},{k}]>", "d": "*bf16"} | more
    sizes = {name: "i32" for name in kernel.arg_names if name not in types and name not in config.kwargs}
    build(kernel, types | sizes, config)

gemm(triton_gemm._half, "bf16", triton_gemm.configs(triton_gemm.HALF_TILES, (3,))[0], {})
gemm(triton_gemm._fp8, "fp8e4nv", triton_gemm.configs(triton_gemm.FP8_TILES, (3,))[0], {"sfa": "*fp32", "sfb": "*fp32"})
print(json.dumps(found))
"""

TILELANG = """
import json, tilelang
from tilelang import tvm
from tilelang_backend import gemm

target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
found = {}
for factory, sizes in (
    (gemm.half, (70, 512, 256, "bfloat16")), (gemm.fp8, (70, 512, 256)),
):
    with target:
        source = tilelang.lower(factory.jit_impl.get_tir(*sizes), target=target).kernel_source
    name = factory.jit_impl.func.orig_func.__name__
    found[name] = [text for text in ("tl::wgmma_ss", "tl::tma_load") if text in source]
print(json.dumps(found))
"""


def run(code: str) -> dict[str, list[str]]:
    environment = child_environment("TRITON_INTERPRET") | {"PYTHONPATH": str(PLUGIN)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif("triton" in backends.absent(), reason="Triton is not installed")
def test_tritons_kernels_use_tensor_cores_and_tma() -> None:
    code = TRITON.replace("import json, triton\n", "import json, triton  # before ours: to be compiled\n")
    found = run(code)
    assert found == {name: ["wgmma.mma_async", "cp.async.bulk.tensor"] for name in ("_half", "_fp8")}


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="TileLang is not installed")
def test_tilelangs_kernels_use_tensor_cores_and_tma() -> None:
    found = run(TILELANG)
    assert found == {name: ["tl::wgmma_ss", "tl::tma_load"] for name in ("half", "fp8")}
