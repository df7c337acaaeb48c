"""Operands that have a shape but no memory of their own: freed, truncated, wrapped, fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.testing import integer_operands

E4M3 = torch.float8_e4m3fn
M, N, K = 20, 200, 272


def tensors(m: int = M, n: int = N, k: int = K) -> dict[str, torch.Tensor]:
    """The tensors of a right call."""
    (a, sfa), (b, sfb) = integer_operands(m, n, k, "cpu")
    return {"a": a, "sfa": sfa, "b": b, "sfb": sfb, "d": torch.zeros(m, n, dtype=torch.bfloat16)}


class Wrapper(torch.Tensor):
    """A tensor that only wraps another, as a DTensor does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)  # type: ignore[attr-defined]
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a wrapper")


LABELS = {"a": "a", "sfa": "the scales of a", "b": "b", "sfb": "the scales of b", "d": "d"}


def call(x: dict[str, torch.Tensor], **options: Any) -> None:
    deep_gemm.fp8_gemm_nt((x["a"], x["sfa"]), (x["b"], x["sfb"]), x["d"], **options)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def halved(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def short_view(x: torch.Tensor) -> torch.Tensor:
    """A view of the end of a storage that was truncated after its first byte."""
    whole = torch.cat([x.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)])
    part = whole[x.numel() * x.element_size() :].view(x.dtype).view(x.shape)
    whole.untyped_storage().resize_(whole.numel() - 1)
    return part


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("without", [freed, halved, short_view, Wrapper])
def test_a_tensor_without_memory_is_named_and_the_next_call_works(
    name: str, without: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """On a GPU the kernel would use address 0, and every later CUDA call of the process would fail."""
    x = tensors()
    x[name] = without(x[name])
    with pytest.raises(InvalidInputError, match=rf"^{LABELS[name]} has no memory: it needs \d+ bytes"):
        call(x)
    call(tensors())


@pytest.mark.parametrize("name", LABELS)
def test_a_transform_is_refused_in_words(name: str) -> None:
    """vmap's tensors have a shape without the batch dimension, and no address."""
    x = tensors()
    stacked = torch.stack([x[name].view(torch.uint8)] * 2).view(x[name].dtype)

    def one(part: torch.Tensor) -> torch.Tensor:
        call(x | {name: part})
        return part

    with pytest.raises(InvalidInputError, match=rf"^{LABELS[name]} is a Tensor without memory.*vmap"):
        torch.func.vmap(one)(stacked)
    call(x)


def test_the_gradient_transform_is_refused_in_words() -> None:
    x = tensors()

    def loss(scales: torch.Tensor) -> torch.Tensor:
        call(x | {"sfa": scales})
        return scales.sum()

    with pytest.raises(InvalidInputError, match=r"^the scales of a is a Tensor without memory"):
        torch.func.grad(loss)(x["sfa"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_are_checked_and_not_touched(device: str) -> None:
    """torch.compile traces with fake tensors: all operands, or only the weights of a module."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = tensors()
        fake = {name: torch.empty_like(tensor, device=device) for name, tensor in fake.items()}
        call(fake)
        with pytest.raises(InvalidInputError, match="agree in K"):
            call(fake | {"a": torch.empty(M, 256, dtype=E4M3, device=device)})
    call(fake)
    if device == "cpu":
        for name in LABELS:
            call(tensors() | {name: fake[name]})


@pytest.mark.parametrize(("m", "k"), [(0, K), (M, 0)])
def test_tensors_without_elements_need_no_memory(m: int, k: int) -> None:
    x = tensors(m, N, k)
    for name in ("a", "sfa"):
        x[name].untyped_storage().resize_(0)
    call(x)


def test_no_k_writes_zeros_and_not_into_what_has_no_memory() -> None:
    x = tensors(k=0)
    freed(x["d"])
    with pytest.raises(InvalidInputError, match=r"^d has no memory"):
        call(x)
