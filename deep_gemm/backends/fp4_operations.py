"""Products of MXFP4 weights that can be compared: b is (packed, scales), as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deep_gemm.ops import mxfp4
from deep_gemm.ops.cast_reference import per_token_cast_to_fp8

from .. import quantize
from ..layout import get_mn_major_tma_aligned_tensor
from ..spec import SCALE_BLOCK, Grouping, ceil_div
from .grouped_operations import GROUPINGS, MGroupedOperation
from .operations import Operand, ProductOperation, normal, unpaired
from .registry import Dims, Rate, operation

BITS = 4.25
"""Of a weight in a checkpoint."""


def whole(kind: str, packed: Tensor, scales: Tensor) -> Operand:
    """The same weights in FP8, with scales of 128 x 128, or in bfloat16. Raises InvalidInputError if FP8 would round
    one."""
    if kind == "bf16":
        return mxfp4.dequantise(packed, scales, torch.bfloat16), None
    return quantize.mxfp4_to_fp8(packed, scales)


def refused(k: int) -> str:
    """Why K is not supported; "" if it is."""
    return "" if k % mxfp4.BLOCK == 0 else f"K must be a multiple of {mxfp4.BLOCK}, but it is {k}"


class Fp4Operation(ProductOperation):
    """``fp8_fp4_gemm_nt(a, b, d)`` and ``bf16_fp4_gemm_nt``: a (M, K) in FP8 or bfloat16, d bfloat16."""

    dims = ("M", "N", "K")
    examples: tuple[Dims, ...] = ((16, 4096, 7168), (64, 4096, 7168))
    host_examples = ((64, 256, 512),)

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"{kind}_fp4_gemm_nt", kind
        self.rate: Rate = "fp8" if kind == "fp8" else "half"

    def refuses(self, dims: Dims) -> str:
        return refused(dims[2])

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data, quantised by the real casts."""
        (m, n, k), make = dims, normal(device, seed)
        a, b = make(m, k), quantize.mxfp4(make(n, k))
        if self.kind == "fp8":
            values, sf = per_token_cast_to_fp8(a, False)
            a = values, get_mn_major_tma_aligned_tensor(sf)
        return a, b, torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def products(self, a: Any, b: Any, d: Tensor) -> Iterator[tuple[Operand, Operand]]:
        yield unpaired(a), whole(self.kind, *b)

    def flops(self, dims: Dims) -> int:
        m, n, k = dims
        return 2 * m * n * k

    def bytes_moved(self, dims: Dims) -> int:
        m, n, k = dims
        of_a = m * (k + 4 * ceil_div(k, SCALE_BLOCK)) if self.kind == "fp8" else 2 * m * k
        return of_a + int(n * k * BITS / 8) + 2 * m * n

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[1]


class Fp4GroupedOperation(MGroupedOperation):
    """The same in groups of rows, with the arguments of `MGroupedOperation`."""

    def __init__(self, kind: str, grouping: Grouping) -> None:
        super().__init__(kind, grouping)
        self.name, self.kind = f"m_grouped_{kind}_fp4_gemm_nt_{grouping}", kind
        routings = ((8, 512), (32, 128)) if grouping == "contiguous" else ((32, 20), (8, 64))
        self.examples = tuple((groups, mean, 6144, 7168) for groups, mean in routings)

    def refuses(self, dims: Dims) -> str:
        return refused(dims[3])

    def weights(self, x: Tensor) -> Any:
        return quantize.mxfp4(x)

    def products(self, a: Any, b: Any, d: Tensor, layout: Tensor, *more: Any) -> Iterator[tuple[Operand, Operand]]:
        x, sfa = unpaired(a)
        for group, where in self.groups(d, layout):
            scales = None if sfa is None else sfa.flatten(0, -2)[where]
            yield (x.flatten(0, -2)[where], scales), whole(self.kind, b[0][group], b[1][group])

    def bytes_moved(self, dims: Dims) -> int:
        (groups, _, n, k), m = dims, sum(self.counts(dims))
        of_a = m * (k + 4 * ceil_div(k, SCALE_BLOCK)) if self.kind == "fp8" else 2 * m * k
        return of_a + int(groups * n * k * BITS / 8) + 2 * m * n


Fp4Product: TypeAlias = Fp4Operation | Fp4GroupedOperation
FP4_PRODUCTS: tuple[Fp4Product, ...] = (
    *(operation(Fp4Operation(kind)) for kind in ("fp8", "bf16")),
    *(operation(Fp4GroupedOperation(kind, grouping)) for kind in ("fp8", "bf16") for grouping in GROUPINGS),
)
