"""Products of each head that can be compared: `einsum` and `fp8_einsum`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8

from ..ops.batched import BHD, BHR
from ..spec import SCALE_BLOCK, align, ceil_div
from .operations import Operand, ProductOperation, k_refused, normal, unpaired
from .registry import Dims, Rate, operation


class EinsumOperation(ProductOperation):
    """``bhr,hdr->bhd`` or ``bhd,hdr->bhr``. d is bfloat16."""

    dims = ("rows", "heads", "K", "N")
    examples = ((64, 8, 4096, 1024), (4096, 8, 4096, 1024))
    host_examples = ((16, 3, 256, 128),)

    def __init__(self, name: str, form: str = BHR, fp8: bool = False) -> None:
        self.name, self.form = name, form
        self.rate: Rate = "fp8" if fp8 else "half"

    def refuses(self, dims: Dims) -> str:
        return k_refused(dims[2]) if self.rate == "fp8" else ""

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data, quantised by the real casts for FP8. Scales of a have the layout that TMA reads."""
        (rows, heads, k, n), make = dims, normal(device, seed)
        a, b = make(rows, heads, k), make(heads, n, k) if self.form == BHR else make(heads, k, n)
        d = torch.empty(rows, heads, n, dtype=torch.bfloat16, device=device)
        if self.rate == "half":
            return a, b, d
        values, sf = per_token_cast_to_fp8(a.flatten(0, 1), False)
        sfa = torch.empty(heads, sf.shape[1], align(rows, 4), device=device).permute(2, 0, 1)[:rows]
        sfa.copy_(sf.view(rows, heads, -1))
        of_b = [torch.stack(parts) for parts in zip(*(per_block_cast_to_fp8(x, False) for x in b), strict=True)]
        return (values.view(a.shape), sfa), tuple(of_b), d

    def products(self, a: Any, b: Any, d: Tensor) -> Iterator[tuple[Operand, Operand]]:
        (x, sfa), (y, sfb) = unpaired(a), unpaired(b)
        y = y if self.form == BHR else y.transpose(1, 2)
        for head in range(d.shape[1]):
            scales = (None, None) if sfa is None or sfb is None else (sfa[:, head], sfb[head])
            yield (x[:, head], scales[0]), (y[head], scales[1])

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        """The product of each head, one after the other."""
        return self.output(operands).transpose(0, 1).flatten(0, 1)

    def put(self, operands: tuple[Any, ...], result: Tensor) -> None:
        d = self.output(operands)
        d.copy_(result.view(d.shape[1], d.shape[0], -1).transpose(0, 1))

    def flops(self, dims: Dims) -> int:
        return 2 * math.prod(dims)

    def bytes_moved(self, dims: Dims) -> int:
        rows, heads, k, n = dims
        fp8 = self.rate == "fp8"
        scales = 4 * ceil_div(k, SCALE_BLOCK) * (rows + ceil_div(n, SCALE_BLOCK)) if fp8 else 0
        return heads * ((1 if fp8 else 2) * (rows + n) * k + 2 * rows * n + scales)

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[1] * dims[3]


EINSUMS = EinsumOperation("einsum"), EinsumOperation("einsum_bhd_hdr_bhr", BHD)
FP8_EINSUM = EinsumOperation("fp8_einsum", fp8=True)
for _einsum in (*EINSUMS, FP8_EINSUM):
    operation(_einsum)
