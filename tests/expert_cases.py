"""Layers of experts with MXFP4 weights as models have them: random codes with the names and shapes of checkpoints, and
what they compute in float64. For tests without a GPU and with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from nn_cases import relative
from torch import Tensor

import deep_gemm
from deep_gemm.nn import MoE, Router

__all__ = ["DEEPSEEK_V4", "GPT_OSS", "Layer", "exact", "experts_of", "relative"]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer of experts of ``model``. ``bound``: the largest relative error by norm, that of its activations."""

    model: str
    width: int
    hidden: int
    experts: int
    top_k: int
    activations: Any
    bound: float

    def __str__(self) -> str:
        return self.model

    @property
    def is_gpt_oss(self) -> bool:
        return self.model == "gpt-oss-20b"

    def resized(self, width: int, hidden: int, experts: int, top_k: int) -> Layer:
        return replace(self, width=width, hidden=hidden, experts=experts, top_k=top_k)

    def module(self, device: str) -> MoE:
        """The layer, without its weights."""
        sizes: Any = self.width, self.experts, self.top_k
        if self.is_gpt_oss:
            router = Router(*sizes, bias=True, normalise=True, device=device)
            more: dict[str, Any] = {"activation": "swigluoai", "bias": True}
        else:
            options: Any = {"scores": "sqrtsoftplus", "normalise": True, "scale": 1.5, "correction": True}
            router, more = Router(*sizes, **options, device=device), {"limit": 10.0}
        given = {"weights": "mxfp4", "activations": self.activations, "mode": "inference", "device": device}
        return MoE(self.width, self.hidden, self.experts, self.top_k, router=router, **given, **more)

    def state(self, device: str = "cpu") -> State:
        """Tensors as the checkpoint has them, below the name of the layer. Results are about as large as tokens."""
        gen = torch.Generator(device).manual_seed(7)

        def codes(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen, device=device)

        def exponents(k: int, *shape: int) -> Tensor:
            middle = 124 - int(k**0.5).bit_length()
            return torch.randint(middle - 2, middle + 3, shape, dtype=torch.uint8, generator=gen, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device)

        width, hidden, experts = self.width, self.hidden, self.experts
        sizes = {"gate_up_proj": (2 * hidden, width), "down_proj": (width, hidden)}
        router = normal(experts, width) / width**0.5
        if self.is_gpt_oss:
            state = {"router.weight": router.bfloat16(), "router.bias": normal(experts).bfloat16()}
            for name, (n, k) in sizes.items():
                state[f"experts.{name}_blocks"] = codes(experts, n, k // 32, 16)
                state[f"experts.{name}_scales"] = exponents(k, experts, n, k // 32)
                state[f"experts.{name}_bias"] = normal(experts, n).bfloat16()
            return state
        state = {"gate.weight": router.bfloat16(), "gate.bias": normal(experts) / 8}
        for e in range(experts):
            for name, (n, k) in {"w1": (hidden, width), "w3": (hidden, width), "w2": (width, hidden)}.items():
                state[f"experts.{e}.{name}.weight"] = codes(n, k // 2).view(torch.int8)
                state[f"experts.{e}.{name}.scale"] = exponents(k, n, k // 32).view(torch.float8_e8m0fnu)
        return state


GPT_OSS = Layer("gpt-oss-20b", 2880, 2880, 32, 4, "bf16", 0.012)
DEEPSEEK_V4 = Layer("DeepSeek-V4", 4096, 2048, 256, 6, "fp8", 0.06)


def experts_of(layer: Layer, state: State) -> Iterator[tuple[Tensor, Tensor, Tensor, Any, Any]]:
    """gate, up and down of each expert in float64, and the biases of both products or 0."""

    def meant(values: Tensor, scales: Tensor) -> Tensor:
        return deep_gemm.dequantise(values, scales, dtype=torch.float64)

    for e in range(layer.experts):
        if not layer.is_gpt_oss:
            parts = (f"experts.{e}.{name}." for name in ("w1", "w3", "w2"))
            gate, up, down = (meant(state[f"{part}weight"], state[f"{part}scale"]) for part in parts)
            yield gate, up, down, 0, 0
            continue
        names = "experts.gate_up_proj_", "experts.down_proj_"
        both, down = (meant(state[f"{name}blocks"][e], state[f"{name}scales"][e]) for name in names)
        yield both[::2], both[1::2], down, *(state[f"{name}bias"][e].double() for name in names)


def exact(layer: Layer, state: State, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor:
    """The layer's result in float64, with the weights and numbers of the chosen experts."""
    weights, chosen = choice
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e, (gate, up, down, of_both, of_down) in enumerate(experts_of(layer, state)):
        token, place = (chosen == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        rows = x[token].double()
        g, u = rows @ gate.T, rows @ up.T
        if layer.is_gpt_oss:
            g, u = (g + of_both[::2]).clamp(max=7), (u + of_both[1::2]).clamp(-7, 7)
            h = g * torch.sigmoid(1.702 * g) * (u + 1)
        else:
            g, u = g.clamp(max=10), u.clamp(-10, 10)
            h = g * torch.sigmoid(g) * u
        y.index_add_(0, token, (h @ down.T + of_down) * weights[token, place, None].double())
    return y
