"""How far two tensors are apart, and how many bytes tensors hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.tensors import check_tensor


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """``1 - 2 x.y / (x.x + y.y)`` over all elements, as a float64 scalar tensor: 0 for equal tensors, 2 for opposite.

    For small relative errors e it is about half of the mean of e squared, so 1e-3 allows some 4.5%. Tensors of zeros,
    or without elements, are equal. NaN anywhere gives NaN, so that `diff < bound` is false.

    >>> deep_gemm.testing.calc_diff(torch.ones(4), torch.ones(4)).item()
    0.0
    """
    check_tensor("x", x, by_torch=True)
    check_tensor("y", y, by_torch=True)
    if x.shape != y.shape:
        raise InvalidInputError(
            f"x and y must have the same shape, but they have {tuple(x.shape)} and {tuple(y.shape)}."
        )
    x, y = x.double(), y.double()
    norms = (x * x + y * y).sum()
    return torch.where(norms == 0, torch.zeros_like(norms), 1 - 2 * (x * y).sum() / norms)


def assert_bitwise_equal(x: Tensor, y: Tensor, label: str = "") -> None:
    """Raise AssertionError unless x and y have the same shape, dtype and bits.

    >>> deep_gemm.testing.assert_bitwise_equal(torch.zeros(4), torch.zeros(4))
    """
    check_tensor("x", x)
    check_tensor("y", y)
    what = f" of {label}" if label else ""
    if x.shape != y.shape or x.dtype != y.dtype:
        kinds = " and ".join(f"{t.dtype} {tuple(t.shape)}" for t in (x, y))
        raise AssertionError(f"The shapes or dtypes{what} differ: {kinds}.")
    first, second = (t.contiguous().flatten().view(torch.uint8).view(-1, t.element_size()) for t in (x, y))
    different = (first != second.to(first.device)).any(1).nonzero().flatten()
    if len(different):
        index = int(different[0])
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), x.shape))
        raise AssertionError(
            f"{len(different)} of {x.numel()} elements{what} have other bits, the first at {place}: "
            f"{x[place].item()!r} and {y[place].item()!r}."
        )


def count_bytes(*tensors: Any) -> int:
    """Bytes held by the elements of tensors, tuples and lists of tensors (nested too); None counts as nothing.

    >>> deep_gemm.testing.count_bytes(torch.zeros(4), [torch.zeros(2).half(), None])
    20
    """
    total = 0
    for item in tensors:
        if isinstance(item, (tuple, list)):
            total += count_bytes(*item)
        elif item is not None:
            check_tensor("what count_bytes is given, where it is no tuple, list or None,", item, by_torch=True)
            total += item.numel() * item.element_size()
    return total
