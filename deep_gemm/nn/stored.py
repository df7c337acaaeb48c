"""FP8 weights as DeepSeek stores them: ``weight`` (out, in) E4M3 and ``weight_scale_inv`` (ceil(out / 128), ceil(in /
128)) float32, by which values are multiplied. Those of experts have the expert in front."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm import quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn.casts import row_major
from deep_gemm.nn.gathered import Gathered
from deep_gemm.ops.cast_reference import dequantise
from deep_gemm.ops.quantize import scales_shape
from deep_gemm.quantize import Quantized

E4M3 = torch.float8_e4m3fn
BLOCK = (128, 128)


def empty(shape: tuple[int, ...], device: Any) -> Quantized:
    """Weights of zeros."""
    values = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
    *groups, n, k = shape
    return values, torch.ones((*groups, *scales_shape(n, k, "tile")), dtype=torch.float32, device=device)


def cast(weight: Tensor) -> Quantized:
    """A weight of 16 or 32 bits in FP8."""
    weight = weight.detach()
    if isinstance(weight, Gathered):
        return weight.pair
    if weight.device.type == "meta":
        return empty(tuple(weight.shape), "meta")
    weight = row_major(weight)
    if weight.dim() == 2:
        return quantize.blocks(weight)
    values, scales = zip(*map(quantize.blocks, weight), strict=True)
    return torch.stack(values), torch.stack(scales)


def plain(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What values and scales stand for, in ``dtype``."""
    if values.device.type == "meta":
        return torch.empty(values.shape, dtype=dtype, device="meta")
    if values.dim() == 2:
        return dequantise(values, scales, BLOCK).to(dtype)
    return torch.stack([dequantise(*each, BLOCK).to(dtype) for each in zip(values, scales, strict=True)])


def adapt(state: dict[str, Any], prefix: str, mode: str, dtype: torch.dtype) -> None:
    """Make the weight in a state dict that of a module's mode: of E4M3 with scales, or of 16 or 32 bits, ``dtype``."""
    name, scale_name = f"{prefix}weight", f"{prefix}weight_scale_inv"
    weight, scale = state[name], state.get(scale_name)
    if isinstance(scale, Tensor):
        state[scale_name] = scale = scale.float()
    if mode == "inference" and weight.dtype != E4M3:
        state[name], state[scale_name] = cast(weight)
    elif mode == "training" and weight.dtype == E4M3 and isinstance(scale, Tensor):
        state[name] = plain(weight, state.pop(scale_name), dtype)
    elif mode == "training" and weight.dtype == E4M3:
        raise InvalidInputError(
            f"{name} is E4M3, and the state dict has no {scale_name}, by which its values are multiplied. Load both "
            "together."
        )
