"""Operands of indexer logits, and what their logits are in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0x7F


@dataclass(frozen=True, eq=False)
class Prompt:
    """Queries, keys, and the range of keys that each query attends. Keys that no query attends are NaN, and so are
    their scales."""

    q: Tensor
    k: Tensor
    scales: Tensor
    weights: Tensor
    start: Tensor
    end: Tensor

    @property
    def attended(self) -> Tensor:
        """(M, N): whether a query attends a key."""
        positions = torch.arange(self.k.shape[0], device=self.k.device)
        return (positions >= self.start[:, None]) & (positions < self.end[:, None])

    def exact(self) -> Tensor:
        """The logits in float64; 0 where a key is not attended."""
        found = exact_logits(self.q, self.k, self.scales, self.weights)
        return torch.where(self.attended, found, 0.0)

    def compressed(self, width: int) -> tuple[Tensor, Tensor]:
        """The compressed logits in float64, and which of them count."""
        columns = torch.arange(width, device=self.k.device) + self.start[:, None]
        return self.exact().gather(1, columns.clamp(max=self.k.shape[0] - 1).long()), columns < self.end[:, None]


def exact_logits(q: Tensor, k: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """Logits (M, N) in float64, a head at a time."""
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k.double().t()
        total += scores.clamp(min=0) * weights[:, head, None].double()
    return total * scales.double()


KINDS = ("causal", "random", "short", "segments", "empty")


def ranges(rows: int, keys: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """First and last keys of each query."""
    index = torch.arange(rows)
    if kind == "causal":
        start, end = torch.zeros(rows), index + keys - rows + 1
    elif kind == "random":
        ends = torch.randint(0, keys + 1, (2, rows), generator=generator)
        start, end = ends.min(0).values, ends.max(0).values
    elif kind == "short":
        start = torch.randint(0, keys, (rows,), generator=generator)
        end = start + torch.randint(0, 7, (rows,), generator=generator)
    elif kind == "segments":
        start = index * 5 // rows * (keys // 5)
        end = start + index % max(1, keys // 5) + 1
    else:
        start = end = torch.full((rows,), keys // 2)
    return start.clamp(0, keys).int(), end.clamp(0, keys).int()


def prompt(
    rows: int, keys: int, heads: int = 64, dim: int = 128, kind: str = "random", seed: int = 0, device: Any = "cpu"
) -> Prompt:
    """Normal data, weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator).to(E4M3)
    k = torch.randn(keys, dim, generator=generator).to(E4M3)
    scales = torch.rand(keys, generator=generator) + 0.1
    weights = torch.randn(rows, heads, generator=generator)
    made = Prompt(q, k, scales, weights, *ranges(rows, keys, kind, generator))
    unused = ~made.attended.any(0)
    k.view(torch.uint8)[unused] = NAN_BYTE
    scales[unused] = torch.nan
    return Prompt(*(x.to(device) for x in (q, k, scales, weights, made.start, made.end)))


@dataclass(frozen=True, eq=False)
class Decoding:
    """Tokens of requests, and pages of keys. Keys past a request's length are NaN, and pages of nobody too; table
    entries past it are -1."""

    q: Tensor
    cache: Tensor
    weights: Tensor
    lengths: Tensor
    table: Tensor
    keys: Tensor
    scales: Tensor

    @property
    def live(self) -> Tensor:
        """(B * next_n, width): whether a column counts."""
        width = self.keys.shape[1]
        return torch.arange(width, device=self.q.device) < self.lengths.reshape(-1, 1)

    def exact(self) -> Tensor:
        """The logits in float64; 0 where they do not count."""
        _, tokens = self.q.shape[:2]
        rows = [
            exact_logits(q, k, s, w)
            for q, k, s, w in zip(self.q, self.keys, self.scales, self.weights.split(tokens), strict=True)
        ]
        return (
            torch.where(self.live, torch.cat(rows), 0.0) if rows else self.weights.new_zeros(self.live.shape).double()
        )


def decoding(
    last: list[int],
    next_n: int = 1,
    heads: int = 64,
    dim: int = 128,
    page_keys: int = 64,
    width: int = 1000,
    padding: int = 0,
    seed: int = 0,
    device: Any = "cpu",
) -> Decoding:
    """A batch whose last tokens attend ``last`` keys. ``padding``: bytes between pages."""
    generator = torch.Generator().manual_seed(seed)
    batch, pages = len(last), -(-width // page_keys)
    lengths = torch.tensor(last, dtype=torch.int32)[:, None] + torch.arange(next_n, dtype=torch.int32) - next_n + 1
    q = torch.randn(batch, next_n, heads, dim, generator=generator).to(E4M3)
    weights = torch.randn(batch * next_n, heads, generator=generator)
    keys = torch.randn(batch, pages * page_keys, dim, generator=generator).to(E4M3)
    scales = torch.rand(batch, pages * page_keys, generator=generator) + 0.1
    dead = torch.arange(pages * page_keys) >= torch.tensor(last)[:, None]
    keys.view(torch.uint8)[dead] = NAN_BYTE
    scales[dead] = torch.nan
    count, size = batch * pages + 3, page_keys * (dim + 4)
    memory = torch.full((count, size + padding), NAN_BYTE, dtype=torch.uint8)
    table = torch.randperm(count, generator=generator)[: batch * pages].view(batch, pages)
    memory[table.flatten(), : page_keys * dim] = keys.view(torch.uint8).view(batch * pages, page_keys * dim)
    memory[table.flatten(), page_keys * dim : size] = scales.view(torch.uint8).view(batch * pages, page_keys * 4)
    table = table.masked_fill(torch.arange(pages) * page_keys >= torch.tensor(last)[:, None], -1)
    memory = memory.to(device)
    cache = memory.as_strided((count, page_keys, 1, dim + 4), (size + padding, dim + 4, dim + 4, 1))
    rest = (weights, lengths.clamp(min=0).contiguous(), table.int(), keys[:, :width], scales[:, :width])
    return Decoding(q.to(device), cache, *(x.to(device) for x in rest))


def schedule(last: list[int], slots: int) -> list[list[int]]:
    """The schedule, slot by slot: the splits in order, and the last slots with one more."""
    splits = [(request, split) for request, keys in enumerate(last) for split in range(-(-max(keys, 0) // 256))]
    at, rows = 0, []
    for slot in range(slots):
        rows.append(list(splits[at]) if at < len(splits) else [len(last), 0])
        at += len(splits) // slots + (slot >= slots - len(splits) % slots)
    return [*rows, [len(last), 0]]
