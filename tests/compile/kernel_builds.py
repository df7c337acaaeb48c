"""The real compilers for tests of our kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from deep_gemm import engine
from deep_gemm.jit import Binary, Builder, sass
from deep_gemm.jit.compilers import Compiler, Nvcc, choose, find_all
from deep_gemm.params import KernelParams
from deep_gemm.settings import settings

KINDS = ("nvrtc", "nvcc")


def open_compiler(kind: str) -> Compiler:
    """NVRTC, which is one of our dependencies; NVCC or a skip."""
    if kind == "nvrtc":
        with settings.override(use_nvrtc=True):
            return choose()
    found = [found for found in find_all() if found.kind == "nvcc"]
    usable = next((f for f in found if f.usable), None)
    if usable is None:
        pytest.skip("; ".join(f"{f.path}: {f.why}" for f in found) or "nvcc is not installed")
    return Nvcc(usable.path)


@dataclass(frozen=True)
class Built:
    """A kernel and its disassembly."""

    binary: Binary
    sass: str


def build_all(compiler: Compiler, root: Path, cases: list[KernelParams]) -> Iterator[dict[KernelParams, Future[Built]]]:
    """Every case on its way through `compiler`, as many at a time as there are cores. One that fails to compile fails
    the tests that ask for it, and no others."""
    builder = Builder(root, compiler)

    def build(params: KernelParams) -> Built:
        binary = builder.build(engine.build_request(params))
        return Built(binary, sass(binary.cubin))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {params: pool.submit(build, params) for params in cases}
        pool.shutdown(cancel_futures=True)
