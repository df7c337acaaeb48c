"""Batches of products whose results are exact, with NaN beside each matrix; and one call of each kernel on them."""

from typing import Any

import torch
from grouped_runs import launch
from torch import Tensor

from deep_gemm.jit import Builder
from deep_gemm.ops.batched import Batched, Summed
from deep_gemm.params import KernelParams
from deep_gemm.spec import SCALE_BLOCK, align, ceil_div
from deep_gemm.testing import Guarded, guarded, guarded_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FORMS = ("bmk,bnk->bmn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bmk,bnk->mn")


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Small enough that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(DEVICE)


def factors(*shape: int, seed: int = 0) -> Tensor:
    """Scales: powers of two, with which sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-2, 3, shape, generator=generator).float()).to(DEVICE)


def apart(rows: int, columns: int, by_rows: bool, groups: int, piece: int = 8) -> tuple[int, int]:
    """Strides of matrices and of their rows with gaps: matrix after matrix, or row after row of all of them."""
    row = align(columns, piece) + piece
    return (row, groups * row + piece) if by_rows else ((rows + 3) * row, row)


def surrounded(values: Tensor, by_rows: bool = False, major: str = "k") -> Guarded:
    """A copy of matrices (batch, rows, columns), with NaN after each row and each matrix. The rows are contiguous, or
    with the major "mn" the columns."""
    groups, rows, columns = values.shape
    piece = 16 // values.element_size()
    if major == "mn":
        step, column = apart(columns, rows, by_rows, groups, piece)
        return guarded_copy(values, (step, 1, column))
    step, row = apart(rows, columns, by_rows, groups, piece)
    return guarded_copy(values, (step, row, 1))


def output(groups: int, m: int, n: int, dtype: torch.dtype, by_rows: bool = False, tma: bool = True) -> Guarded:
    """A guarded d (batch, M, N). Not ``tma``: rows that TMA cannot write."""
    step, row = apart(m, n, by_rows, groups)
    odd = 0 if tma else 1
    return guarded((groups, m, n), dtype, DEVICE, (step + odd, row + odd * (groups if by_rows else 1), 1))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices (batch, rows, K), exact."""
    return torch.einsum("bmk,bnk->bmn", a.double(), b.double())


def scaled(groups: int, m: int, n: int, k: int) -> dict[str, Tensor]:
    """FP8 operands and their scales."""
    blocks = ceil_div(k, SCALE_BLOCK)
    return {
        "a": integers(groups, m, k, dtype=DTYPES["e4m3"]),
        "sfa": factors(groups, m, blocks),
        "b": integers(groups, n, k, dtype=DTYPES["e4m3"], seed=1),
        "sfb": factors(groups, ceil_div(n, SCALE_BLOCK), blocks, seed=1),
    }


def scaled_product(x: dict[str, Tensor]) -> Tensor:
    """Of FP8 matrices, exact."""
    a, b = x["a"].double(), x["b"].double()
    a *= x["sfa"].repeat_interleave(SCALE_BLOCK, 2)[:, :, : a.shape[2]]
    b *= x["sfb"].repeat_interleave(SCALE_BLOCK, 1).repeat_interleave(SCALE_BLOCK, 2)[:, : b.shape[1], : b.shape[2]]
    return torch.einsum("bmk,bnk->bmn", a, b)


def is_right(params: KernelParams, builder: Builder) -> bool:
    """Whether the kernel's results are exact, and nothing else was written, where edges of tiles are crossed."""
    sizes = [(3, 200, 328, 208), (5, 40, 72, 64)]
    if params.config.parts:
        sizes.append((29, 200, 328, 208))  # 116 blocks of K, of which parts have no equal number
    try:
        for size in sizes:
            run = summed if params.grouping == "summed" else fp8 if params.dtype == "e4m3" else batched
            run(params, builder, *size)
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


def fp8(params: KernelParams, builder: Builder, groups: int, m: int, n: int, k: int) -> None:
    """Raises AssertionError."""
    if params.shape != (0, 0, 0):
        _, n, k = params.shape
    values = scaled(groups, m, n, k)
    dims = "".join(letter for letter, size in zip("mnk", params.shape, strict=True) if size)
    for by_rows in (False, True):
        x = {name: surrounded(each, by_rows, "mn" if name == "sfa" else "k") for name, each in values.items()}
        d = output(groups, m, n, torch.bfloat16, by_rows, params.store == "tma")
        pairs = {name: (x[name].tensor, x["sf" + name].tensor) for name in "ab"}
        launch(Batched("fp8_bmm"), {**pairs, "d": d.tensor, "compiled_dims": dims}, params.config, builder)
        d.check("d")
        assert torch.equal(d.tensor, scaled_product(values).to(torch.bfloat16))


def summed(params: KernelParams, builder: Builder, groups: int, m: int, n: int, k: int) -> None:
    """Raises AssertionError."""
    k = align(k, 64)
    values = integers(groups, m, k), integers(groups, n, k, seed=1)
    out, accumulates = DTYPES[params.output], params.adds_c != "none"
    before = integers(m, n, dtype=out, seed=2)
    for by_rows in (False, True):
        a, b = (surrounded(x, by_rows) for x in values)
        d = guarded((m, n), out, DEVICE, (n + (8 if params.store == "tma" else 1), 1))
        d.tensor.copy_(before)
        given: dict[str, Any] = {"a": a.tensor, "b": b.tensor, "d": d.tensor}
        if accumulates:
            given["c"] = d.tensor if params.adds_c == "tma" else before
        launch(Summed("bf16_bmk_bnk_mn", accumulates), given, params.config, builder)
        d.check("d")
        wanted = product(*values).sum(0) + (before.double() if accumulates else 0)
        assert torch.equal(d.tensor, wanted.to(out))
