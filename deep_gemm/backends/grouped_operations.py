"""GEMMs of groups that can be compared. Sizes of groups are the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.ops.reference import group_rows

from ..layout import get_mn_major_tma_aligned_tensor
from ..spec import SCALE_BLOCK, Grouping, align, ceil_div
from .operations import Operand, ProductOperation, k_refused, normal, unpaired
from .registry import Dims, Rate, operation

SPREAD = 0.3
"""The size of a group differs from the mean by up to this part of it."""
ALIGNMENT = 128
"""Contiguous groups start at multiples of this many rows. K of each group is a multiple of it."""


class GroupedOperation(ProductOperation):
    """Products of groups, in FP8 or BF16."""

    def __init__(self, dtype: str, name: str) -> None:
        self.name = name
        self.rate: Rate = "fp8" if dtype == "fp8" else "half"
        self.element_bytes = 1 if dtype == "fp8" else 2

    def counts(self, dims: Dims) -> list[int]:
        """The size of each group."""
        groups, mean = dims[:2]
        rng = random.Random(f"{groups}x{mean}")
        return [max(1, int(mean * rng.uniform(1 - SPREAD, 1 + SPREAD))) for _ in range(groups)]

    def flops(self, dims: Dims) -> int:
        return 2 * sum(self.counts(dims)) * dims[2] * dims[3]


class MGroupedOperation(GroupedOperation):
    """``m_grouped_*_gemm_nt_contiguous(a, b, d, grouped_layout)`` in the index form, with rows of padding after each
    group, or ``m_grouped_*_gemm_nt_masked(a, b, d, masked_m, expected_m)``. d is bfloat16."""

    dims = ("groups", "mean rows", "N", "K")
    host_examples = ((4, 48, 256, 256),)

    def __init__(self, dtype: str, grouping: Grouping) -> None:
        super().__init__(dtype, f"m_grouped_{dtype}_gemm_nt_{grouping}")
        self.grouping = grouping
        routings = ((8, 4096), (64, 256)) if grouping == "contiguous" else ((32, 192), (32, 20))
        self.examples = tuple((groups, mean, 6144, 7168) for groups, mean in routings)

    def refuses(self, dims: Dims) -> str:
        return k_refused(dims[3])

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data, quantised by the real casts for FP8. Rows of padding have data too."""
        (groups, mean, n, k), counts, make = dims, self.counts(dims), normal(device, seed)
        if self.grouping == "masked":
            leading: tuple[int, ...] = (groups, align(max(counts), ALIGNMENT))
            layout: list[int] = counts
            more: tuple[int, ...] = (mean,)
        else:
            padded = [(group, rows, align(rows, ALIGNMENT)) for group, rows in enumerate(counts)]
            layout, more = [group if row < rows else -1 for group, rows, end in padded for row in range(end)], ()
            leading = (len(layout),)
        a, b = self.tokens(make(*leading, k)), self.weights(make(groups, n, k))
        d = torch.empty(*leading, n, dtype=torch.bfloat16, device=device)
        return a, b, d, torch.tensor(layout, dtype=torch.int32, device=device), *more

    def tokens(self, x: Tensor) -> Any:
        """a of bfloat16 values."""
        if self.rate == "half":
            return x
        values, sf = per_token_cast_to_fp8(x.flatten(0, -2), False)
        return values.view(x.shape), get_mn_major_tma_aligned_tensor(sf.view(*x.shape[:-1], -1))

    def weights(self, x: Tensor) -> Any:
        """b of bfloat16 values (groups, N, K)."""
        if self.rate == "half":
            return x
        each = zip(*(per_block_cast_to_fp8(matrix, False) for matrix in x), strict=True)
        return tuple(torch.stack(parts) for parts in each)

    def groups(self, d: Tensor, layout: Tensor) -> list[tuple[int, slice]]:
        """Each group and its rows of the flat output."""
        return [pair for pair in group_rows(layout, self.grouping, d.shape[-2]) if pair[0] >= 0]

    def products(self, a: Any, b: Any, d: Tensor, layout: Tensor, *more: Any) -> Iterator[tuple[Operand, Operand]]:
        (x, sfa), (y, sfb) = unpaired(a), unpaired(b)
        for group, where in self.groups(d, layout):
            scales = (None, None) if sfa is None or sfb is None else (sfa.flatten(0, -2)[where], sfb[group])
            yield (x.flatten(0, -2)[where], scales[0]), (y[group], scales[1])

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        """The rows of all groups, without padding."""
        *_, d, layout = operands[:4]
        return torch.cat([d.flatten(0, -2)[where] for _, where in self.groups(d, layout)])

    def put(self, operands: tuple[Any, ...], result: Tensor) -> None:
        *_, d, layout = operands[:4]
        start = 0
        for _, where in self.groups(d, layout):
            rows = where.stop - where.start
            d.view(-1, d.shape[-1])[where].copy_(result[start : start + rows])
            start += rows

    def bytes_moved(self, dims: Dims) -> int:
        """Bytes of rows of A and D that are no padding, of all B, and of scales."""
        (groups, _, n, k), m = dims, sum(self.counts(dims))
        scales = 4 * ceil_div(k, SCALE_BLOCK) * (m + groups * ceil_div(n, SCALE_BLOCK)) if self.rate == "fp8" else 0
        return self.element_bytes * (m + groups * n) * k + 2 * m * n + scales

    def elements(self, dims: Dims) -> int:
        return sum(self.counts(dims)) * dims[2]


class KGroupedOperation(GroupedOperation):
    """``k_grouped_*(a, b, d, ks, grouped_layout)``, products of each group's part of K, d float32 (groups, M, N).
    Backends may add to d in place, which begins as zeros."""

    dims = ("groups", "mean K", "M", "N")
    examples = ((8, 4096, 4096, 7168),)
    host_examples = ((3, 128, 128, 256),)
    scaling = ("1x128", "1x128")

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype, f"k_grouped_{dtype}_gemm_{'nt' if dtype == 'fp8' else 'tn'}_contiguous")

    def counts(self, dims: Dims) -> list[int]:
        """K of each group, a multiple of 128."""
        return [align(size, ALIGNMENT) for size in super().counts(dims)]

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Normal data. FP8 values of a group are a K-major matrix, and lie after those of the group before."""
        (groups, _, m, n), ks, make = dims, self.counts(dims), normal(device, seed)
        d = torch.empty(groups, m, n, device=device)
        given = d, ks, torch.tensor(ks, dtype=torch.int32, device=device)
        if self.rate == "half":
            return make(sum(ks), m), make(sum(ks), n), *given
        return *(self._flat([make(rows, k) for k in ks]) for rows in (m, n)), *given

    @staticmethod
    def _flat(matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
        casts = [per_token_cast_to_fp8(x, False) for x in matrices]
        values = torch.cat([x.view(torch.uint8).flatten() for x, _ in casts]).view(torch.float8_e4m3fn)
        return values, torch.cat([sf.t() for _, sf in casts]).t()

    def products(self, a: Any, b: Any, d: Tensor, ks: list[int], layout: Tensor) -> Iterator[tuple[Operand, Operand]]:
        (x, sfa), (y, sfb), (_, m, n), start = unpaired(a), unpaired(b), d.shape, 0
        for k in ks:
            stop = start + k
            if sfa is None or sfb is None:
                yield (x[start:stop].t(), None), (y[start:stop].t(), None)
            else:
                blocks = slice(start // SCALE_BLOCK, stop // SCALE_BLOCK)
                of_a, of_b = x[start * m : stop * m].view(m, k), y[start * n : stop * n].view(n, k)
                yield (of_a, sfa[:, blocks]), (of_b, sfb[:, blocks])
            start = stop

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        return self.output(operands).flatten(0, 1)

    def bytes_moved(self, dims: Dims) -> int:
        groups, _, m, n = dims
        k = sum(self.counts(dims))
        of_k = k + 4 * k // SCALE_BLOCK if self.rate == "fp8" else 2 * k
        return of_k * (m + n) + 4 * groups * m * n

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[2] * dims[3]


GROUPINGS: tuple[Grouping, ...] = ("contiguous", "masked")
M_GROUPED = tuple(operation(MGroupedOperation(dtype, grouping)) for dtype in ("fp8", "bf16") for grouping in GROUPINGS)
K_GROUPED = tuple(operation(KGroupedOperation(dtype)) for dtype in ("fp8", "bf16"))
