"""Kernels that are built for GPUs other than Hopper, compiled for each of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_builds import open_compiler

from deep_gemm import arch, kernels
from deep_gemm.jit import Builder
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

OTHERS = [name for name in arch.names() if name != arch.DEFAULT.name]


def cases(target: str) -> list[list[KernelParams]]:
    """Those of each kernel that can be built for this target."""
    every = [kernel for kernel in kernels.registry().values() if target in kernel.archs]
    return [kernel.cases(arch.get(target)) for kernel in every]


def problems(folder: Path, found: list[KernelParams]) -> dict[str, list[str]]:
    """What is wrong with the binaries of these, by name, where something is."""
    builder = Builder(folder, open_compiler("nvrtc"))
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda params: builder.build(engine.build_request(params)), found))
    return {binary.name: binary.resources.problems() for binary in built if binary.resources.problems()}


@pytest.mark.parametrize("target", OTHERS[::3])
def test_one_kernel_of_each_kind_compiles_without_spills(target: str, tmp_path: Path) -> None:
    assert problems(tmp_path, [found[0] for found in cases(target)]) == {}


@pytest.mark.long
@pytest.mark.limit(900)
@pytest.mark.parametrize("target", OTHERS)
def test_every_kernel_compiles_without_spills(target: str, tmp_path: Path) -> None:
    assert problems(tmp_path, [params for found in cases(target) for params in found]) == {}
