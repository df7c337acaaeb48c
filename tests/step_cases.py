"""Casts and dot products of a training step of experts: operands, and what they must give. For tests without a GPU and
with one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.nn import casts
from deep_gemm.ops import cast_reference, moe_rows

SENT = [(3, 64, 128, "column"), (130, 37, 272, "column"), (256, 200, 144, "tile"), (77, 5, 250, "column")]
"""Rows, tokens, columns, and the blocks of columns that share scales."""
GATED = [(1, 128), (130, 264), (37, 136), (200, 101), (257, 768)]
"""Rows of gate and up, and their columns: those of both are halves that begin anywhere."""
DOTS = [(1, 1, 16), (5, 8, 272), (37, 9, 128), (2, 33, 4096)]
"""Tokens, choices of each and columns."""


ROUTED = [(1, 8, 2), (7, 5, 3), (40, 40, 4), (3, 1500, 33), (300, 128, 8)]
"""Tokens, experts and choices of each: more than a warp takes at once, and more experts than a CTA has threads."""


def sent(rows: int, tokens: int, columns: int, device: str) -> dict[str, Tensor]:
    """Tokens, and of each row its token, or a number that is none, and its factor."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(tokens, columns, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (tokens, 1), generator=generator
    )
    index = torch.randint(-1, tokens + 1, (rows,), generator=generator, dtype=torch.int32)
    found = {"x": x.bfloat16(), "rows": index, "factors": torch.rand(rows, generator=generator) - 0.5}
    return {name: tensor.to(device) for name, tensor in found.items()}


def check_sent(found: Any, blocks: str, x: Tensor, rows: Tensor, factors: Tensor | None = None) -> None:
    """All bytes are those of casts of the gathered rows."""
    index, x = rows.cpu().long(), x.cpu()
    gathered = torch.cat([x, x.new_zeros(1, x.shape[1])])[index.where(index >= 0, len(x)).clamp(max=len(x))]
    if factors is not None:
        gathered = (gathered.float() * factors.cpu()[:, None]).bfloat16()
    for (values, scales), block, turned in zip(found, ((1, 128), casts_of(blocks)), (False, True), strict=True):
        wanted = cast_reference.cast_blocks(gathered, *block, False, 0.0)
        got = [
            each.cpu().t() if turned else each.cpu() for each in (values[:, : len(index)] if turned else values, scales)
        ]
        for mine, other in zip(got, wanted, strict=True):
            assert torch.equal(mine.float() + 0.0, other.float() + 0.0)


def casts_of(blocks: str) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    return (128, 1) if blocks == "column" else (128, 128)


def gate_and_up(rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Gate and up, and the gradient of silu(gate) * up."""
    generator = torch.Generator().manual_seed(rows)
    both, d = (torch.randn(rows, size, generator=generator) * 3 for size in (2 * columns, columns))
    both[0, :6] = torch.tensor([-0.0, 88.0, -88.0, -8.0, 200.0, -200.0])
    return both.to(dtype).to(device), (d * 1e-6).to(dtype).to(device)


def check_gradient(found: Any, both: Tensor, d: Tensor) -> None:
    """Values are those of float64, but for half a step of E4M3 and the approximate exponential."""
    (gate, up), d = both.cpu().double().chunk(2, 1), d.cpu().double()
    sigmoid = gate.sigmoid()
    exact = torch.cat([d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid], 1)
    for (values, scales), block, turned in zip(found, ((1, 128), (128, 1)), (False, True), strict=True):
        wide = exact.t() if turned else exact
        got = cast_reference.dequantise(values[:, : wide.shape[1]], scales).double().cpu()
        limit = scales.double().cpu().repeat_interleave(128, 1)[:, : wide.shape[1]]
        # Half a step, relative and, below the normal range of E4M3, in units of the scale. A subnormal sigmoid is zero.
        assert bool(((got - wide).abs() <= wide.abs() / 15 + limit * 2.0**-9 + 1e-40).all())
        wanted = cast_reference.cast_blocks(exact.float(), *block, False, 0.0)[0].float()
        values = values[:, : wide.shape[1]].cpu().float()
        assert float(((values.t() if turned else values) != wanted).float().mean()) < 1e-3


def gradients(both: Tensor, d: Tensor) -> Any:
    return casts.gradients(both, gated=True, gradient=d)


def dots(tokens: int, top_k: int, width: int, device: str) -> dict[str, Tensor]:
    """Operands of `deep_gemm.ops.moe_rows.dots`. Rows that no choice has are NaN."""
    torch.manual_seed(tokens)
    x = torch.full((tokens * top_k + 9, width), float("nan")).bfloat16()
    places = torch.randperm(len(x))[: tokens * top_k].view(tokens, top_k).int()
    x[places.flatten().long()] = torch.randn(tokens * top_k, width).bfloat16()
    places[torch.rand(places.shape) < 0.2] = -1
    rows = torch.randn(tokens, width + 3).bfloat16()[:, 3:]  # which begin anywhere
    found = {"x": x, "places": places, "rows": rows, "out": torch.full((tokens, top_k), float("nan"))}
    return {name: tensor.to(device) for name, tensor in found.items()}


def check_dots(x: Tensor, places: Tensor, rows: Tensor, out: Tensor) -> None:
    """Sums of float32 are near those of float64."""
    chosen = x[places.clamp(min=0).long()].double().masked_fill((places < 0)[..., None], 0)
    products = chosen * rows[:, None].double()
    assert bool(((out.double() - products.sum(2)).abs() <= 1e-6 * products.abs().sum(2)).all())


def compute_dots(given: dict[str, Tensor]) -> None:
    moe_rows.dots(*(given[name] for name in ("x", "places", "rows", "out")))


def routed(tokens: int, experts: int, top_k: int, device: str, alignment: int = 128) -> dict[str, Any]:
    """Operands of `deep_gemm.ops.moe_rows.route`. Some choices are no experts."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(-2, experts + 3, (tokens, top_k), generator=generator)
    chosen[chosen == experts + 2] = 1 << 33
    capacity = moe_rows.most_rows(tokens * top_k, experts, alignment)
    shapes = {"rows": (tokens, top_k), "places": (tokens, top_k), "of_rows": (capacity,), "index": (capacity,)}
    shapes |= {"labels": (capacity,), "sizes": (experts,)}
    kinds = {"rows": torch.int64, "of_rows": torch.int64}
    found = {name: torch.full(shape, -7, dtype=kinds.get(name, torch.int32)) for name, shape in shapes.items()}
    found = {name: tensor.to(device) for name, tensor in ({"chosen": chosen} | found).items()}
    return {**found, "experts": experts, "alignment": alignment}


def check_routed(given: dict[str, Any]) -> None:
    """All numbers are those that torch computes."""
    chosen, sizes = given["chosen"].cpu(), (given["experts"], given["alignment"], len(given["of_rows"]))
    names = "rows", "places", "of_rows", "index", "labels", "sizes"
    for name, wanted in zip(names, moe_rows.routed(chosen, *sizes), strict=True):
        assert torch.equal(given[name].cpu(), wanted), name
