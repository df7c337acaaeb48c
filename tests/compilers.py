"""The real compilers of this machine, and scripts that pass for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_gemm.jit.compilers import Compiler, Nvcc, Nvrtc, find, find_all


def compiler_of(kind: str) -> Compiler:
    """One of that kind. A machine without NVCC skips the test; NVRTC is one of our dependencies."""
    path = next((found.path for found in find_all() if found.kind == kind and found.usable), None)
    if path is None:
        assert kind != "nvrtc"
        pytest.skip(f"there is no usable {kind} here")
    return Nvcc(path) if kind == "nvcc" else Nvrtc(path, find._nvrtc_version(path))


def fake_nvcc(path: Path, version: str = "13.0.88", body: str = "exit 3") -> str:
    """A script that says it is that version of nvcc. What it does with a kernel is `body`."""
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
