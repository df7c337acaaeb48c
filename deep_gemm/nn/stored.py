"""FP8 weights as DeepSeek stores them: ``weight`` (out, in) E4M3 and ``weight_scale_inv`` (ceil(out / 128), ceil(in /
128)) float32, by which values are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deep_gemm import quantize
from deep_gemm.ops.cast_reference import dequantise
from deep_gemm.ops.quantize import scales_shape
from deep_gemm.quantize import Quantized

E4M3 = torch.float8_e4m3fn
BLOCK = (128, 128)


def empty(in_features: int, out_features: int, device: Any) -> Quantized:
    """Weights of zeros."""
    shape = scales_shape(out_features, in_features, "tile")
    values = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device).view(E4M3)
    return values, torch.ones(shape, dtype=torch.float32, device=device)


def cast(weight: Tensor) -> Quantized:
    """A weight of 16 or 32 bits in FP8."""
    if weight.device.type == "meta":
        return empty(weight.shape[1], weight.shape[0], "meta")
    return quantize.blocks(weight.detach())


def plain(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight of a layer in ``dtype``."""
    values, scales = pair(layer)
    if values.device.type == "meta":
        return torch.empty(values.shape, dtype=dtype, device="meta")
    return dequantise(values, scales, BLOCK).to(dtype)


def pair(layer: Any) -> Quantized:
    """The stored weight of a layer, and its scales."""
    return layer.weight.detach(), layer.weight_scale_inv.detach()


def set_weight(layer: nn.Module, weight: Quantized) -> None:
    """Make a stored weight the parameters of a layer."""
    for name, tensor in zip(("weight", "weight_scale_inv"), weight, strict=True):
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))


def kept(layer: Any, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, which moves tensors, and casts those of floating point; but a stored weight and its scales keep their
    bits, as casts leave integers alone."""

    def moved(x: Tensor) -> Tensor:
        bits = torch.uint8 if x is layer.weight else torch.int32 if x is layer.weight_scale_inv else None
        return fn(x) if bits is None else fn(x.detach().view(bits)).view(x.dtype)

    return moved


def adapt(layer: Any, state: dict[str, Any], prefix: str) -> None:
    """Make the tensors of ``layer`` in a state dict those of its mode: stored weights, or weights of 16 or 32 bits."""
    name, scale_name = f"{prefix}weight", f"{prefix}weight_scale_inv"
    weight, scale = state.get(name), state.get(scale_name)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != (layer.out_features, layer.in_features):
        return  # torch says what is missing, or of another shape
    if isinstance(scale, Tensor):
        state[scale_name] = scale = scale.float()
    if layer.mode == "inference" and weight.dtype != E4M3:
        state[name], state[scale_name] = cast(weight)
    elif layer.mode == "training" and weight.dtype == E4M3 and isinstance(scale, Tensor):
        state[name] = dequantise(weight, state.pop(scale_name), BLOCK)
