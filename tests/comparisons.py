"""A comparison as a GPU would give it, and a registry that a test may change."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm import backends
from deep_gemm.backends import registry
from deep_gemm.backends.accuracy import Accuracy
from deep_gemm.backends.operations import Dims, Operation, normal
from deep_gemm.backends.profiler import Roof, Timing
from deep_gemm.backends.registry import get_operation
from deep_gemm.backends.results import Comparison, Result

H100 = Roof("H100 SXM", 3350, {"fp8": 1979.0, "half": 989.5, "float32": 66.9})

US: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {
    ("fp8_gemm_nt", (64, 4096, 7168)): {"cuda": 17, "cublaslt": 26, "cublaslt:tensorwise": 16, "triton": 31,
        "tilelang": 28},
    ("fp8_gemm_nt", (4096, 4096, 7168)): {"cuda": 180, "cublaslt": 205, "cublaslt:tensorwise": 175, "deepgemm": 190},
    ("mul_add", (4096, 7168)): {"triton": 104, "tilelang": 97, "torch": 120, "cuda": 94},
}  # fmt: skip


class MulAdd(Operation):
    """``mul_add(x, y, z, out)``: ``out = x * y + z``, an operation as a user would add one."""

    name = "mul_add"
    dims = ("rows", "columns")
    examples = host_examples = ((64, 512),)

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        make = normal(device, seed)
        return *(make(*dims) for _ in range(3)), torch.empty(dims, dtype=torch.bfloat16, device=device)

    def exact(self, x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> Tensor:
        return x.double() * y.double() + z.double()

    def allowed(self, exact: Tensor, x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> Tensor:
        return 1.1 * 2.0**-7 * (exact.abs() + (x.double() * y.double()).abs() + z.double().abs()) + 1e-30

    def flops(self, dims: Dims) -> int:
        return 2 * math.prod(dims)

    def bytes_moved(self, dims: Dims) -> int:
        return 8 * math.prod(dims)

    def elements(self, dims: Dims) -> int:
        return math.prod(dims)


def mul_add(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> None:
    torch.addcmul(z, x, y, out=out)


def right(of_allowed: float = 0.6) -> Accuracy:
    """Of a result that is within bounds."""
    return Accuracy(0.98, 3.9e-3, 1.66e-3, 0.9999986, (0.998, 0.002, 0.0, 0.0, 0.0, 0.0), of_allowed, 0, 0, 1 << 18)


def wrong() -> Accuracy:
    """Of one that is not."""
    return Accuracy(80.0, 2.0, 0.3, 0.97, (0.5, 0.1, 0.1, 0.1, 0.1, 0.1), 31.0, 77, 3, 1 << 18)


def timing(op: str, dims: tuple[int, ...], us: float) -> Timing:
    """In flush mode on an H100."""
    return Timing.of("flush", [0.98 * us, us, us, 1.03 * us], get_operation(op), dims, H100, 1 << 20)


def comparison(**environment: str) -> Comparison:
    """Two operations, three shapes, and of the backends one that is wrong, one that failed and one that is absent."""
    rows = []
    for (op, dims), times in US.items():
        for name, us in times.items():
            easier = name.endswith("tensorwise")
            found: dict[str, Any] = {} if easier else {"accuracy": right()}
            rows.append(Result(op, dims, name, "easier" if easier else "ok", timing=timing(op, dims, us), **found))
    op, dims = "fp8_gemm_nt", (4096, 4096, 7168)
    rows.append(Result(op, dims, "triton", "wrong", wrong().fault, accuracy=wrong()))
    rows.append(Result(op, dims, "tilelang", "failed", "RuntimeError: <no> kernel & no image"))
    rows.append(Result(op, dims, "torch", "absent", "it is not here"))
    return Comparison(
        "NVIDIA H100 80GB HBM3", "flush", H100, tuple(rows), {"driver": "580.1", "torch": "2.11", **environment}
    )


@pytest.fixture(autouse=True)
def registry_is_left_alone() -> Iterator[None]:
    """A test has `MulAdd` with the backend torch. What it registers is gone after it."""
    backends.of("fp8_gemm_nt")  # imports all that is here
    tables: tuple[dict[Any, Any], ...] = (
        registry._backends,
        registry._kernels,
        registry._operations,
        registry._broken,
    )
    before = [dict(table) for table in tables]
    backends.operation(MulAdd)
    backends.kernel("torch", "mul_add")(mul_add)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
