"""The compilers: NVRTC and NVCC behind one interface, and finding them."""

from deep_gemm.jit.compilers.base import Compiled, Compiler
from deep_gemm.jit.compilers.find import Found, choose, find_all
from deep_gemm.jit.compilers.nvcc import Nvcc
from deep_gemm.jit.compilers.nvrtc import Nvrtc

__all__ = ["Compiled", "Compiler", "Found", "Nvcc", "Nvrtc", "choose", "find_all"]
