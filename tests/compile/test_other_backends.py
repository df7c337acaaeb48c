"""Triton's and TileLang's kernels compile for sm_90a without a GPU, and use wgmma and TMA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deep_gemm import backends
from deep_gemm.settings import child_environment

TRITON = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deep_gemm.backends import triton_gemm, triton_mode, triton_rows

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
build(triton_rows._add_gelu, {"x": "*bf16", "y": "*bf16", "out": "*bf16", "size": "i32"}, triton_rows.BLOCKS[0])
print(json.dumps(found))
"""

TILELANG = """
import json, tilelang
from tilelang import tvm
from deep_gemm.backends import tilelang_gemm, tilelang_rows

target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
found = {}
for factory, sizes in (
    (tilelang_gemm.half, (70, 512, 256, "bfloat16")), (tilelang_gemm.fp8, (70, 512, 256)),
    (tilelang_rows._add_gelu, (2100,)), (tilelang_rows._mul_add, (2100,)), (tilelang_rows._swiglu, (3, 700)),
    (tilelang_rows._rms_norm, (3, 700, 1e-6)), (tilelang_rows._layer_norm, (3, 700, 1e-5)),
):
    with target:
        source = tilelang.lower(factory.jit_impl.get_tir(*sizes), target=target).kernel_source
    name = factory.jit_impl.func.orig_func.__name__
    found[name] = [text for text in ("tl::wgmma_ss", "tl::tma_load") if text in source]
print(json.dumps(found))
"""


def run(code: str) -> dict[str, list[str]]:
    environment = child_environment("TRITON_INTERPRET")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif("triton" in backends.absent(), reason="Triton is not installed")
def test_tritons_kernels_use_tensor_cores_and_tma() -> None:
    code = TRITON.replace("import json, triton\n", "import json, triton  # before ours: to be compiled\n")
    found = run(code)
    assert found.pop("_half") == found.pop("_fp8") == ["wgmma.mma_async", "cp.async.bulk.tensor"]
    assert found == {"_add_gelu": []}


@pytest.mark.skipif("tilelang" in backends.absent(), reason="TileLang is not installed")
def test_tilelangs_kernels_use_tensor_cores_and_tma() -> None:
    found = run(TILELANG)
    assert found.pop("half") == found.pop("fp8") == ["tl::wgmma_ss", "tl::tma_load"]
    assert len(found) == 5
