"""Device arithmetic, compiled for the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from headers import edit, edited_headers

_HOST = r"""
#define __device__
#define __forceinline__ inline
#include <cmath>
#include <cstring>
static float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __frcp_rn(float x) { return 1.0f / x; }
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
"""
_INSTRUCTIONS = {
    "activation.cuh": (('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x))', "power = flushed(std::exp2(x))"),
        ('asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y))', "found = x < y || x != x ? x : y"),
        ('asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x))', "inverse = flushed(1.0f / x)")),
    "sum_activations.cuh": (
        ('asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y))',
        "larger = std::isnan(x) ? x : std::fmax(x, y)"),),
}  # fmt: skip


def compiled(folder: Path, header: str, code: str) -> ctypes.CDLL:
    """A library with ``code``, which may use what is in a device header. Skips where there is no compiler."""
    program = shutil.which("g++") or shutil.which("clang++")
    if program is None:
        pytest.skip("needs a C++ compiler for the host")
    include = edited_headers(folder / "include", "types.cuh")
    for name, edits in _INSTRUCTIONS.items():
        edit(include / name, *edits)
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(f'{_HOST}#include "{header}"\n{code}')
    flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{include}")
    subprocess.run([program, *flags, str(source), "-o", str(library)], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def pairs(library: ctypes.CDLL, name: str, x: torch.Tensor) -> torch.Tensor:
    """The result of a function ``void name(float*, long count)`` that changes its numbers."""
    y = x.float().contiguous().clone()
    getattr(library, name)(ctypes.c_void_p(y.data_ptr()), ctypes.c_long(y.numel()))
    return y
