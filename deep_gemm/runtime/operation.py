"""The interface of an operation: its arguments, their checks, and the launches that compute it."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.kernels.base import Numbers, Strides
from deep_gemm.records import record
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec, Spec, align
from deep_gemm.tensors import shown


class Operands(Protocol):
    """The result of an operation's check: the tensors of one call."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by operand, in the operation's order."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""


@record(frozen=True)
class Step:
    """One launch of a call. ``operands`` maps the kernel's names of operands to operands of the call, or to names in
    `LaunchSequence.scratch` and `LaunchSequence.inside`. ``numbers`` are what the kernel takes besides sizes and
    strides, such as alpha."""

    spec: Spec
    strides: Strides
    operands: Mapping[str, str]
    numbers: Numbers = field(default_factory=dict)


SCRATCH, SCRATCH_ALIGNMENT = "scratch", 256
"""The name of the one allocation that has all scratch memory of a call, and the alignment of its parts in bytes."""


@record(frozen=True)
class LaunchSequence:
    """The launches of a call in order, and the shapes and dtypes of their scratch memory by name.

    ``inside`` has operands of steps that are a part of an operand, or of scratch memory: the name of the whole, and the
    offset of the part in bytes. ``zeroed``: scratch memory is zeroed before the first launch.
    """

    steps: tuple[Step, ...]
    scratch: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    inside: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    zeroed: bool = False

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """For each operand of a step that is not an operand of the call: the operand of the call that it is a part of,
        or `SCRATCH`, and its offset in bytes."""
        found, end = dict[str, tuple[str, int]](), 0
        for name, (shape, dtype) in self.scratch.items():
            found[name] = SCRATCH, end
            end += align(math.prod(shape) * dtype.itemsize, SCRATCH_ALIGNMENT)
        for name, (whole, offset) in self.inside.items():
            base, start = found.get(whole, (whole, 0))
            found[name] = base, start + offset
        return found

    @property
    def main(self) -> int:
        """The index of the step that stands for the call in reports: the last product, or the last step if there is no
        product."""
        products = [index for index, step in enumerate(self.steps) if isinstance(step.spec, GemmSpec)]
        return products[-1] if products else len(self.steps) - 1

    @property
    def scratch_bytes(self) -> int:
        """The size of the scratch memory."""
        return sum(align(math.prod(shape) * x.itemsize, SCRATCH_ALIGNMENT) for shape, x in self.scratch.values())


@record(frozen=True)
class Fault:
    """A rule that values in an operand's memory must follow, and that kernels do not check. ``where`` is true for each
    value that breaks it. ``say`` makes the message for one of them, from its indices."""

    where: Tensor
    say: Callable[..., str]


def refuse_faults(name: str, device: torch.device, find: Callable[[], Sequence[Fault]]) -> None:
    """Refuse operands of ``name`` on ``device`` with faults. Waits for the device once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"DG_CHECK=1 reads values of {name} on the host, and a CUDA graph is being captured, during which nothing "
            "can wait for the GPU. Unset DG_CHECK for the capture, and check a call before it."
        )
    faults = find()
    for fault, found in zip(faults, torch.stack([fault.where.any() for fault in faults]).tolist(), strict=True):
        if found:
            raise InvalidInputError(fault.say(*fault.where.nonzero()[0].tolist()))


REQUIRED: Any = inspect.Parameter.empty
"""The default of an argument that has none."""


@record(frozen=True)
class Parameter:
    """An argument of a public function. ``type`` is its annotation; ``keyword``: it is given by keyword only.

    ``use`` says where its value goes:

    - "launch": the operation gets it, and the launch may depend on it.
    - "must_be_none": the operation refuses every value but None.
    - "public_only": the public function uses it, or it has no effect. The operation does not get it.
    - "internal": not a parameter of the public function, which gives it to the operation itself.
    - "redirects": if it is not None, `KernelOperation.redirect` makes the call.

    ``choices``: a text, and no other than these.
    """

    name: str
    type: str
    default: Any = REQUIRED
    use: Literal["launch", "must_be_none", "public_only", "internal", "redirects"] = "launch"
    keyword: bool = False
    choices: tuple[str, ...] = ()


class KernelOperation(ABC):
    """One operation: its arguments, and how it computes them."""

    name: str
    parameters: tuple[Parameter, ...]
    """Arguments of the public function, in order, and those that it adds."""
    operands: Mapping[str, str]
    """The argument that each tensor comes from, by the name that kernels and messages use: an argument's name, or
    ``"a[0]"`` for a part of a pair."""
    output: str
    """The operand that is written, or the first of several."""
    outputs: tuple[str, ...] = ()
    """The operands that are written, if there are several."""
    kept: tuple[str, ...] = ()
    """Outputs whose old values matter: they are read, or some elements are not written."""
    apart: bool = True
    """Whether the output must share no memory with the other operands."""
    in_place: str = ""
    """The operand that may be the output itself, with the same address, shape and strides."""
    absent: tuple[str, ...] = ()
    """Optional tensors that are None in this operation. A call that gives one goes to another variant: see
    `calls.make_entry`."""
    weights: tuple[str, ...] = ()
    """Operands that callers may promise to be constant (`declare_constant`)."""
    floats: tuple[str, ...] = ()
    """Arguments that are floats, for which 0.0 and -0.0 differ."""
    unsigned: tuple[str, ...] = ()
    """Operands of FP8 values and of integers. A warm call does not ask whether they are negated views, which only a
    private function of torch makes of these dtypes."""
    settings: tuple[str, ...] = ()
    """Settings that `check` and `launches` read. They are in the key of a warm call, so that a change takes effect."""
    titles: Mapping[str, str] = MappingProxyType({})
    """What the public function calls a parameter, where it has another name."""
    has_operator: bool = True
    """Whether torch gets an operator for it, which `torch.compile` and `torch.export` record."""
    fallbacks: Mapping[str, Callable[[Any], None]] = MappingProxyType({})
    """Fallbacks, by their names in DG_FALLBACK; "torch" is `reference`."""

    def axes(self, form: str | None) -> Mapping[str, str]:
        """The dimensions of each tensor argument as letters, as in einsum. A dimension with a small letter may be
        sharded over ranks, in all operands that have it: see `sharding`. Empty if none may be."""
        return {}

    @functools.cached_property
    def arguments(self) -> tuple[Parameter, ...]:
        """The parameters of `check`."""
        return tuple(parameter for parameter in self.parameters if parameter.use not in ("public_only", "redirects"))

    @functools.cached_property
    def entry_arguments(self) -> tuple[Parameter, ...]:
        """The parameters of its entry: see `calls.make_entry`."""
        return tuple(parameter for parameter in self.parameters if parameter.use != "public_only")

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return {parameter.name: parameter.default for parameter in self.arguments}

    def given(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `check` by name, with defaults for those that are left out. Refuses a text that is not one
        of the parameter's choices, since torch operators take any text."""
        found = self._defaults | dict(zip(self._defaults, arguments, strict=False)) | dict(named)
        for name, choices in self._choices.items():
            if not isinstance(found[name], str) or found[name] not in choices:
                known = " or ".join(map(repr, choices))
                raise InvalidInputError(f"{name} must be {known}, but it is {shown(found[name])}.")
        return found

    @functools.cached_property
    def _choices(self) -> dict[str, tuple[str, ...]]:
        return {parameter.name: parameter.choices for parameter in self.arguments if parameter.choices}

    @abstractmethod
    def check(self, *arguments: Any, **named: Any) -> Any:
        """The checked operands; None if there is nothing to do. Raises InvalidInputError and UnsupportedError."""

    def redirect(self, arguments: Mapping[str, Any], plain: Callable[..., None]) -> None:
        """Make a call in which a parameter whose use is "redirects" is given. ``arguments`` are all of the entry's, by
        name, and ``plain`` is the entry itself."""
        raise NotImplementedError(f"{self.name} has no parameter that redirects a call")

    def faults(self, x: Any) -> Sequence[Fault]:
        """The rules of values in the operands' memory, for operations whose `settings` include "check"."""
        return ()

    def check_values(self, x: Any) -> None:
        """Refuse operands whose values break a rule of `faults`. Waits for the device once."""
        if "check" in self.settings:
            refuse_faults(self.name, x.device, lambda: self.faults(x))

    @abstractmethod
    def launches(self, x: Any, device: int) -> LaunchSequence:
        """The launches that compute it on CUDA device ``device``."""

    def plan(self, step: Step, device: int) -> engine.Plan:
        """The plan of a step of `launches` on CUDA device ``device``."""
        return engine.plan(step.spec, device)

    def parts(self, x: Any) -> Sequence[tuple[KernelOperation, Any]]:
        """If the operation is a chain of several: each of them, with its checked operands."""
        return ()

    @abstractmethod
    def reference(self, x: Any) -> None:
        """Compute the operation in plain torch, on any device."""

    def special(self, x: Any) -> str:
        """The property of the checked operands that other libraries' kernels do not support; "" if there is none."""
        return ""

    def shape(self, x: Any) -> str:
        """The sizes of a call, for reports: MxNxK of a product, otherwise the shape of each tensor."""
        if all(hasattr(x, size) for size in "mnk"):
            return f"{x.m}x{x.n}x{x.k}"
        return ", ".join(f"{name} {'x'.join(map(str, tensor.shape)) or '1'}" for name, tensor in x.tensors.items())

    def flops(self, x: Any) -> int:
        """Floating-point operations of a call, for reports; a multiply-add counts as two. 0 if unknown."""
        if all(hasattr(x, size) for size in "mnk"):
            return 2 * int(x.m) * int(x.n) * int(x.k)
        return int(getattr(x, "flops", 0))
