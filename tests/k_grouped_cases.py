"""Operands of GEMMs grouped along K whose results are exact."""

from typing import Any

import torch

from deep_gemm.ops.reference import k_grouped_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sizes(ks: list[int]) -> torch.Tensor:
    return torch.tensor(ks, dtype=torch.int32, device=DEVICE)


MIXED_RECIPE = (1, 128, 128)


def operands(kind: str, m: int, n: int, ks: list[int], seed: int = 0) -> tuple[Any, Any]:
    """Small integers and, for FP8 and the mixed recipe, scales of powers of two: every sum is exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    if kind == "bf16":
        return tuple(integers(sum(ks), size).bfloat16().to(DEVICE) for size in (m, n))
    blocks = sum(-(-k // 128) for k in ks)
    pairs = []
    for size, rows in ((m, m), (n, -(-n // 128) if kind == "mixed" else n)):
        scales = torch.exp2(torch.randint(-2, 3, (rows, blocks), generator=generator).float())
        pairs.append((integers(size * sum(ks)).to(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE)))
    return pairs[0], pairs[1]


def exact(kind: str, a: Any, b: Any, ks: list[int], m: int, n: int, c: torch.Tensor | None = None) -> torch.Tensor:
    """The result in float64, by the reference."""
    d = torch.zeros(len(ks), m, n, dtype=torch.float64, device=DEVICE)
    scales: dict[str, Any] = {} if kind == "bf16" else {"sfa": a[1], "sfb": b[1]}
    if kind == "mixed":
        scales["scaling"] = ("1x128", "128x128")
    a, b = (a, b) if kind == "bf16" else (a[0], b[0])
    k_grouped_reference(a, b, sizes(ks), d, c=None if c is None else c.double(), **scales)
    return d


def in_one_matrix(x: tuple[torch.Tensor, torch.Tensor], rows: int, ks: list[int], past: int = 1) -> Any:
    """An FP8 operand as parts of one matrix, each from a multiple of 128 columns on. Padding is NaN."""
    values, scales = x
    blocks = [-(-k // 128) for k in ks]
    columns = 128 * (sum(blocks) + past)
    out = torch.full((rows, columns), 0x7F, dtype=torch.uint8, device=values.device)  # NaN
    start = first = 0
    for k, count in zip(ks, blocks, strict=True):
        part = values.view(torch.uint8)[start * rows : (start + k) * rows].view(rows, k)
        out[:, first * 128 : first * 128 + k] = part
        start, first = start + k, first + count
    nan = torch.full((len(scales), past), float("nan"), device=values.device)
    return out.view(torch.float8_e4m3fn), torch.cat([scales, nan], dim=1)
