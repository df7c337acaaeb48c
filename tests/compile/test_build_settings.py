"""What settings and edited headers do to a build. In a file of its own: while kernels of a file are built by threads,
each `settings.override` would reach them."""

from dataclasses import replace
from pathlib import Path

import pytest
from chosen import SWAPPED, find_config, kernel_name, make_params
from headers import edited_headers
from kernel_builds import open_compiler

from deep_gemm import kernels
from deep_gemm.errors import CompileError
from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import Compiler
from deep_gemm.jit.generator import include_dir, render
from deep_gemm.kernels.hopper import ffma_bursts as bursts
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.settings import settings


@pytest.fixture(scope="module", params=["nvrtc", pytest.param("nvcc", marks=pytest.mark.long)])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return open_compiler(request.param)


@pytest.fixture
def builder(compiler: Compiler, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "kernels", compiler)


@pytest.mark.parametrize(
    "params",
    [
        make_params(find_config(block_m=128, block_n=64)),
        make_params(find_config(block_m=64, block_n=16), store="direct"),
        make_params(find_config(block_m=64, block_n=32, cluster_k=2)),
        make_params(find_config(SWAPPED, block_m=16, cluster_k=2)),
    ],
    ids=kernel_name,
)
def test_shared_memory_that_the_host_counts_otherwise_is_an_error(builder: Builder, params: KernelParams) -> None:
    request, kernel = engine.build_request(params), kernels.get(params.kernel)
    fields = {**kernel.fields(params), "shared_bytes": kernel.shared_bytes(params) + 16}
    with pytest.raises(CompileError, match="the host computed another shared memory size"):
        builder.build(replace(request, source=render(kernel.template_file, fields)))


def test_serialised_products_would_be_seen(builder: Builder, compiler: Compiler, tmp_path: Path) -> None:
    """The check above must be able to fail: here code changes sums while products are still added to them."""
    commit = "    wgmma_commit();\n"
    folder = edited_headers(tmp_path / "include", "fp8_mainloop.cuh", (commit, "    set[0] += 1.0f;\n" + commit))
    broken = Builder(tmp_path / "broken", compiler, folder)
    request = engine.build_request(make_params(find_config(block_m=64, block_n=64)))
    built = broken.build(request)
    assert built.resources.warnings
    with settings.override(ptxas_check=True):
        with pytest.raises(CompileError, match="serialised"):
            broken.build(request)
        assert builder.build(request).resources.warnings == ()


def test_a_debug_build_compiles(builder: Builder) -> None:
    request = engine.build_request(make_params(find_config(block_m=128, block_n=64)))
    plain = builder.build(request)
    with settings.override(debug=True):
        debug = builder.build(request)
    assert debug.key != plain.key
    # The debug build has bounded waits.
    assert debug.cubin != plain.cubin


def test_without_bursts_a_cubin_is_the_compilers_own(builder: Builder, compiler: Compiler) -> None:
    params = make_params(find_config(block_m=64, block_n=16))
    asked = engine.build_request(params)
    edited = builder.build(asked)
    with settings.override(ffma_bursts=False):
        own = builder.build(engine.build_request(params))
    flags = compiler.flags(asked.arch)
    assert own.source_path is not None
    made = compiler.compile(asked.name, asked.source, own.source_path, flags, include_dir())
    assert own.cubin == made.cubin != edited.cubin == bursts.in_bursts(made.cubin, asked.name)
    assert own.key != edited.key
