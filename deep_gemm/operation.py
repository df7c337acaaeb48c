"""What an operation is: its arguments, what they mean, and the launches that compute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from . import engine
from .kernels.base import Strides
from .spec import Spec


class Operands(Protocol):
    """What an operation's check returns: the tensors of one call."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By operand, in the operation's order."""

    @property
    def device(self) -> torch.device:
        """Of all of them."""


@dataclass(frozen=True)
class Step:
    """One launch of a call. ``operands`` says which operand of the call, or which scratch memory, is what the kernel
    calls by another name."""

    spec: Spec
    strides: Strides
    operands: Mapping[str, str]


@dataclass(frozen=True)
class Work:
    """The launches of a call in order, and the scratch memory that they share: shape and dtype by name."""

    steps: tuple[Step, ...]
    scratch: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


class Operation(ABC):
    """One operation: what its arguments are, and what they mean."""

    name: str
    parameters: tuple[str, ...]
    """Arguments of the public function, in order."""
    operands: Mapping[str, str]
    """Tensors by the names that kernels and messages use: an argument, or ``"a[0]"`` for a part of a pair."""
    output: str
    """The operand that is written, or the first of those."""
    outputs: tuple[str, ...] = ()
    """The operands that are written, where there are several."""
    apart: bool = True
    """Whether the output must share no memory with the other operands."""
    in_place: str = ""
    """The operand that may be the output itself: the same address, shape and strides."""
    unused: tuple[str, ...] = ()
    """Arguments that must be None, and tensors if they are not."""
    weights: tuple[str, ...] = ()
    """Operands that callers may promise to be constant (`declare_constant`)."""
    floats: tuple[str, ...] = ()
    """Arguments that are numbers with a sign of zero."""
    fallbacks: Mapping[str, Callable[[Any], None]] = MappingProxyType({})
    """Other ways to compute it, by the names that DG_FALLBACK has for them; "torch" is `reference`."""

    @abstractmethod
    def check(self, *arguments: Any) -> Any:
        """The operands, checked; None where there is nothing to do. Raises InvalidInputError, UnsupportedError."""

    @abstractmethod
    def work(self, x: Any, device: int) -> Work:
        """What computes it on CUDA device ``device``."""

    def plan(self, step: Step, device: int) -> engine.Plan:
        """What computes a step of `work` on CUDA device ``device``."""
        return engine.plan(step.spec, device)

    @abstractmethod
    def reference(self, x: Any) -> None:
        """The same in plain torch, on any device."""

    def special(self, x: Any) -> str:
        """What of checked operands other libraries' kernels of this operation do not take; "" if they take them."""
        return ""

    def shape(self, x: Any) -> str:
        """The sizes of a call, for reports: MxNxK of a product, else those of each tensor."""
        if all(hasattr(x, size) for size in "mnk"):
            return f"{x.m}x{x.n}x{x.k}"
        return ", ".join(f"{name} {'x'.join(map(str, tensor.shape)) or '1'}" for name, tensor in x.tensors.items())

    def flops(self, x: Any) -> int:
        """Floating-point operations of a call, for reports; a multiply-add is two. 0 where nobody said."""
        if all(hasattr(x, size) for size in "mnk"):
            return 2 * int(x.m) * int(x.n) * int(x.k)
        return int(getattr(x, "flops", 0))
