"""Batches of products whose results are exact, with NaN beside each matrix; and one call of each kernel on them."""

from __future__ import annotations

from typing import Any

import torch
from grouped_runs import launch
from torch import Tensor

from deep_gemm.jit import Builder
from deep_gemm.ops.batched import Batched, Summed
from deep_gemm.params import KernelParams
from deep_gemm.spec import align
from deep_gemm.testing import Guarded, guarded, guarded_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FORMS = ("bmk,bnk->bmn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bmk,bnk->mn")


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Small enough that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(DEVICE)


def apart(rows: int, columns: int, by_rows: bool, groups: int, piece: int = 8) -> tuple[int, int]:
    """Strides of matrices and of their rows with gaps: matrix after matrix, or row after row of all of them."""
    row = align(columns, piece) + piece
    return (row, groups * row + piece) if by_rows else ((rows + 3) * row, row)


def surrounded(values: Tensor, by_rows: bool = False, major: str = "k") -> Guarded:
    """A copy of matrices (batch, rows, columns), with NaN after each row and each matrix. The rows are contiguous, or
    with the major "m" the columns."""
    groups, rows, columns = values.shape
    if major == "m":
        step, column = apart(columns, rows, by_rows, groups)
        return guarded_copy(values, (step, 1, column))
    step, row = apart(rows, columns, by_rows, groups)
    return guarded_copy(values, (step, row, 1))


def output(groups: int, m: int, n: int, dtype: torch.dtype, by_rows: bool = False, tma: bool = True) -> Guarded:
    """A guarded d (batch, M, N). Not ``tma``: rows that TMA cannot write."""
    step, row = apart(m, n, by_rows, groups)
    odd = 0 if tma else 1
    return guarded((groups, m, n), dtype, DEVICE, (step + odd, row + odd * (groups if by_rows else 1), 1))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices (batch, rows, K), exact."""
    return torch.einsum("bmk,bnk->bmn", a.double(), b.double())


def is_right(params: KernelParams, builder: Builder) -> bool:
    """Whether the kernel's results are exact, and nothing else was written, where edges of tiles are crossed."""
    try:
        for size in ((3, 200, 328, 200), (5, 40, 72, 64)):
            (summed if params.grouping == "summed" else batched)(params, builder, *size)
    except AssertionError:
        return False
    return True


def batched(params: KernelParams, builder: Builder, groups: int, m: int, n: int, k: int) -> None:
    """Raises AssertionError."""
    if params.shape != (0, 0, 0):
        _, n, k = params.shape
    dtype = DTYPES[params.dtype]
    values = integers(groups, m, k, dtype=dtype), integers(groups, n, k, dtype=dtype, seed=1)
    for by_rows in (False, True):
        a, b = (surrounded(x, by_rows, major) for x, major in zip(values, params.majors, strict=True))
        d = output(groups, m, n, DTYPES[params.output], by_rows, params.store == "tma")
        operation = Batched("bf16_bmm" if params.dtype == "bf16" else "fp16_bmm")
        dims = "".join(letter for letter, size in zip("mnk", params.shape, strict=True) if size)
        given: dict[str, Any] = {"a": a.tensor, "b": b.tensor, "d": d.tensor, "compiled_dims": dims}
        launch(operation, given, params.config, builder)
        d.check("d")
        assert torch.equal(d.tensor, product(*values).to(d.tensor.dtype))


def summed(params: KernelParams, builder: Builder, groups: int, m: int, n: int, k: int) -> None:
    """Raises AssertionError."""
    k = align(k, 64)
    values = integers(groups, m, k), integers(groups, n, k, seed=1)
    out, accumulates = DTYPES[params.output], params.accumulate != "none"
    before = integers(m, n, dtype=out, seed=2)
    for by_rows in (False, True):
        a, b = (surrounded(x, by_rows) for x in values)
        d = guarded((m, n), out, DEVICE, (n + (8 if params.store == "tma" else 1), 1))
        d.tensor.copy_(before)
        given: dict[str, Any] = {"a": a.tensor, "b": b.tensor, "d": d.tensor}
        if accumulates:
            given["c"] = d.tensor if params.accumulate == "reduces" else before
        launch(Summed("bf16_bmk_bnk_mn", accumulates), given, params.config, builder)
        d.check("d")
        wanted = product(*values).sum(0) + (before.double() if accumulates else 0)
        assert torch.equal(d.tensor, wanted.to(out))
