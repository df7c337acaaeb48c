"""What to do about a wrong tensor: sentences that end messages, each after a space; "" where there is none.

``name`` is that of the argument in messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BIAS = " A bias is an epilogue: bf16_gemm_nt and its like take epilogue=deep_gemm.Epilogue(bias=bias)."


def of_type(name: str, value: Any, dims: tuple[int, ...] | None = None) -> str:
    """For what is no tensor. ``dims`` is what `check_tensor` takes."""
    if name == "d":
        return " It is written in place: pass torch.empty of the result's shape, dtype and device."
    if type(value).__module__ == "numpy":
        return f" Pass torch.from_numpy({_code(name)}), on the device of the others."
    if isinstance(value, torch.nn.Module):
        return f" Pass {_code(name)}.weight."
    if isinstance(value, (tuple, list)):
        pair = any(isinstance(each, Tensor) for each in value)
        return " Only FP8 functions take pairs of values and scales." if pair else f" Pass torch.tensor({_code(name)})."
    if name.startswith("the scales"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 in (dims or ())
        one = f" One scale for all is torch.tensor({value}, dtype=torch.float32) on its device, for a and for b."
        return one if is_number else " The casts of deep_gemm.quantize return values and scales."
    return ""


def of_rank(name: str, tensor: Tensor, wanted: int) -> str:
    """For a tensor with more or fewer than ``wanted`` dimensions."""
    code, more = _code(name), tensor.dim() - wanted
    if more < 0:
        is_bias = name == "c" and tensor.dim() == 1
        return BIAS if is_bias else f" Pass {code}[None], which adds a dimension in front."
    if name == "b" and wanted == 2:
        return " Pass one matrix; m_grouped_* functions take one for each group."
    if name in ("c", "d") and wanted == 2:
        return f" Pass {name}.view(-1, {tensor.shape[-1]})."  # flatten() may copy
    return f" Pass {code}.flatten(0, {-2 if wanted == 2 else more})."


def of_flat(name: str, tensor: Tensor, letters: str, sizes: Mapping[str, int]) -> str:
    """For a tensor in which two neighbours of the dimensions ``letters`` are one. ``sizes`` are known ones."""
    for at, (first, second) in enumerate(itertools.pairwise(letters)):
        rest = zip(letters[:at] + letters[at + 2 :], (*tensor.shape[:at], *tensor.shape[at + 1 :]), strict=True)
        if any(sizes.get(letter, size) != size for letter, size in rest):
            continue
        outer, inner, both = sizes.get(first, 0), sizes.get(second, 0), tensor.shape[at]
        if outer > 1 and both % outer == 0 and inner in (0, both // outer):
            return f" Pass {_code(name)}.unflatten({at}, ({outer}, -1))."
        if not outer and inner and both > inner and both % inner == 0:
            return f" Pass {_code(name)}.unflatten({at}, (-1, {inner}))."
    return ""


def of_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> str:
    """For a c or d of another shape."""
    if name == "c" and tensor.numel() == wanted[-1]:
        return BIAS
    if tuple(tensor.shape) == wanted[::-1]:
        return f" It is N x M: swap a and b, or pass an M x N {name}."
    return f" Pass torch.empty({wanted}) of the same dtype and device." if name == "d" else ""


def of_kind(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """For a tensor that must have this dtype and shape."""
    code = _code(name)
    if tuple(tensor.shape) != shape:
        if tensor.numel() == math.prod(shape) and tensor.dim() != len(shape):
            return f" Pass {code}.reshape({shape})."
        is_turned = tensor.dim() == 2 and tuple(tensor.shape) == shape[::-1]
        return f" It is transposed: pass {code}.t().contiguous()." if is_turned else ""
    if dtype == torch.float8_e4m3fn:
        return " per_token_cast_to_fp8 casts to it, and returns scales."
    return f" Pass {code}.to({dtype})."


def _code(name: str) -> str:
    return name if name.partition("[")[0].isidentifier() else "it"
