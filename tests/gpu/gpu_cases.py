"""Shared code of the GPU tests: shapes, memory layouts, and calls with guarded buffers."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import deep_gemm
from deep_gemm.spec import align
from deep_gemm.testing import Guarded, Operand, guarded, guarded_copy, random_operands

# On a machine without a GPU these tests are skipped. Without the conftest that skips them, they run against the
# reference, which finds mistakes that do not depend on a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# N x K of DeepSeek-V3's projections.
PROJECTIONS = [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """One order of sums, whatever kernel is chosen."""
    deep_gemm.set_batch_invariant(True)
    try:
        yield
    finally:
        deep_gemm.set_batch_invariant(False)


def nan_output(m: int, n: int) -> torch.Tensor:
    """An output full of NaN, so that elements that are not written are found."""
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


def call(a: Operand, b: Operand, **options: Any) -> torch.Tensor:
    """``fp8_gemm_nt`` into a new output."""
    d = nan_output(a[0].shape[0], b[0].shape[0])
    deep_gemm.fp8_gemm_nt(a, b, d, **options)
    return d


@functools.lru_cache(maxsize=1)
def projection(n: int, k: int, max_m: int) -> tuple[Operand, Operand, torch.Tensor, torch.Tensor]:
    """Operands that tests of one N x K share. Only those of the last N x K are kept, because of their size."""
    return random_operands(max_m, n, k, DEVICE, seed=n + k)


def busy() -> None:
    """Keep the current stream occupied for some ten milliseconds."""
    if DEVICE == "cuda":
        torch.cuda._sleep(20_000_000)


@dataclass(frozen=True)
class Layout:
    """The memory layouts of a call's tensors. Paddings are in elements, offsets in bytes."""

    scales: str = (
        "rows"  # "rows", "columns", "slice" (of a larger column-major tensor) or "sparse" (every other element)
    )
    pad_a: int = 0
    pad_b: int = 0
    pad_d: int = 0
    offset_a: int = 0
    offset_d: int = 0
    transposed_sfb: bool = False


def scale_strides(kind: str, rows: int, columns: int) -> tuple[int, int]:
    return {
        "rows": (columns, 1),
        "columns": (1, align(rows, 4)),
        "slice": (1, align(rows, 4) + 8),
        "sparse": (2 * columns + 3, 2),
    }[kind]


def guarded_call(a: Operand, b: Operand, layout: Layout, **options: Any) -> torch.Tensor:
    """Make a call with NaN before and after every tensor, and check that it wrote only d."""
    (x, sfx), (y, sfy) = a, b
    (m, k), n = x.shape, y.shape[0]
    inputs = {
        "a": guarded_copy(x, (k + layout.pad_a, 1), layout.offset_a),
        "the scales of a": guarded_copy(sfx, scale_strides(layout.scales, *sfx.shape)),
        "b": guarded_copy(y, (k + layout.pad_b, 1)),
        "the scales of b": guarded_copy(sfy, (1, sfy.shape[0]) if layout.transposed_sfb else None),
    }
    d: Guarded = guarded((m, n), torch.bfloat16, DEVICE, (n + layout.pad_d, 1), layout.offset_d)
    before = {name: buffer.memory.clone() for name, buffer in inputs.items()}
    tensors = [buffer.tensor for buffer in inputs.values()]
    deep_gemm.fp8_gemm_nt((tensors[0], tensors[1]), (tensors[2], tensors[3]), d.tensor, **options)
    d.check("d")
    for name, buffer in inputs.items():
        assert torch.equal(buffer.memory, before[name]), f"{name} was written to"
    return d.tensor
