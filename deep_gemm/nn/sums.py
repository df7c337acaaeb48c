"""Sums over the experts' rows of each token, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deep_gemm.nn import casts
from deep_gemm.ops import moe_rows


def added(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of the rows of x (any rows, width) that each token has, in float32 and in their order, rounded once:
    (tokens, width) bfloat16. ``places`` (tokens, top_k) int32; -1 is no row. Rows are multiplied by ``weights``."""
    y = torch.empty(places.shape[0], x.shape[1], dtype=torch.bfloat16, device=x.device)
    moe_rows.combine(x, places, None if weights is None else weights.float().contiguous(), y)
    return y


def dots(x: Tensor, places: Tensor, dy: Tensor) -> Tensor:
    """The gradient of the weights of `added`, given that of its result, whose rows are contiguous: (tokens, top_k)
    float32."""
    found = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    moe_rows.dots(x, places, dy, found)
    return found


def places_of(order: Tensor, tokens: int, top_k: int) -> Tensor:
    """``places`` of rows that belong to the choices ``order``, which are places in (tokens, top_k)."""
    places = torch.full((tokens, top_k), -1, dtype=torch.int32, device=order.device)
    places.view(-1)[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return places


class WeightedSum(torch.autograd.Function):
    """`added` of rows x, which belong to the choices ``order``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        places = places_of(order, *weights.shape)
        ctx.save_for_backward(x, weights, order, places)
        return added(x, places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, order, places = ctx.saved_tensors
        dy = casts.row_major(dy)
        # Multiplied in float32, in one pass.
        dx = dy[order // weights.shape[1]].mul_(weights.flatten()[order][:, None])
        return dx, dots(x, places, dy), None
