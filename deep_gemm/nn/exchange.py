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

from deep_gemm.nn.sums import added, places_of
from deep_gemm.ops.moe_rows import by_expert

Counts = list[int]


@dataclass(frozen=True)
class TokenExchange:
    """Exchanges rows among the ranks of a mesh with one dimension. Rank r has the r-th part of the experts."""

    mesh: DeviceMesh

    def __call__(self, x: Tensor, chosen: Tensor, experts: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The results of tokens x (tokens, width) by the experts that each chose, (tokens, top_k): (tokens, top_k,
        width), zeros where a choice is none of the ``experts`` of all ranks. ``run(rows, experts)`` computes rows by
        experts of this rank, numbered from 0."""
        back, order = self.rows(x, chosen, experts, run)
        results = back.new_zeros(chosen.numel(), back.shape[1]).index_copy(0, order, back)
        return results.view(*chosen.shape, back.shape[1])

    def rows(
        self, x: Tensor, chosen: Tensor, experts: int, run: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same results in the order of their experts, (rows, width), and the place of each in ``chosen``."""
        group, ranks, top_k = self.mesh.get_group(), self.mesh.size(), chosen.shape[1]
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
        return back, order


class Chosen(torch.autograd.Function):
    """Rows of x, one for each choice of a token, in ``order``. Gradients of a token's rows are added in float32, in the
    order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = x.shape[0], top_k
        return x[order // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return added(dy, places_of(order, *ctx.shape)), None, None


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
