"""The real compilers of this machine, and scripts that act as a compiler."""

import struct
from pathlib import Path

import pytest

from deep_gemm.jit.compilers import Compiler, Nvcc, Nvrtc, find, find_all


def compiler_of(kind: str) -> Compiler:
    """A usable compiler of that kind. A machine without NVCC skips the test; NVRTC is one of our dependencies."""
    path = next((found.path for found in find_all() if found.kind == kind and found.usable), None)
    if path is None:
        assert kind != "nvrtc"
        pytest.skip(f"there is no usable {kind} here")
    return Nvcc(path) if kind == "nvcc" else Nvrtc(path, find._nvrtc_version(path))


def fake_nvcc(path: Path, version: str = "13.0.88", body: str = "exit 3") -> str:
    """A script that reports that version of nvcc and runs `body` for a kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    release = version.rpartition(".")[0]
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then\n'
        f'echo "Cuda compilation tools, release {release}, V{version}"\n'
        f'echo "Build cuda_{release}.r{release}/compiler.1_0"; exit 0; fi\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


def fake_library(path: Path, build_id: bytes, padding: int = 0) -> str:
    """A file with an ELF header and one note: nothing else of a library is read."""
    note = struct.pack("<III", 4, len(build_id), 3) + b"GNU\0" + build_id
    header = b"\x7fELF\x02\x01\x01" + bytes(25) + struct.pack("<Q", 64) + bytes(14) + struct.pack("<HH", 56, 1)
    program = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.ljust(64, b"\0") + program + note + bytes(padding))
    return str(path)
