"""Our own fused element-wise and row-wise kernels: CUDA C++ through our JIT, compiled at the first use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import arch
from ..errors import InvalidInputError, UnsupportedError
from ..jit.binary import BuildRequest
from ..jit.builder import default_builder
from ..jit.driver.launch import Arg, Launch, LaunchShape
from ..jit.driver.module import Function, load_function
from ..jit.generator import render
from .operations import LayerNorm, RMSNorm
from .registry import Call, get_kernel, kernel

VECTOR = 8
"""Elements that a thread loads at a time: 16 bytes."""
ROW_THREADS, MAX_THREADS, MAX_HELD = 512, 1024, 4
"""Preferred and largest number of threads per row, and the most vectors that a thread may hold in registers."""

ELEMENTWISE = {"add_gelu": ("x", "y"), "mul_add": ("x", "y", "z"), "swiglu": ("x",)}
ROWWISE = {RMSNorm.name: ("x", "weight"), LayerNorm.name: ("x", "weight", "bias")}
EPS = {RMSNorm.name: RMSNorm.EPS, LayerNorm.name: LayerNorm.EPS}


def request(op: str, threads: int, held: int, target: str) -> BuildRequest:
    """The build request for the kernel of an operation. ``held`` is the number of vectors of a row that a thread
    keeps in registers."""
    name = f"{op}_t{threads}" + (f"_h{held}" if op in ROWWISE else "")
    tensors = (ELEMENTWISE | ROWWISE)[op]
    sizes = ("u32 columns", "float eps") if op in ROWWISE else ("u32 vectors", "u32 columns")
    signature = ", ".join((*(f"const u16* {tensor}" for tensor in tensors), "u16* out", *sizes))
    fields: dict[str, str | int | bool] = {
        "op": op,
        "name": name,
        "signature": signature,
        "num_threads": threads,
        "held": held,
    }
    return BuildRequest(name, render("rows.cu.jinja", fields, Path(__file__).parent), target)


def row_config(columns: int) -> tuple[int, int]:
    """The number of threads for a row, a multiple of a warp, and of vectors that each holds. Raises
    UnsupportedError."""
    vectors = -(-columns // VECTOR)
    held = -(-vectors // ROW_THREADS)
    if held > MAX_HELD:
        held = -(-vectors // MAX_THREADS)
    if held > MAX_HELD:
        most = MAX_HELD * MAX_THREADS * VECTOR
        raise UnsupportedError(f"A row may have up to {most} columns, but it has {columns}.")
    return 32 * -(-vectors // (32 * held)), held


@functools.cache
def _load(op: str, threads: int, held: int, device: int) -> Function:
    asked = request(op, threads, held, arch.for_device(device).name)
    return load_function(default_builder().build(asked).cubin, asked.name, device, 0)


def prepare(op: str, *operands: Tensor) -> Call:
    """A call that launches an operation on the current stream.

    For tensors on the CPU it runs the reference, as our other functions do.
    """
    out = operands[-1]
    if out.device.type == "cpu":
        return get_kernel("torch", op).prepare(*operands)
    columns = out.shape[1]
    for name, tensor in zip((*(ELEMENTWISE | ROWWISE)[op], "out"), operands, strict=True):
        _check(name, tensor)
    if columns % VECTOR:
        raise UnsupportedError(f"A row must have a multiple of {VECTOR} columns, but it has {columns}.")
    pointers: list[Arg] = [("ptr", tensor.data_ptr()) for tensor in operands]
    if op in ROWWISE:
        threads, held = row_config(columns)
        grid, sizes = out.shape[0], [("u32", columns), ("f32", EPS[op])]
    else:
        threads, held = 256, 1
        grid, sizes = -(-out.numel() // (VECTOR * threads)), [("u32", out.numel() // VECTOR), ("u32", columns)]
    function = _load(op, threads, held, out.get_device())
    return _on_current_stream(function, LaunchShape((grid, 1, 1), threads, 0), [*pointers, *sizes], out.device)


def _on_current_stream(function: Function, shape: LaunchShape, parameters: Sequence[Arg], device: torch.device) -> Call:
    launches: dict[int, Launch] = {}

    def call() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        launch = launches.get(stream)
        if launch is None:
            launch = launches[stream] = Launch(function, shape, stream, parameters)
        launch()

    return call


def _check(name: str, x: Tensor) -> None:
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or x.data_ptr() % 16:
        raise InvalidInputError(
            f"{name} must be contiguous bfloat16 at a multiple of 16 bytes, but it is {x.dtype} with strides "
            f"{x.stride()} at {x.data_ptr():#x}."
        )


for _op in (*ELEMENTWISE, *ROWWISE):
    kernel("cuda", _op, prepares=True)(functools.partial(prepare, _op))
