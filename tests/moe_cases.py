"""Mixtures of experts for tests without a GPU and with one: arguments of `fp8_moe`, and exact results."""

import math
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import quantize

Pair = tuple[Tensor, Tensor]
ERROR = 0.065
"""The largest relative error by norm: tokens, SwiGLU's result and weights are cast, each with an error of 0.026."""
SIZES = [(1, 8, 2, 256, 128), (7, 3, 3, 144, 48), (64, 16, 4, 272, 256), (65, 16, 4, 256, 128), (130, 5, 1, 128, 176)]
"""Tokens, experts, top_k, width, inner: masked and psum, SwiGLU in the product and apart."""


def stored(experts: int, n: int, k: int) -> Pair:
    each = [quantize.blocks(torch.randn(n, k) / k**0.5) for _ in range(experts)]
    return torch.stack([values for values, _ in each]), torch.stack([scales for _, scales in each])


def problem(tokens: int, experts: int, top_k: int, width: int, inner: int, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call. Some choices are no experts, and of some tokens all."""
    torch.manual_seed(seed)
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    chosen[torch.rand(tokens, top_k) < 0.2] = -1
    chosen[5:6], chosen[6:7, 0] = -1, experts
    weights = {"gate_up": stored(experts, 2 * inner, width), "down": stored(experts, width, inner)}
    return {
        "x": torch.randn(tokens, width).bfloat16(),
        "topk_idx": chosen,
        "topk_weights": torch.rand(tokens, top_k),
        **weights,
    }


def exact(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Pair, down: Pair, clamp: float | None = None
) -> Tensor:
    """In float64, token by token."""

    def meant(pair: Pair, expert: int) -> Tensor:
        return deep_gemm.dequantise(pair[0][expert], pair[1][expert], (128, 128), torch.float64)

    y, limit = torch.zeros(x.shape, dtype=torch.float64, device=x.device), math.inf if clamp is None else clamp
    for expert in range(len(gate_up[0])):
        token, choice = (topk_idx == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ meant(gate_up, expert).t()).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        y.index_add_(0, token, hidden @ meant(down, expert).t() * topk_weights[token, choice, None].double())
    return y


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
