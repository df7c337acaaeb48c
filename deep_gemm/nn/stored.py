"""FP8 weights as DeepSeek stores them: ``weight`` (out, in) E4M3 and ``weight_scale_inv`` (ceil(out / 128), ceil(in /
128)) float32, by which values are multiplied. Those of experts have the expert in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm import quantize
from deep_gemm.aot import scales as scale_names
from deep_gemm.aot.headers import WIDE, Stored
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
    return quantize.blocks(row_major(weight, "weight"))


def plain(values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] = BLOCK) -> Tensor:
    """What values and scales stand for, in ``dtype``."""
    if values.device.type == "meta":
        return torch.empty(values.shape, dtype=dtype, device="meta")
    if values.dim() == 2:
        return dequantise(values, scales, block).to(dtype)
    return torch.stack([dequantise(*each, block).to(dtype) for each in zip(values, scales, strict=True)])


def why_not(prefix: str, found: Mapping[str, Stored]) -> str:
    """Why a layer cannot load its weight, and the scales of it, of ``found``, as a sentence; "" if it can, or has
    neither. ``prefix`` is its name and a dot."""
    name, scale_name = f"{prefix}weight", scale_names.name_of(found, prefix)
    weight, scale = found.get(name), None if scale_name is None else found[scale_name]
    several = [own for own in scale_names.NAMES if f"{prefix}{own}" in found]
    if len(several) > 1:
        return (
            f"{name} has several scales, {' and '.join(several)}, and by which its values are multiplied is not known. "
            "Leave one."
        )
    if weight is None:
        return f"{scale_name} are scales, and their values, {name}, are not there. Load both together." if scale else ""
    if weight.dtype != "F8_E4M3" and (scale or weight.dtype not in WIDE):
        beside = f", and has scales, {scale_name}" if scale else ""
        return f"{name} is {weight.dtype}{beside}. Layers load E4M3 with scales, or {', '.join(sorted(WIDE))}."
    if weight.dtype in WIDE:
        return ""
    if scale is None:
        names = ", ".join(scale_names.NAMES)
        return (
            f"{name} is E4M3, and the scales by which its values are multiplied are not beside it. Load both together, "
            f"as one of {names}."
        )
    if len(weight.shape) < 2:
        return f"{name} must have at least 2 dimensions, but its shape is {weight.shape}."
    if scale.dtype not in (known := scale_names.DTYPES | WIDE):
        return f"{scale_name} must be {', '.join(sorted(known))}, but it is {scale.dtype}."
    if _granularity(weight.shape, scale.shape) is None:
        return (
            f"{scale_name} must have a scale for each 128 x 128 block, for each row or for all of {name} "
            f"{weight.shape}, but its shape is {scale.shape}."
        )
    return ""


def _granularity(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> tuple[int, int] | None:
    """The block of a weight that shares a scale, or None."""
    *groups, n, k = shape
    if of_scales[: len(groups)] != tuple(groups):
        return None
    return scale_names.granularity(n, k, of_scales[len(groups) :])


def adapt(state: dict[str, Any], prefix: str, mode: str, dtype: torch.dtype) -> None:
    """Make the weight in a state dict that of a module's mode: of E4M3 with scales, or of 16 or 32 bits, ``dtype``. Its
    scales may have each name and shape that is known. Raises InvalidInputError for one without the other."""
    names = (f"{prefix}{own}" for own in ("weight", *scale_names.NAMES))
    found = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
    if wrong := why_not(prefix, {name: _described(tensor) for name, tensor in found.items()}):
        raise InvalidInputError(wrong)
    name, scale_name = f"{prefix}weight", scale_names.name_of(found, prefix)
    weight = found.get(name)
    if weight is None:
        return
    if scale_name is not None:
        block = _granularity(tuple(weight.shape), tuple(found[scale_name].shape)) or BLOCK
        *groups, n, k = weight.shape
        scale = state.pop(scale_name).float()
        if block != BLOCK or scale.dim() != weight.dim():
            scale = scale.reshape(*groups, -(-n // block[0]), -(-k // block[1]))
        if mode == "training":
            state[name] = plain(weight, scale, dtype, block)
            return
        weight, scale = (weight, scale) if block == BLOCK else _in_blocks(weight, scale, block)
    elif mode == "training":
        state[name] = weight if weight.dtype != torch.float64 else weight.to(dtype)
        return
    else:
        weight, scale = cast(weight.float() if weight.dtype == torch.float64 else weight)
    state[name], state[f"{prefix}weight_scale_inv"] = weight, scale


def _in_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Quantized:
    """Values with scales of 128 x 128. Those whose blocks hold whole blocks of 128, as one for the tensor does, keep
    their bits; others are cast again."""
    *_, n, k = values.shape
    if all(size % side == 0 or size >= whole for size, side, whole in zip(block, BLOCK, (n, k), strict=True)):
        rows, columns = (torch.arange(0, whole, 128) // size for whole, size in zip((n, k), block, strict=True))
        return values, scales[..., rows[:, None].to(scales.device), columns.to(scales.device)]
    return cast(plain(values, scales, torch.float32, block))


def _described(tensor: Tensor) -> Stored:
    return Stored(NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    E4M3: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""The names of dtypes in safetensors."""
