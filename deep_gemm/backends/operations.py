"""Operations that can be compared: operands, the exact result, the allowed error, and the cost of each.

An operation of your own is a subclass of `Operation` with the decorator `operation`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import per_token_cast_to_fp8
from deep_gemm.ops.reference import Scalings, exact_product

from .. import ops
from ..layout import get_mn_major_tma_aligned_tensor
from ..ops import table
from ..testing.accuracy import accumulation_bound, half_accumulation_bound, tolerance
from ..testing.operands import random_operands
from .registry import operation

Dims = tuple[int, ...]
Rate = Literal["fp8", "half", "float32"]
"""The units whose peak rate bounds the arithmetic: tensor cores with 8 or 16 bits, or the float32 units."""

FORMS = ("nt", "nn", "tn", "tt")


class Operation(ABC):
    """One operation. Kernels take its operands by position and write one of them in place.

    ``dims`` are the names of the sizes of a shape, such as (M, N, K), in the order of "64x512x256" on a command line.
    """

    name: str
    dims: tuple[str, ...]
    examples: tuple[Dims, ...]
    """The default shapes."""
    host_examples: tuple[Dims, ...]
    """The default shapes without a GPU."""
    rate: Rate = "float32"
    output_at = -1
    """The index of the operand that is written."""

    def output(self, operands: tuple[Any, ...]) -> Tensor:
        """The operand that is written."""
        found: Tensor = operands[self.output_at]
        return found

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        """What is compared with the exact result: the output, or the part of it that a kernel must write."""
        return self.output(operands)

    def put(self, operands: tuple[Any, ...], result: Tensor) -> None:
        """Store what a kernel returned instead of writing the output."""
        self.output(operands).copy_(result)

    def refuses(self, dims: Dims) -> str:
        """Why the operation does not support this shape, as a clause; "" if it does."""
        return ""

    @abstractmethod
    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Random operands with normal data. Zeros would make kernels faster than real data does."""

    @abstractmethod
    def exact(self, *operands: Any) -> Tensor:
        """The result in float64."""

    @abstractmethod
    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        """The largest allowed error of each element; float64."""

    @abstractmethod
    def flops(self, dims: Dims) -> int:
        """Floating-point operations; a multiply-add counts as two."""

    @abstractmethod
    def bytes_moved(self, dims: Dims) -> int:
        """Bytes of each operand and of the output, the least that must be moved."""

    @abstractmethod
    def elements(self, dims: Dims) -> int:
        """Elements of the output."""


def normal(device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A function that returns standard normal tensors of given sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *size: torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)


class Gemm(Operation):
    """D (M x N) = A @ B^T."""

    dims = ("M", "N", "K")
    examples = ((64, 4096, 7168), (4096, 4096, 7168))
    host_examples = ((64, 256, 512), (128, 512, 1024))
    output_at = 2

    def flops(self, dims: Dims) -> int:
        """Operations of the product."""
        return 2 * math.prod(dims)

    def elements(self, dims: Dims) -> int:
        """Elements of D."""
        return dims[0] * dims[1]


@operation
class FP8Gemm(Gemm):
    """``fp8_gemm_nt((a, scales of a), (b, scales of b), d)``: 1 x 128 and 128 x 128 scales, d bfloat16."""

    name = table.FP8
    rate = "fp8"

    def refuses(self, dims: Dims) -> str:
        """K must be a multiple of 16, as for the function."""
        return "" if dims[2] % 16 == 0 else f"K must be a multiple of 16, but it is {dims[2]}"

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data, quantised by the real casts. Scales of A have the layout that TMA reads."""
        m, n, k = dims
        (a, sfa), b, _, _ = random_operands(m, n, k, device, seed)
        return (a, get_mn_major_tma_aligned_tensor(sfa)), b, torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def exact(self, a: Any, b: Any, d: Tensor) -> Tensor:
        """The product of the quantised operands in float64."""
        return exact_product(*a, *b)

    def allowed(self, exact: Tensor, a: Any, b: Any, d: Tensor) -> Tensor:
        return tolerance(exact, accumulation_bound(*a, *b), d.dtype)

    def bytes_moved(self, dims: Dims) -> int:
        """Scales too."""
        m, n, k = dims
        blocks = -(-k // 128)
        return m * k + n * k + 2 * m * n + 4 * blocks * (m + -(-n // 128))


class ScaledGemm(FP8Gemm):
    """``fp8_gemm_nt`` with scales of another kind."""

    recipe: tuple[int, int, int] | None = None
    scaling: Scalings
    out: torch.dtype

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data, cast by `cast`."""
        (m, n, k), make = dims, normal(device, seed, torch.float32)
        a, b = self.cast(make(m, k)), self.cast(make(n, k))
        return a, b, torch.empty(m, n, dtype=self.out, device=device)

    @abstractmethod
    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cast one operand."""

    def exact(self, a: Any, b: Any, d: Tensor) -> Tensor:
        """The product of the quantised operands in float64."""
        return exact_product(a[0], a[1], b[0], b[1], scaling=self.scaling)

    def allowed(self, exact: Tensor, a: Any, b: Any, d: Tensor) -> Tensor:
        return tolerance(exact, accumulation_bound(a[0], a[1], b[0], b[1], scaling=self.scaling), d.dtype)

    def bytes_moved(self, dims: Dims) -> int:
        """Scales too."""
        m, n, k = dims
        scales = -(-k // 128) if self.recipe else 1
        return m * k + n * k + self.out.itemsize * m * n + 4 * scales * (m + n)


@operation
class WeightGradient(ScaledGemm):
    """``fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))``: scales of 1 x 128 on both sides, d float32."""

    name = ops.WGRAD
    recipe = (1, 1, 128)
    scaling = table.ROWS_ON_BOTH_SIDES
    out = torch.float32
    examples = ((4096, 7168, 4096), (7168, 2048, 4096))

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales have the layout that TMA reads."""
        values, sf = per_token_cast_to_fp8(x, False)
        return values, get_mn_major_tma_aligned_tensor(sf)


@operation
class RowwiseGemm(ScaledGemm):
    """``fp8_gemm_nt(a, b, d)`` with one scale for each row of a and of b, d bfloat16."""

    name = ops.ROWWISE
    scaling = table.WHOLE_ROWS
    out = torch.bfloat16

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales (rows, 1)."""
        sf = x.abs().amax(1, keepdim=True) / 448
        return (x / sf).to(torch.float8_e4m3fn), sf


SCALED_GEMMS: tuple[type[ScaledGemm], ...] = (WeightGradient, RowwiseGemm)


class HalfGemm(Gemm):
    """``bf16_gemm_nt(a, b, d)`` and the like, in all layouts, bfloat16 and float16; d of the operands' dtype."""

    rate = "half"

    def __init__(self, name: str) -> None:
        self.name, self.form = name, name[-2:]
        self.dtype = table.TORCH[ops.PRODUCTS[f"{name[:-2]}nt"].dtype]

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Operands in the layouts of the form."""
        (m, n, k), make = dims, normal(device, seed, self.dtype)
        a = make(k, m) if self.form[0] == "t" else make(m, k)
        b = make(k, n) if self.form[1] == "n" else make(n, k)
        return a, b, torch.empty(m, n, dtype=self.dtype, device=device)

    def as_nt(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a as (M, K) and of b as (N, K)."""
        return (a.t() if self.form[0] == "t" else a), (b.t() if self.form[1] == "n" else b)

    def exact(self, a: Tensor, b: Tensor, d: Tensor) -> Tensor:
        """The result in float64."""
        a, b = self.as_nt(a, b)
        return a.double() @ b.double().t()

    def allowed(self, exact: Tensor, a: Tensor, b: Tensor, d: Tensor) -> Tensor:
        return tolerance(exact, half_accumulation_bound(*self.as_nt(a, b)), d.dtype)

    def bytes_moved(self, dims: Dims) -> int:
        """All operands have 16 bits."""
        m, n, k = dims
        return 2 * (m * k + n * k + m * n)


HALF_GEMMS = tuple(f"{op[:-2]}{form}" for op in (table.BF16, table.FP16) for form in FORMS)
for _name in HALF_GEMMS:
    operation(HalfGemm(_name))
