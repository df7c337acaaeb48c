"""Sending tokens to the ranks of their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from deep_gemm.nn.routing import by_expert

Counts = list[int]


@dataclass(frozen=True)
class TokenExchange:
    """Exchanges rows among the ranks of a mesh with one dimension. Rank r has the r-th part of the experts."""

    mesh: DeviceMesh

    def __call__(self, x: Tensor, chosen: Tensor, experts: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The results of tokens x (tokens, width) by the experts that each chose, (tokens, top_k): (tokens, top_k,
        width), zeros where a choice is none of the ``experts`` of all ranks. ``run(rows, experts)`` computes rows by
        experts of this rank, numbered from 0."""
        (tokens, top_k), group, ranks = chosen.shape, self.mesh.get_group(), self.mesh.size()
        _, order, counts = by_expert(chosen, experts)
        sent = counts.view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        out, into = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # waits for the GPU
        order = order[: sum(out)]  # dropped ones are the last
        rows = Moved.apply(Chosen.apply(x, order, top_k), out, into, group)
        own = torch.arange(sent.shape[1], device=x.device).repeat(ranks)
        of_rows = own.repeat_interleave(received.flatten(), output_size=sum(into))
        back: Tensor = Moved.apply(run(rows, of_rows[:, None]), into, out, group)
        results = back.new_zeros(tokens * top_k, back.shape[1]).index_copy(0, order, back)
        return results.view(tokens, top_k, back.shape[1])


class Chosen(torch.autograd.Function):
    """Rows of x, one for each choice of a token, in ``order``. Gradients of a token's rows are added in float32, in the
    order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = x.shape[0], top_k, x.shape[1]
        return x[order // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        tokens, top_k, width = ctx.shape
        rows = dy.new_zeros(tokens * top_k, width)
        rows[order] = dy
        return rows.view(ctx.shape).float().sum(1).to(dy.dtype), None, None


class Moved(torch.autograd.Function):
    """Rows that come from all ranks, ``into[r]`` from rank r, for those of x, of which ``out[r]`` go to rank r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Counts, into: Counts, group: Any) -> Tensor:
        ctx.out, ctx.into, ctx.group = out, into, group
        return _moved(x, out, into, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(dy, ctx.into, ctx.out, ctx.group), None, None, None


def _moved(x: Tensor, out: Counts, into: Counts, group: Any) -> Tensor:
    y = x.new_empty(sum(into), x.shape[1])
    bits = y.view(torch.uint8), x.contiguous().view(torch.uint8)  # which every backend sends
    dist.all_to_all_single(*bits, into, out, group=group)
    return y
