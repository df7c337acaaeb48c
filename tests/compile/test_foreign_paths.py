"""Directories with any name: NVRTC takes paths as bytes, and the shell that NVCC uses does not interpret them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from compilers import compiler_of
from jit_fakes import request

from deep_gemm.errors import CompileError
from deep_gemm.jit import Builder, process, sass
from deep_gemm.jit.compilers import Compiler
from deep_gemm.settings import settings

SOURCE = '#include "twice.cuh"\nextern "C" __global__ void k(int* out) { *out = twice(threadIdx.x); }\n'
HEADER = "#pragma once\n__device__ int twice(int x) { return 2 * x; }\n"
# Text that a shell may run as a command, unquoted and inside both kinds of quotes; and bytes that are not UTF-8.
COMMANDS = "x$(touch a)`touch b`\"; touch c; \"'; touch d; '& touch e & \n touch f\n \\ # * ü \udcff"
NAMES = [COMMANDS, "it's a; touch g & b", "aüb"]


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return compiler_of(request.param)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_every_directory_may_have_any_name(
    tmp_path: Path, compiler: Compiler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {part: tmp_path / part / name for part in ("root", "include", "tmp", "cwd")}
    for place in places.values():
        place.mkdir(parents=True, mode=0o700)
    (places["include"] / "twice.cuh").write_text(HEADER)
    monkeypatch.setattr(tempfile, "tempdir", str(places["tmp"]))
    monkeypatch.setenv("TMPDIR", str(places["tmp"]))
    monkeypatch.chdir(places["cwd"])
    build = Builder(places["root"], compiler, places["include"])
    # NVRTC does not support quotation marks in headers' names with line information.
    with settings.override(lineinfo=compiler.kind == "nvcc" or '"' not in name, dump_ptx=True):
        built = build.build(request(source=SOURCE))
    assert (built.layer, built.cubin[:4]) == ("compiled", b"\x7fELF")
    assert built.source_path is not None
    assert Path(built.source_path).is_relative_to(places["root"])
    assert "k" in sass(built.cubin)
    with pytest.raises(CompileError, match="absent") as caught:
        build.build(request(source="int x = absent;\n" + SOURCE))
    str(caught.value).encode(errors="surrogateescape")
    assert list(places["cwd"].iterdir()) == list(places["tmp"].iterdir()) == []
    assert not [path for path in tmp_path.rglob("*") if path.name in "abcdefg"]


def test_nvrtc_takes_a_source_with_a_quotation_mark_in_its_name(tmp_path: Path) -> None:
    with settings.override(lineinfo=True):
        built = Builder(tmp_path / 'a"b', compiler_of("nvrtc"), tmp_path).build(
            request(source='extern "C" __global__ void k(int* out) { *out = 1; }\n')
        )
    assert built.layer == "compiled"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_locale_decides_nothing(tmp_path: Path, encoding: str) -> None:
    """Under LC_ALL=C, without Python's UTF-8 mode, text is ASCII wherever code names no encoding."""
    code = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
from jit_worker import without_torch
without_torch()
import locale
from pathlib import Path
from deep_gemm.errors import CompileError
from deep_gemm.jit import Builder, BuildRequest
source = 'extern "C" __global__ void k(int* out) { *out = 1; } // ü\\n'
for root in (Path(os.fsdecode(os.environb[b"ROOT"])), Path("/dev/null/x")):
    print(Builder(root, include_dir=root).build(BuildRequest("k", source, "sm_90a")).layer)
    try:
        Builder(root, include_dir=root).build(BuildRequest("k", "ü" + source, "sm_90a"))
    except CompileError as error:
        print(Path(error.source_path).read_bytes() == ("ü" + source).encode())
"""
    environment = {
        **os.environb,
        b"ROOT": os.fsencode(tmp_path) + b"/\xfc\xff",
        b"TMPDIR": os.fsencode(tmp_path),
        b"TESTS": os.fsencode(Path(__file__).parents[1]),
        b"LC_ALL": b"C" if encoding == "ascii" else b"C.UTF-8",
        b"PYTHONUTF8": b"0",
        b"PYTHONCOERCECLOCALE": b"0",
        b"DG_JIT_USE_NVRTC": b"1",
    }
    script = tmp_path / "script.py"
    script.write_text(code, "utf-8")
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["compiled", "True"] * 2, ran.stderr


def test_without_a_plain_directory_nvcc_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = compiler_of("nvcc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "is_plain", lambda path: False)
    with pytest.raises(CompileError, match="characters that mean something to a shell"):
        Builder(tmp_path / "root", nvcc, tmp_path).build(request(source=SOURCE))


def test_the_command_line_prints_any_path(tmp_path: Path) -> None:
    """Standard output takes only text, as in most locales."""
    root = os.fsencode(tmp_path) + b"/\xff\xc3\xbc"
    environment = {**os.environb, b"DG_JIT_CACHE_DIR": root, b"PYTHONIOENCODING": b"utf-8:strict"}
    command = [sys.executable, "-m", "deep_gemm", "cache", "verify"]
    ran = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "/\\udcffü: 0 sound" in ran.stdout
