"""Device arithmetic, compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deep_gemm.jit.generator import include_dir

_HOST = r"""
#define DG_HOST
#define __device__
#define __forceinline__ inline
#include <cmath>
#include <cstring>
static float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
static float exp2_approx(float x) { return flushed(std::exp2(x)); }
static float reciprocal_approx(float x) { return flushed(1.0f / x); }
static float max_or_nan(float x, float y) { return std::isnan(x) ? x : std::fmax(x, y); }
static float max_or_other(float x, float y) { return std::fmax(x, y); }
"""


def compiled(folder: Path, header: str, code: str) -> ctypes.CDLL:
    """A library with ``code``, which may use what is in a device header. Skips where there is no compiler."""
    program = shutil.which("g++") or shutil.which("clang++")
    if program is None:
        pytest.skip("needs a C++ compiler for the host")
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(f'{_HOST}#include "{header}"\n{code}')
    flags = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{include_dir()}")
    subprocess.run([program, *flags, str(source), "-o", str(library)], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def pairs(library: ctypes.CDLL, name: str, x: torch.Tensor) -> torch.Tensor:
    """The result of a function ``void name(float*, long count)`` that changes its numbers."""
    y = x.float().contiguous().clone()
    getattr(library, name)(ctypes.c_void_p(y.data_ptr()), ctypes.c_long(y.numel()))
    return y
