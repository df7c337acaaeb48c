"""The real compilers with small kernels: options reach them, and their logs and errors come back."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.errors import CompileError
from deep_gemm.jit import Binary, Builder, BuildRequest, sass
from deep_gemm.jit.compilers import Compiler, find, find_all
from deep_gemm.jit.compilers.nvcc import Nvcc
from deep_gemm.jit.compilers.nvrtc import Nvrtc
from deep_gemm.settings import settings

HEADER = "#pragma once\nconstexpr int twice(int x) { return 2 * x; }\n"
SOURCE = """\
#include "twice.cuh"
extern "C" __global__ void __launch_bounds__(128, 1) kernel_name(float* out, const float* in) {
    __shared__ float tile[128];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[127 - threadIdx.x] * twice(3);
}
"""
SPILLING = """\
extern "C" __global__ void kernel_name(float* out, const float* in, int at) {
    float values[64];
    for (int i = 0; i < 64; ++i) values[i] = in[i];
    for (int i = 0; i < at; ++i) values[(i * at) & 63] += values[(i * i) & 63];
    out[threadIdx.x] = values[at & 63];
}
"""


def compilers() -> list[Compiler]:
    found = {kind: next((f for f in find_all() if f.kind == kind and f.usable), None) for kind in ("nvrtc", "nvcc")}
    # NVRTC is one of our dependencies, so its absence is a failure and not a skip.
    assert found["nvrtc"] is not None
    some: list[Compiler] = [Nvrtc(found["nvrtc"].path, find._nvrtc_version(found["nvrtc"].path))]
    return [*some, Nvcc(found["nvcc"].path)] if found["nvcc"] else some


@pytest.fixture(params=compilers(), ids=lambda compiler: compiler.kind)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    assert isinstance(request.param, Compiler)
    return request.param


@pytest.fixture
def include(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "twice.cuh").write_text(HEADER)
    return folder


def build(root: Path, compiler: Compiler, include: Path, source: str = SOURCE) -> Binary:
    return Builder(root, compiler, include).build(BuildRequest("kernel_name", source, "sm_90a"))


def test_a_kernel_compiles_and_its_resources_are_known(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    built = build(tmp_path / "root", compiler, include)
    assert built.cubin.startswith(b"\x7fELF")
    assert b"kernel_name" in built.cubin
    assert 0 < built.resources.registers <= 64
    assert (built.resources.shared_static, built.resources.barriers, built.resources.stack) == (512, 1, 0)
    assert built.resources.problems() == []
    assert 0 < built.seconds["ptxas"] < built.seconds["compile"]
    assert build(tmp_path / "root", compiler, include).layer == "disk"
    assert "kernel_name" in sass(built.cubin)


def test_two_prefixes_compile_to_one_key(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    built = build(tmp_path / "root", compiler, include)
    shutil.copytree(include, tmp_path / "other" / "include")
    shutil.copytree(tmp_path / "root", tmp_path / "other" / "root")
    moved = build(tmp_path / "other" / "root", compiler, tmp_path / "other" / "include")
    assert (moved.layer, moved.cubin) == ("disk", built.cubin)


def test_a_changed_header_is_another_kernel(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    first = build(tmp_path / "root", compiler, include)
    (include / "twice.cuh").write_text(HEADER.replace("2 *", "5 *"))
    second = build(tmp_path / "root", compiler, include)
    assert second.layer == "compiled"
    assert second.cubin != first.cubin


def test_an_error_comes_with_log_stored_source_and_options(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    with pytest.raises(CompileError, match="could not compile kernel_name") as caught:
        build(tmp_path / "root", compiler, include, SOURCE.replace("tile[127", "tale[127"))
    error = caught.value
    assert error.source_path is not None
    # The message points at a line of a file that exists.
    assert f"{error.source_path}(6): error" in error.log
    assert "tale[127" in Path(error.source_path).read_text().splitlines()[5]
    assert any("sm_90a" in option for option in error.options)
    assert str(error.source_path) in str(error)


def test_a_missing_header_is_an_error_of_the_compiler(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    with pytest.raises(CompileError, match=r"absent\.cuh"):
        build(tmp_path / "root", compiler, include, '#include "absent.cuh"\n' + SOURCE)


def test_local_memory_is_seen_and_refused_on_request(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    with settings.override(ptxas_check=True), pytest.raises(CompileError, match="256 bytes of local memory"):
        build(tmp_path / "root", compiler, include, SPILLING)
    assert build(tmp_path / "root", compiler, include, SPILLING).resources.stack == 256


def test_line_information_names_the_stored_source(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    plain = build(tmp_path / "root", compiler, include)
    with settings.override(lineinfo=True):
        built = build(tmp_path / "root", compiler, include)
    assert built.key != plain.key
    assert built.source_path is not None
    stored = Path(built.source_path)
    assert stored.name.encode() in built.cubin
    assert str(stored.parent).encode() in built.cubin


def test_dumps_and_debug_reach_the_compiler(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    source = SOURCE + '#ifdef DG_DEBUG\n#pragma message "debugging"\n__device__ int debugging = 7;\n#endif\n'
    with settings.override(debug=True, dump_asm=True):
        built = build(tmp_path / "root", compiler, include, source)
    folder = Path(built.source_path or "").parent
    assert ".target sm_90a" in (folder / "kernel.ptx").read_text()
    assert "debugging" in (folder / "kernel.ptx").read_text()
    assert "kernel_name" in (folder / "kernel.sass").read_text()


def test_without_a_place_for_the_source_it_still_compiles(tmp_path: Path, compiler: Compiler, include: Path) -> None:
    (tmp_path / "file").write_text("")
    built = build(tmp_path / "file", compiler, include)
    assert (built.layer, built.source_path) == ("compiled", None)
    assert built.cubin.startswith(b"\x7fELF")


def test_commands_are_printed_on_request(
    tmp_path: Path, compiler: Compiler, include: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with settings.override(print_compiler_command=True, ptxas_verbose=True):
        build(tmp_path / "root", compiler, include)
    said = capsys.readouterr().err
    assert compiler.path in said
    assert str(include) in said
    assert "ptxas info" in said


def test_nvrtc_compiles_in_several_threads(tmp_path: Path, include: Path) -> None:
    nvrtc = compilers()[0]
    shared = Builder(tmp_path / "root", nvrtc, include)
    requests = [BuildRequest("kernel_name", SOURCE + f"// {i}\n", "sm_90a") for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        built = list(pool.map(shared.build, requests))
    # Only a comment differs.
    assert len({binary.key for binary in built}) == 6
    assert {binary.resources for binary in built} == {built[0].resources}


class Watched:
    """The NVRTC library, which records when compilations begin and end."""

    def __init__(self, nvrtc: Nvrtc) -> None:
        self.library = nvrtc._open()
        self.began: list[float] = []
        self.ended: list[float] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.library, name)
        if name != "nvrtcCompileProgram":
            return call

        def timed(*arguments: Any) -> Any:
            self.began.append(time.perf_counter())
            status = call(*arguments)
            self.ended.append(time.perf_counter())
            return status

        return timed


@contextmanager
def compiling(include: Path) -> Iterator[tuple[Watched, threading.Thread]]:
    """A thread that is inside NVRTC, or about to be."""
    nvrtc = compilers()[0]
    assert isinstance(nvrtc, Nvrtc)
    watched = Watched(nvrtc)
    nvrtc._library = watched  # type: ignore[assignment]
    flags = nvrtc.flags("sm_90a")
    thread = threading.Thread(target=nvrtc.compile, args=("kernel_name", SOURCE, "kernel.cu", flags, include))
    thread.start()
    try:
        yield watched, thread
    finally:
        thread.join()


def test_nvrtc_lets_other_threads_run_while_it_compiles(include: Path) -> None:
    ticks = []
    with compiling(include) as (watched, thread):
        while thread.is_alive():
            ticks.append(time.perf_counter())
            time.sleep(0.001)
    # If NVRTC held Python's lock, no tick could fall inside the call.
    assert sum(watched.began[0] < tick < watched.ended[0] for tick in ticks) >= 5


def test_a_fork_waits_for_nvrtc(include: Path) -> None:
    """Otherwise NVRTC's locks would stay taken in the child: about one in ten such children hung."""
    for _ in range(20):  # on a busy machine the compilation may end before this thread looks
        with compiling(include) as (watched, _thread):
            while not watched.began:
                time.sleep(0.0005)
            inside = not watched.ended
            child = os.fork()
            if child == 0:
                os._exit(0 if watched.ended else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if inside:
            return
    pytest.fail("it was too quick for this test, twenty times")


def test_the_version_is_read_from_the_files_as_the_library_tells_it() -> None:
    from deep_gemm.jit.compilers.nvrtc import library_version

    path = next(found.path for found in find_all() if found.kind == "nvrtc" and found.usable)
    assert find._nvrtc_version(path) == library_version(path)
