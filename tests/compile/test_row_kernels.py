"""Our element-wise and row-wise kernels compile without spills, and compute right results on the host, where each
thread of a CTA is a host thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deep_gemm import backends
from deep_gemm.backends import ours_rows
from deep_gemm.errors import UnsupportedError
from deep_gemm.jit.builder import default_builder
from deep_gemm.jit.generator import include_dir
from deep_gemm.settings import settings

OPS = (*ours_rows.ELEMENTWISE, *ours_rows.ROWWISE)

HOST = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#include "types.cuh"
struct Place { u32 x; };
thread_local Place threadIdx, blockIdx;
std::barrier<>* together;
float slots[1024];
inline void __syncthreads() { together->arrive_and_wait(); }
inline float __shfl_xor_sync(u32, float value, u32 step) {
  slots[threadIdx.x] = value;
  __syncthreads();
  const float other = slots[threadIdx.x ^ step];
  __syncthreads();
  return other;
}
inline float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
enum Element : u32 { kBf16 };
template <u32> struct Output {
  static u32 one(float value) { u32 bits; memcpy(&bits, &value, 4); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }
  static u32 apply(float low, float high) { return one(low) | one(high) << 16; }
};
"""

RUN = """
extern "C" void run(u32 grid, u32 threads, SIGNATURE) {
  std::barrier<> meeting(threads);
  together = &meeting;
  for (u32 block = 0; block < grid; ++block) {
    std::vector<std::thread> running;
    for (u32 thread = 0; thread < threads; ++thread)
      running.emplace_back([&, thread] { threadIdx.x = thread; blockIdx.x = block; NAME(ARGUMENTS); });
    for (auto& one : running) one.join();
  }
}
"""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [8, 7168, 32768])
def test_the_kernels_compile_without_spills(op: str, columns: int) -> None:
    threads, held = ours_rows.row_config(columns) if op in ours_rows.ROWWISE else (256, 1)
    with settings.override(use_nvrtc=True, ptxas_check=True):
        binary = default_builder().build(ours_rows.request(op, threads, held, "sm_90a"))
    assert binary.resources.registers <= 65536 // threads


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the path")
@pytest.mark.parametrize("op", OPS)
def test_the_kernels_are_right_on_the_host(op: str, tmp_path: Path) -> None:
    rows, columns = 3, 520  # some threads have no vector in the last round
    operation = backends.get_operation(op)
    operands = operation.make((rows, columns), torch.device("cpu"))
    out = operation.output(operands)
    out.fill_(float("nan"))
    rowwise = op in ours_rows.ROWWISE
    threads, held = (64, 2) if rowwise else (64, 1)
    asked = ours_rows.request(op, threads, held, "sm_90a")
    signature = asked.source[asked.source.rindex(f"{asked.name}(") + len(asked.name) + 1 :].partition(")")[0]
    names = ", ".join(part.split()[-1] for part in signature.split(","))
    run = RUN.replace("SIGNATURE", signature).replace("NAME", asked.name).replace("ARGUMENTS", names)
    text = HOST + asked.source.replace('#include "output.cuh"\n', "") + run
    source, library = tmp_path / "rows.cpp", tmp_path / "rows.so"
    source.write_text(text)
    told = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{include_dir()}",
        source,
        "-o",
        library,
    ]
    subprocess.run(told, check=True, timeout=120)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in operands]
    if rowwise:
        grid, sizes = rows, [ctypes.c_uint32(columns), ctypes.c_float(ours_rows.EPS[op])]
    else:
        vectors = rows * columns // ours_rows.VECTOR
        grid, sizes = -(-vectors // threads), [ctypes.c_uint32(vectors), ctypes.c_uint32(columns)]
    ctypes.CDLL(str(library)).run(ctypes.c_uint32(grid), ctypes.c_uint32(threads), *pointers, *sizes)
    exact = operation.exact(*operands)
    assert bool(((out.double() - exact).abs() <= operation.allowed(exact, *operands)).all())


def test_a_row_is_held_by_the_threads_that_it_is_dealt_out_to() -> None:
    for columns in range(8, 32769, 8):
        threads, held = ours_rows.row_config(columns)
        assert threads % 32 == 0
        assert threads <= 1024
        assert columns <= threads * held * ours_rows.VECTOR < columns + 32 * held * ours_rows.VECTOR
    with pytest.raises(UnsupportedError, match="A row may have up to 32768 columns, but it has 32776"):
        ours_rows.row_config(32776)
