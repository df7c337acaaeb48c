"""Mixtures with MXFP4 weights for tests without a GPU and with one: arguments of `fp8_fp4_moe` and `bf16_fp4_moe`."""

import math
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import quantize

Pair = tuple[Tensor, Tensor]
ERRORS = {"fp8": 0.06, "bf16": 0.005}
"""The largest relative error by norm. Weights have none; tokens and the activation's result are cast or rounded."""
SIZES = [(1, 8, 2, 256, 128), (7, 3, 3, 160, 32), (64, 16, 4, 288, 96), (65, 16, 4, 288, 96), (130, 5, 1, 128, 160)]
"""Tokens, experts, top_k, width, inner: masked and psum."""


def problem(
    kind: str,
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    inner: int,
    seed: int = 0,
    packed: bool = False,
    device: str = "cpu",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a call with biases, and the weights that are meant, in float64. Some choices are no experts, and of
    some tokens all. ``packed``: weights are those of a checkpoint. On a GPU weights are drawn codes, without a cast,
    and none are meant."""
    torch.manual_seed(seed)
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    chosen[torch.rand(tokens, top_k) < 0.2] = -1
    chosen[5:6], chosen[6:7, 0] = -1, experts
    weights, meant = {}, {}
    for name, n, k in (("gate_up", 2 * inner, width), ("down", width, inner)):
        if device == "cpu":
            pair = quantize.mxfp4(torch.randn(experts, n, k) / k**0.5)
            meant[name] = deep_gemm.dequantise(*pair, dtype=torch.float64)
        else:
            packed_codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
            pair = packed_codes, torch.randint(118, 122, (experts, n, k // 32), dtype=torch.uint8, device=device)
        weights[name] = pair if packed else deep_gemm.transform_fp4_weights(*pair, kind)
    biases = torch.randn(experts, 2 * inner).bfloat16(), torch.randn(experts, width).bfloat16()
    given = {
        "x": torch.randn(tokens, width).bfloat16(),
        "topk_idx": chosen,
        "topk_weights": torch.rand(tokens, top_k),
        **weights,
        "bias": biases,
    }
    return given, meant


def exact(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "swiglu",
    clamp: float | None = None,
    bias: Pair | None = None,
) -> Tensor:
    """In float64, expert by expert."""
    limit = clamp if clamp is not None else 7.0 if activation == "swigluoai" else math.inf
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (topk_idx == expert).nonzero(as_tuple=True)
        both = x[token].double() @ gate_up[expert].t()
        both = both if bias is None else both + bias[0][expert].double()
        gate, up = (both[:, ::2], both[:, 1::2]) if activation == "swigluoai" else both.chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = (
            gate * torch.sigmoid(1.702 * gate) * (up + 1)
            if activation == "swigluoai"
            else (torch.nn.functional.silu(gate) * up)
        )
        row = hidden @ down[expert].t()
        row = row if bias is None else row + bias[1][expert].double()
        y.index_add_(0, token, row * topk_weights[token, choice, None].double())
    return y
