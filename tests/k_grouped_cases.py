"""Operands of GEMMs grouped along K whose results are exact."""

from __future__ import annotations

from typing import Any

import torch

from deep_gemm.reference import k_grouped_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sizes(ks: list[int]) -> torch.Tensor:
    return torch.tensor(ks, dtype=torch.int32, device=DEVICE)


def operands(kind: str, m: int, n: int, ks: list[int], seed: int = 0) -> tuple[Any, Any]:
    """Small integers and, for FP8, scales that are powers of two, so that every sum is exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    if kind == "bf16":
        return tuple(integers(sum(ks), size).bfloat16().to(DEVICE) for size in (m, n))
    blocks = sum(-(-k // 128) for k in ks)
    pairs = []
    for size in (m, n):
        scales = torch.exp2(torch.randint(-2, 3, (size, blocks), generator=generator).float())
        pairs.append((integers(size * sum(ks)).to(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE)))
    return pairs[0], pairs[1]


def exact(kind: str, a: Any, b: Any, ks: list[int], m: int, n: int, c: torch.Tensor | None = None) -> torch.Tensor:
    """The result in float64, by the reference."""
    d = torch.zeros(len(ks), m, n, dtype=torch.float64, device=DEVICE)
    scales = {"sfa": a[1], "sfb": b[1]} if kind == "fp8" else {}
    a, b = (a[0], b[0]) if kind == "fp8" else (a, b)
    k_grouped_reference(a, b, sizes(ks), d, c=None if c is None else c.double(), **scales)
    return d
