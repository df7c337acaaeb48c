"""How far two tensors are apart, and how many bytes tensors hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """``1 - 2 x.y / (x.x + y.y)`` over all elements, as a float64 scalar tensor: 0 for equal tensors, 2 for opposite.

    For small relative errors e it is about half of the mean of e squared, so 1e-3 allows some 4.5%. Tensors of zeros,
    or without elements, are equal. NaN anywhere gives NaN, so that `diff < bound` is false.
    """
    if x.shape != y.shape:
        raise InvalidInputError(
            f"x and y must have the same shape, but they have {tuple(x.shape)} and {tuple(y.shape)}."
        )
    x, y = x.double(), y.double()
    norms = (x * x + y * y).sum()
    return torch.where(norms == 0, torch.zeros_like(norms), 1 - 2 * (x * y).sum() / norms)


def count_bytes(*tensors: Any) -> int:
    """Bytes held by the elements of tensors, tuples and lists of tensors (nested too); None counts as nothing."""
    total = 0
    for item in tensors:
        if isinstance(item, (tuple, list)):
            total += count_bytes(*item)
        elif isinstance(item, Tensor):
            total += item.numel() * item.element_size()
        elif item is not None:
            raise InvalidInputError(
                f"count_bytes takes tensors, tuples, lists and None, but got {type(item).__name__}."
            )
    return total
