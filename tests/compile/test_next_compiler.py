"""A compiler that cannot compile anything is skipped: the next one is used, and is chosen once per process."""

import importlib.metadata
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from compilers import compiler_of, fake_library, fake_nvcc
from jit_fakes import request

from deep_gemm.cli.app import app
from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import Nvcc, choose, find, find_all
from deep_gemm.log import reset_warnings
from deep_gemm.settings import settings

SOURCE = 'extern "C" __global__ void k(int* out) { *out = %d; }\n'
NO_CC1PLUS = "gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory"


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file to which a fake NVCC writes a line per run. It fails as with a broken host compiler. NVRTC is real."""
    nvrtc = compiler_of("nvrtc")
    path = tmp_path / "journal"
    fake_nvcc(tmp_path / "bin" / "nvcc", body=f'echo run >> {path}; echo "{NO_CC1PLUS}" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(find, "_toolkits", list)
    monkeypatch.setattr(find, "_nvrtc_paths", lambda: [(nvrtc.path, False)])
    find.forget()
    reset_warnings()
    yield path
    find.forget()


def test_the_next_compiler_is_used_from_then_on(
    tmp_path: Path, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose().kind == "nvcc"  # it has not been tried yet
    build = Builder(tmp_path / "root", include_dir=tmp_path)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda i: build.build(request(source=SOURCE % i)), range(4)))
    assert {(binary.layer, binary.compiler.split()[0]) for binary in built} == {("compiled", "nvrtc")}
    (record,) = caplog.records
    assert NO_CC1PLUS in record.getMessage()
    assert "nvrtc 1" in record.getMessage()
    # At most one run for each thread, and the trial.
    runs = len(journal.read_text().splitlines())
    assert runs <= 5
    assert Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1)).layer == "disk"
    assert Builder(tmp_path / "else", include_dir=tmp_path).build(request(source=SOURCE % 9)).layer == "compiled"
    assert len(journal.read_text().splitlines()) == runs
    assert (build.stats["compiled"], len(caplog.records)) == (4, 1)


def test_what_the_next_compiler_stored_is_found_where_compiling_is_forbidden(tmp_path: Path, journal: Path) -> None:
    """As in an image with kernels compiled ahead and a compiler that does not work."""
    with settings.override(use_nvrtc=True):
        Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1))
    with settings.override(forbid_compile=True):
        assert Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1)).layer == "disk"
        with pytest.raises(CompileError, match="DG_JIT_FORBID_COMPILE forbids compiling k"):
            Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 2))


def test_a_fault_of_the_kernel_stays_an_error(
    tmp_path: Path, journal: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nvcc, "compile", compiler_of("nvrtc").compile)
    monkeypatch.setattr(Nvcc, "arch_flags", lambda self, arch: compiler_of("nvrtc").arch_flags(arch))
    for _ in range(2):
        with pytest.raises(CompileError, match="absent"):
            Builder(tmp_path / "root", include_dir=tmp_path).build(request(source="int x = absent;\n"))
    assert choose().kind == "nvcc"
    assert not caplog.records


@pytest.mark.parametrize("forbidden", [False, True])
def test_without_another_compiler_the_error_says_why(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool
) -> None:
    monkeypatch.setattr(find, "_nvrtc_paths", list)
    expected = "DG_JIT_FORBID_COMPILE.*cc1plus" if forbidden else "no usable CUDA compiler.*cc1plus"
    with settings.override(forbid_compile=forbidden), pytest.raises(CompileError, match=expected):
        Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1))


def test_a_compiler_that_a_setting_names_is_not_passed_by(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(tmp_path / "bin" / "nvcc"))
    with pytest.raises(CompilerNotFoundError, match=r"DG_JIT_NVCC_COMPILER names .*cc1plus.*Correct it or unset it"):
        Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1))


def test_an_nvrtc_that_does_not_load_is_passed_by(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = compiler_of("nvrtc")
    broken = fake_library(tmp_path / "libnvrtc.so.12", b"\x09" * 20)
    (tmp_path / "libnvrtc-builtins.so.12.9").touch()
    monkeypatch.setattr(find, "_nvrtc_paths", lambda: [(broken, True), (good.path, False)])
    with settings.override(use_nvrtc=True):
        assert choose().path == broken
        built = Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1))
    assert built.layer == "compiled"
    (record,) = caplog.records
    assert f"{good.path} is used instead" in record.getMessage()


def test_doctor_tries_each_compiler(journal: Path) -> None:
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    first, second = report["compilers"]
    assert (first["kind"], first["usable"], first["chosen"]) == ("nvcc", False, False)
    assert f"cannot compile a one-line kernel ({NO_CC1PLUS})" in first["why"]
    assert (second["kind"], second["usable"], second["chosen"]) == ("nvrtc", True, True)
    assert [found.usable for found in find_all()] == [False, True]


def test_doctor_says_that_the_wheel_is_not_needed(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def without_the_wheel(name: str) -> str:
        if name == "nvidia-cuda-nvrtc-cu12":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", without_the_wheel)
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "nvidia-cuda-nvrtc-cu12 is not installed, nor needed: nvrtc 1" in said


def test_a_host_compiler_that_the_real_nvcc_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvcc = compiler_of("nvcc")
    gcc = tmp_path / "bin" / "gcc"
    gcc.parent.mkdir()
    gcc.write_text(f'#!/bin/sh\necho "{NO_CC1PLUS}" >&2\nexit 1\n')
    gcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gcc.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(find, "_nvcc_paths", lambda: [nvcc.path])
    find.forget()
    reset_warnings()
    built = Builder(tmp_path / "root", include_dir=tmp_path).build(request(source=SOURCE % 1))
    assert built.compiler.startswith("nvrtc")
    assert NO_CC1PLUS in caplog.text
    find.forget()


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deep_gemm")
