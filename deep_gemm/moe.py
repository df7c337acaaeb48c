"""Mixtures of experts as one call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import checks, moe_chain


def fp8_moe(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    y: Tensor | None = None,
    *,
    clamp: float | None = None,
) -> Tensor:
    """A mixture of experts with SwiGLU, without its router: ``y[t]`` is the sum over k of ``topk_weights[t, k]`` times
    the result of expert ``topk_idx[t, k]`` for the token ``x[t]``, where expert e computes::

        gate, up = split(x @ gate_up[e]^T)
        silu(min(gate, clamp)) * min(max(up, -clamp), clamp) @ down[e]^T

    Four launches: tokens are cast, and written once for each of their experts; a grouped product with SwiGLU, and one
    without; and the sums. How many tokens an expert has is counted on the device. No launch waits for the host, so one
    CUDA graph serves all choices.

    Args:
        x: (tokens, width) bfloat16, with contiguous rows; or a pair of E4M3, whose rows begin at multiples of 16 bytes,
            and float32 scales (tokens, ceil(width / 128)) with any strides.
        topk_idx: (tokens, top_k) int64, contiguous: experts from 0 on. -1 is no expert, and so is the number of
            experts. Experts of a token differ; on a GPU only DG_CHECK=1 looks.
        topk_weights: (tokens, top_k) float32, contiguous.
        gate_up: (experts, 2 * inner, width) E4M3, rows of gate and then rows of up, and float32 scales of 128 x 128:
            (experts, ceil(2 * inner / 128), ceil(width / 128)). width and inner are multiples of 16; up to 2048
            experts.
        down: (experts, width, inner) E4M3, and its scales.
        y: (tokens, width) bfloat16, rows at multiples of 16 bytes; None for a fresh one. It shares no memory with
            others.
        clamp: None, or SwiGLU's limit. Each number is another kernel.

    Returns y.

    The result of SwiGLU is cast to E4M3 with scales of 1 x 128. If inner is no multiple of 128, gate and up are rounded
    to bfloat16 first, and SwiGLU is a launch of its own. Each expert's row is rounded to bfloat16, multiplied by its
    weight in float32, and added in the order of k; then the sum is rounded. Results repeat bit for bit, and a token's
    do not depend on other tokens.

    Memory for rows of all experts is taken from torch's allocator in each call: about 2 * width + inner bytes for each
    row. Up to 64 tokens there are tokens x experts rows, otherwise tokens * top_k and up to 127 more for each
    expert. Before a call inside CUDA-graph capture, the shape must have been called once outside of it. Nothing is
    recorded for autograd. On the CPU a reference runs.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: a kernel could not be compiled, loaded or launched.

    >>> x, chosen = torch.randn(3, 256).bfloat16(), torch.tensor([[0, 1], [1, -1], [1, 0]])
    >>> gate_up = torch.zeros(2, 256, 256).to(torch.float8_e4m3fn), torch.ones(2, 2, 2)
    >>> down = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), torch.ones(2, 2, 1)
    >>> deep_gemm.fp8_moe(x, chosen, torch.ones(3, 2), gate_up, down).shape
    torch.Size([3, 256])
    """
    values, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    if y is None:
        checks.check_tensor("x", values, (2,))
        y = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    limit = math.inf if clamp is None else clamp
    weights = *checks.pair("gate_up", gate_up), *checks.pair("down", down)
    moe_chain.experts(values, topk_idx, topk_weights, *weights, y, scales, None, limit, False)
    return y
