"""`deep-gemm new-kernel`: the files of a kernel of one's own, to begin with."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

import click

from deep_gemm.cli.console import console

_TEMPLATE = """\
// @NAME@: out = scale * x + y, element by element. A Jinja template: its delimiters are C++ comments.
#include "custom.cuh"

constexpr u32 kThreads = /*{ num_threads }*/, kItems = /*{ items }*/;  // elements of a thread

extern "C" __global__ void __launch_bounds__(kThreads)
    /*{ name }*/(/*{ signature }*/) {
  const u32 first = blockIdx.x * kThreads * kItems + threadIdx.x;
#pragma unroll
  for (u32 item = 0; item < kItems; ++item) {
    const u32 i = first + item * kThreads;
    if (i < n) out[i] = scale * x[i] + y[i];
  }
}
"""

_MODULE = '''\
"""@NAME@: a CUDA kernel that deep_gemm compiles when it is first called."""

from pathlib import Path

from torch import Tensor

import deep_gemm
from deep_gemm import LaunchConfig, ceil_div

THREADS, ITEMS = 256, 4


@deep_gemm.kernel(
    {"out": "bf16*", "x": "const bf16*", "y": "const bf16*", "scale": "f32", "n": "u32"},
    template=Path(__file__).with_suffix(".cu.jinja"),
)
def @NAME@(out: Tensor, x: Tensor, y: Tensor, scale: float) -> "LaunchConfig | None":
    """out = scale * x + y; contiguous bfloat16 tensors of one shape, on one GPU."""
    for name, tensor in (("x", x), ("y", y)):
        if tensor.shape != out.shape:
            raise deep_gemm.InvalidInputError(f"{name} must have out's shape, but it has {tuple(tensor.shape)}.")
    n = out.numel()
    if n == 0:
        return None
    grid = ceil_div(n, THREADS * ITEMS)
    return LaunchConfig(grid=grid, block=THREADS, values={"n": n}, constants={"items": ITEMS}, flops=2 * n)


@@NAME@.reference
def in_torch(out: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    """The same for tensors on the CPU, and what the test compares with."""
    out.copy_(scale * x.float() + y.float())
'''

_TEST = '''\
"""@NAME@ is compiled here, and on a GPU compared with torch."""

import pytest
import torch
from @NAME@ import @NAME@, in_torch


def operands(n, device):
    return [torch.randn(n, device=device).bfloat16() for _ in range(3)]


def test_it_compiles_without_spills():
    binary = @NAME@.build(*operands(1000, "cpu"), 2.0)
    assert binary.resources.problems() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n", [1, 255, 1024, 100_003])
def test_it_agrees_with_torch(n):
    out, x, y = operands(n, "cuda")
    wanted = torch.empty_like(out)
    in_torch(wanted, x, y, 0.5)
    for _ in range(2):  # cold, then warm
        out.fill_(float("nan"))
        @NAME@(out, x, y, 0.5)
        torch.testing.assert_close(out, wanted)


def test_a_tensor_of_another_shape_is_refused():
    out, x, y = operands(8, "cpu")
    with pytest.raises(ValueError, match="y must have out's shape"):
        @NAME@(out, x, y[:4], 2.0)
'''


def _has_pytest() -> bool:
    try:
        return importlib.util.find_spec("pytest") is not None
    except ValueError:  # a module that is set to None
        return False


@click.command("new-kernel")
@click.argument("name")
@click.option(
    "--directory",
    default=".",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the files go; it is made if it is not there.",
)
def command(name: str, directory: Path) -> None:
    """Write NAME.cu.jinja, NAME.py and test_NAME.py: a kernel that works, to be changed into one of your own.

    The test compiles the kernel, and runs it where there is a GPU. No file is replaced.
    """
    from deep_gemm.custom.parameters import is_name

    if not is_name(name) or keyword.iskeyword(name):
        raise click.UsageError(f"NAME must be a name that C++ and Python can have, but it is {name!r}.")
    if name in sys.stdlib_module_names or name in ("torch", "deep_gemm", "pytest"):
        raise click.UsageError(f"NAME must not be that of a module that exists, but it is {name!r}.")
    texts = {f"{name}.cu.jinja": _TEMPLATE, f"{name}.py": _MODULE, f"test_{name}.py": _TEST}
    there = [file for file in texts if (directory / file).exists()]
    if there:
        raise click.ClickException(f"{directory / there[0]} exists, and nothing was written: choose another name.")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        with (directory / file).open("x") as opened:
            opened.write(text.replace("@NAME@", name))
    shown = console()
    shown.print(f"Wrote {', '.join(texts)} into {directory}.")
    pytest = "" if _has_pytest() else "pip install pytest && "
    shown.print(f"Try it: {pytest}cd {directory} && python -m pytest test_{name}.py")
