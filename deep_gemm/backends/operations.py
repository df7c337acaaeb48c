"""Dense products that can be compared: operands, the exact result, the allowed error, and the cost of each."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import per_token_cast_to_fp8
from deep_gemm.ops.reference import BLOCKS, Scalings, exact_product

from .. import ops
from ..layout import get_mn_major_tma_aligned_packed_ue8m0_tensor, get_mn_major_tma_aligned_tensor
from ..ops import table
from ..spec import SCALE_BLOCK, ceil_div
from ..testing.accuracy import accumulation_bound, half_accumulation_bound, tolerance
from ..testing.operands import random_operands
from .registry import Dims, Operation, Rate, operation

__all__ = ["Dims", "Operation", "normal"]

B16_GEMMS = tuple(f"{op[:-2]}{form}" for op in (table.BF16, table.FP16) for form in ops.PRODUCTS[op].forms)
RECIPES = {ops.WGRAD: (1, 1, 128), ops.ROWWISE: None}
"""What `fp8_gemm_nt` is called with for scales of other kinds."""

Operand = tuple[Tensor, Tensor | None]
"""Values, and for FP8 their scales."""


def normal(device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A function that returns standard normal tensors of given sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *size: torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)


def unpaired(x: Any) -> Operand:
    """Values and scales of an argument, which has no scales if it is a tensor."""
    return (x, None) if isinstance(x, Tensor) else (x[0], x[1])


class ProductOperation(Operation):
    """Matrix products, in FP8 or in 16 bits. The bounds are those of `testing.accuracy`."""

    output_at = 2
    scaling: Scalings = BLOCKS

    @abstractmethod
    def products(self, *operands: Any) -> Iterator[tuple[Operand, Operand]]:
        """The operands (rows, K) of each product."""

    def exact(self, *operands: Any) -> Tensor:
        found = []
        for (a, sfa), (b, sfb) in self.products(*operands):
            if sfa is None or sfb is None:
                found.append(a.double() @ b.double().t())
            else:
                found.append(exact_product(a, sfa, b, sfb, scaling=self.scaling))
        return torch.cat(found)

    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        found = []
        for (a, sfa), (b, sfb) in self.products(*operands):
            if sfa is None or sfb is None:
                found.append(half_accumulation_bound(a, b))
            else:
                found.append(accumulation_bound(a, sfa, b, sfb, scaling=self.scaling))
        return tolerance(exact, torch.cat(found), self.output(operands).dtype)


class GemmOperation(ProductOperation):
    """D (M x N) = A @ B^T in one form, by the table of `ops`. Of FP8, A and B are pairs with scales."""

    dims = ("M", "N", "K")
    examples: tuple[Dims, ...] = ((64, 4096, 7168), (4096, 4096, 7168))
    host_examples = ((64, 256, 512), (128, 512, 1024))

    def __init__(self, name: str) -> None:
        self.name, self.form = name, name[-2:] if name in B16_GEMMS else "nt"
        product = ops.PRODUCTS[f"{name[:-2]}nt" if name in B16_GEMMS else name]
        self.dtype, self.out, self.scaling = (
            table.TORCH[product.dtype],
            table.TORCH[product.outputs[0]],
            product.scaling,
        )
        self.rate: Rate = "fp8" if product.is_scaled else "half"
        if name == ops.WGRAD:
            self.examples = ((4096, 7168, 4096), (7168, 2048, 4096))

    def refuses(self, dims: Dims) -> str:
        return k_refused(dims[2]) if self.rate == "fp8" else ""

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """FP8 is quantised by the real casts. Scales for each row and 128 of K have the layout that TMA reads."""
        m, n, k = dims
        d = torch.empty(m, n, dtype=self.out, device=device)
        if self.rate == "half":
            make = normal(device, seed, self.dtype)
            a = make(k, m) if self.form[0] == "t" else make(m, k)
            return a, make(k, n) if self.form[1] == "n" else make(n, k), d
        if self.scaling == BLOCKS:
            (a, sfa), b, _, _ = random_operands(m, n, k, device, seed)
            return (a, get_mn_major_tma_aligned_tensor(sfa)), b, d
        make = normal(device, seed, torch.float32)
        return self._cast(make(m, k)), self._cast(make(n, k)), d

    def _cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.scaling == table.ROWS_ON_BOTH_SIDES:
            values, sf = per_token_cast_to_fp8(x, False)
            return values, get_mn_major_tma_aligned_tensor(sf)
        sf = x.abs().amax(1, keepdim=True) / 448
        return (x / sf).to(torch.float8_e4m3fn), sf

    def as_nt(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a as (M, K) and of b as (N, K)."""
        return (a.t() if self.form[0] == "t" else a), (b.t() if self.form[1] == "n" else b)

    def products(self, a: Any, b: Any, d: Tensor) -> Iterator[tuple[Operand, Operand]]:
        (x, sfa), (y, sfb) = unpaired(a), unpaired(b)
        x, y = self.as_nt(x, y)
        yield (x, sfa), (y, sfb)

    def flops(self, dims: Dims) -> int:
        return 2 * math.prod(dims)

    def bytes_moved(self, dims: Dims) -> int:
        m, n, k = dims
        blocks = ceil_div(k, SCALE_BLOCK)
        scales = {
            BLOCKS: blocks * (m + ceil_div(n, SCALE_BLOCK)),
            table.ROWS_ON_BOTH_SIDES: blocks * (m + n),
            table.WHOLE_ROWS: m + n,
        }
        return self.dtype.itemsize * (m + n) * k + self.out.itemsize * m * n + 4 * scales.get(self.scaling, 0)

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[1]


class PackedOperation(GemmOperation):
    """`fp8_gemm_nt` with scales of UE8M0, which GPUs other than Hopper take. It is checked, and not compared."""

    def __init__(self) -> None:
        super().__init__(ops.DEFAULT)
        self.scaling = table.EXPONENTS

    def _cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, sf = per_token_cast_to_fp8(x, True)
        return values, get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)


def k_refused(k: int) -> str:
    """Why FP8 products do not support K, as our functions say; "" if they do."""
    return "" if k % 16 == 0 else f"K must be a multiple of 16, but it is {k}"


for _name in (ops.DEFAULT, ops.WGRAD, ops.ROWWISE, *B16_GEMMS):
    operation(GemmOperation(_name))
