"""The kernels of `late_loaders.py` compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from forced import compiled, nvrtc
from late_loaders import KERNELS, late_headers

from deep_gemm.jit import Builder

pytestmark = pytest.mark.long


def test_kernels_with_late_loaders_compile(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "cache", nvrtc(), late_headers(tmp_path / "include"))
    with compiled((name, builder, params) for name, params in KERNELS.items()) as binaries:
        for name, binary in binaries.items():
            assert binary.result().cubin, name
