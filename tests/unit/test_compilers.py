"""Finding compilers and parsing their output. No compiler runs here: nvcc is a shell script, and NVRTC is not
opened."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from compilers import fake_library as library
from compilers import fake_nvcc as nvcc

from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit import disassembler
from deep_gemm.jit.compilers import Nvcc, Nvrtc, choose, elf, find, find_all
from deep_gemm.jit.resources import Resources, parse_ptxas, ptxas_seconds
from deep_gemm.log import reset_warnings
from deep_gemm.settings import settings

NVCC_LOG = """\
ptxas info    : (C7508) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a branch
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
ptxas info    : Compile time = 2.000 ms
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    320 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 320 bytes cumulative stack size, 1152 bytes smem
ptxas info    : Compile time = 21.730 ms
ptxas info    : Function properties for _Z1gfi
    16 bytes stack frame, 0 bytes spill stores, 40 bytes spill loads
"""
NVRTC_LOG = """\
kernel.cu(3): warning #177-D: variable "x" was declared but never referenced
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers
ptxas info    : Compile time = 6.234 ms
"""


def test_resources_are_read_from_either_compilers_log() -> None:
    found = parse_ptxas(NVCC_LOG, "k")
    assert found is not None
    assert found == Resources(168, 1152, 320, 8, 40, 3, found.warnings)
    assert "C7508" in found.warnings[0]
    assert len(found.problems()) == 3
    assert ptxas_seconds(NVCC_LOG) == pytest.approx(0.02373)

    found = parse_ptxas(NVRTC_LOG, "k")
    assert found is not None
    assert found == Resources(90, 0, 0, 0, 0, 1, found.warnings)
    assert found.warnings == ('kernel.cu(3): warning #177-D: variable "x" was declared but never referenced',)
    # An unused variable is no reason to refuse a kernel.
    assert found.problems() == []
    assert parse_ptxas(NVRTC_LOG, "another") is None
    assert ptxas_seconds("") is None


def test_resources_survive_json() -> None:
    found = parse_ptxas(NVCC_LOG, "k")
    assert found is not None
    assert Resources.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="shared_static must be a whole number"):
        Resources.from_json({"registers": 1})


def test_a_library_is_known_by_its_build_id(tmp_path: Path) -> None:
    assert elf.identity(library(tmp_path / "a.so", b"\x01" * 20)) == "01" * 20
    # Another path and padding, but the same build.
    assert elf.identity(library(tmp_path / "x" / "b.so", b"\x01" * 20, padding=9)) == "01" * 20
    assert elf.identity(library(tmp_path / "c.so", b"\x02" * 20)) == "02" * 20
    # Replaced in place.
    assert elf.identity(library(tmp_path / "a.so", b"\x03" * 20, padding=1)) == "03" * 20


def test_a_library_without_a_build_id_is_known_by_its_content(tmp_path: Path) -> None:
    one, two = library(tmp_path / "a.so", b""), library(tmp_path / "b.so", b"", padding=1)
    assert len(elf.identity(one)) == 40
    assert elf.identity(one) != elf.identity(two)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libnvrtc.so.12").write_bytes(content)
    with pytest.raises(CompilerNotFoundError, match="cannot be used as NVRTC"):
        Nvrtc(str(tmp_path / "libnvrtc.so.12"), (12, 9))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without compilers or a driver, in `tmp_path`; PATH holds tmp_path/bin."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(find, "driver_release", lambda: None)
    monkeypatch.setattr(find, "_toolkits", lambda: [settings.cuda_home] if settings.cuda_home else [])
    monkeypatch.setattr(find, "_loaded", list)
    monkeypatch.setattr(find.sys, "prefix", str(tmp_path / "no-prefix"))
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    find.forget()
    reset_warnings()
    yield tmp_path
    find.forget()


def nvrtc(machine: Path, version: str, build_id: bytes = b"\x09" * 20) -> str:
    """An NVRTC in a toolkit that CUDA_HOME names."""
    folder = machine / "toolkit" / "lib64"
    path = library(folder / f"libnvrtc.so.{version.partition('.')[0]}", build_id)
    (folder / f"libnvrtc-builtins.so.{version}").write_bytes(b"")
    return path


def why(path: str) -> str:
    return next(found.why for found in find_all() if found.path == path)


def test_without_a_compiler_the_error_says_what_to_install(machine: Path) -> None:
    assert find_all() == []
    with pytest.raises(CompilerNotFoundError, match=r"none was found.*pip install nvidia-cuda-nvrtc-cu12"):
        choose()


def test_nvcc_is_the_default_and_a_setting_prefers_nvrtc(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nvcc(machine / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    other = nvrtc(machine, "12.9")
    assert (choose().kind, choose().path, choose().cuda_version) == ("nvcc", path, (13, 0))
    assert choose().identity == "nvcc 13.0.88 build cuda_13.0.r13.0/compiler.1_0"
    with settings.override(use_nvrtc=True):
        assert (choose().kind, choose().path, choose().cuda_version) == ("nvrtc", other, (12, 9))
        assert [(found.kind, found.chosen) for found in find_all()] == [("nvcc", False), ("nvrtc", True)]
    assert [(found.kind, found.version, found.chosen) for found in find_all()] == [
        ("nvcc", "13.0.88", True),
        ("nvrtc", "12.9", False),
    ]


def test_an_old_nvcc_gives_way(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nvcc(machine / "bin" / "nvcc", "12.2.140")
    with pytest.raises(CompilerNotFoundError, match=r"older than 12\.3"):
        choose()
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    nvrtc(machine, "12.9")
    assert choose().kind == "nvrtc"
    assert "older than 12.3" in why(path)


@pytest.mark.parametrize("kind", ["missing", "old", "not nvcc", "directory"])
def test_a_named_nvcc_that_cannot_be_used_is_an_error(
    machine: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    nvcc(machine / "bin" / "nvcc")
    named = machine / "mine"
    make: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "old": lambda: nvcc(named, "11.8.89"),
        "not nvcc": lambda: named.symlink_to("/bin/true"),
        "directory": named.mkdir,
    }
    make[kind]()
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(named))
    with pytest.raises(CompilerNotFoundError, match=f"DG_JIT_NVCC_COMPILER names {named}, which cannot be used"):
        choose()
    assert [found.chosen for found in find_all()] == [False]


def test_a_named_nvcc_wins_over_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc(machine / "bin" / "nvcc")
    named = nvcc(machine / "mine", "12.4.99")
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", named)
    assert choose().path == named


def test_the_driver_decides_what_is_too_new(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    path = nvcc(machine / "bin" / "nvcc", "13.0.88")
    old, new = nvrtc(machine, "12.9"), nvrtc(machine, "13.1", b"\x0a" * 20)
    monkeypatch.setattr(find, "driver_release", lambda: (12, 4))
    assert choose().path == old
    assert "cannot load what CUDA 13.0.88 compiles" in why(path)
    assert "may refuse" in why(new)
    find.forget()
    monkeypatch.setattr(find, "driver_release", lambda: (13, 0))
    assert choose().kind == "nvcc"
    with settings.override(use_nvrtc=True):
        assert choose().path == new


def test_an_nvrtc_that_is_too_new_is_taken_if_there_is_no_other(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    path = nvrtc(machine, "13.1")
    monkeypatch.setattr(find, "driver_release", lambda: (12, 4))
    assert choose().path == path
    assert "may refuse cubins of CUDA 13.1" in caplog.records[0].message


def test_a_loaded_nvrtc_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    new = nvrtc(machine, "12.9")
    loaded = library(machine / "torch" / "libnvrtc.so.12", b"\x0b" * 20)
    (machine / "torch" / "libnvrtc-builtins.so.12.6").write_bytes(b"")
    assert choose().path == new
    find.forget()
    monkeypatch.setattr(find, "_loaded", lambda: [loaded])
    assert choose().path == loaded
    assert why(loaded) == "this process has loaded it already"
    assert why(new) == f"usable, but {loaded} comes first"


COMPILES = f"""\
while [ $# -gt 1 ]; do [ "$1" = -o ] && output=$2; shift; done
echo "flags:$NVCC_APPEND_FLAGS:$NVCC_PREPEND_FLAGS" >&2
printf "\\177ELF" > "$output"
cat >&2 <<'EOF'
{NVCC_LOG}{NVCC_LOG.replace("'k'", "'trial'")}EOF
"""


@pytest.mark.parametrize("folder", ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "lib"])
def test_nvrtc_is_found_wherever_a_wheel_or_conda_puts_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """torch for CUDA 13 brings one, without the wheel that this package requires."""
    path = library(machine / folder / "libnvrtc.so.13", b"\x0c" * 20)
    (machine / folder / "libnvrtc-builtins.so.13.0").touch()
    found = SimpleNamespace(submodule_search_locations=[str(machine / "nvidia")])
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(find.sys, "prefix", str(machine))
    assert (choose().path, choose().cuda_version) == (path, (13, 0))


def test_nvcc_without_a_host_compiler_gives_way(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_which = find.shutil.which
    monkeypatch.setattr(find.shutil, "which", lambda tool: None if tool == "gcc" else real_which(tool))
    path = nvcc(machine / "bin" / "nvcc", body='echo "gcc: not found" >&2; exit 1')
    assert "one-line kernel (gcc: not found); it needs a host C++ compiler such as g++" in why(path)
    nvcc(machine / "bin" / "nvcc", body=f"{COMPILES}# it knows of another host compiler")
    find.forget()
    assert choose().kind == "nvcc"


def test_nvcc_compiles_without_hidden_flags(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
    compiler = Nvcc(nvcc(machine / "bin" / "nvcc", body=COMPILES))
    source = machine / "kernel.cu"
    source.write_text("int x;\n")
    flags = compiler.flags("sm_90a")
    assert flags[:3] == ("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3")
    done = compiler.compile("k", "int x;\n", str(source), flags, machine)
    assert (done.cubin, done.resources.registers) == (b"\x7fELF", 168)
    assert "flags::\n" in done.log
    assert done.options == (*flags, f"-I{machine}")
    with pytest.raises(CompileError, match="reported no entry function 'missing'"):
        compiler.compile("missing", "int x;\n", str(source), flags, None)


def test_a_failing_nvcc_tells_log_source_and_options(machine: Path) -> None:
    compiler = Nvcc(nvcc(machine / "bin" / "nvcc", body='echo "kernel.cu(1): error: no" >&2; exit 2'))
    with pytest.raises(CompileError, match=r"could not compile k \(exit status 2\)") as caught:
        compiler.compile("k", "", "/stored/kernel.cu", ("-O3",), None)
    assert caught.value.log == "kernel.cu(1): error: no\n"
    assert (caught.value.source_path, caught.value.options) == ("/stored/kernel.cu", ("-O3",))


def test_nvrtc_keeps_no_cache_of_its_own(machine: Path) -> None:
    """Binaries from that cache come without ptxas' report. Versions without the cache do not know the option."""
    library = nvrtc(machine, "12.9")
    for version, told in (((12, 3), False), ((12, 8), False), ((12, 9), True), ((13, 0), True)):
        assert ("--no-cache" in Nvrtc(library, version).flags("sm_90a")) == told


def test_a_target_needs_a_compiler_that_knows_it(machine: Path) -> None:
    library = nvrtc(machine, "12.9")
    for version, arch, knows in (((12, 8), "sm_120a", True), ((12, 8), "sm_103a", False), ((12, 3), "sm_80", True)):
        if knows:
            assert f"--gpu-architecture={arch}" in Nvrtc(library, version).flags(arch)
        else:
            with pytest.raises(CompilerNotFoundError, match=r"CUDA 12\.8, which cannot compile for sm_103a"):
                Nvrtc(library, version).flags(arch)


def test_debug_and_lineinfo_are_flags(machine: Path) -> None:
    for compiler in (Nvcc(nvcc(machine / "bin" / "nvcc")), Nvrtc(nvrtc(machine, "12.9"), (12, 9))):
        plain = compiler.flags("sm_90a")
        with settings.override(debug=True, lineinfo=True):
            assert compiler.flags("sm_90a") == (*plain, "-lineinfo", "-DDG_DEBUG=1")
        assert not any("/" in flag for flag in plain)


def test_a_missing_disassembler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disassembler, "_places", lambda tool: [tmp_path / tool])
    with pytest.raises(CompilerNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        disassembler.sass(b"cubin")
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\n[ "$1" = --dump-sass ] && cat "$2"\n')
    tool.chmod(0o755)
    assert disassembler.sass(b"MOV R1") == "MOV R1"
