"""Operators of torch, for `torch.compile` and `torch.export`: one for each entry, made from its operation's parameters.

An entry that is traced calls its operator, ``torch.ops.deep_gemm_jit.NAME``, which calls the entry. Operators are
registered when they are first traced, or by `deep_gemm.register_operators`. The namespace is our own: other packages
register theirs as ``deep_gemm``, and one process may load both.

An operator writes into a tensor that it is given. Its functional variant, ``NAME_functional``, takes the same arguments
and leaves all of them as they are: it returns tensors like those that the first one writes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_gemm.jit.forking import ForkLock
from deep_gemm.runtime.generated import function
from deep_gemm.runtime.operation import REQUIRED, KernelOperation, Parameter
from deep_gemm.tensors import DTENSOR, is_fake, is_sharded

NAMESPACE = "deep_gemm_jit"

_TYPES = {
    "Any": "str?",  # the name of an epilogue
    "Blocks": "str",
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "float": "float",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
    "str | None": "str?",
    "tuple[int, int] | None": "int[]?",
    "tuple[int, int, int] | None": "int[]?",
    "tuple[int, int, int]": "int[]",
}
_PAIR = "tuple[Tensor, Tensor]"

_entries: dict[str, tuple[Sequence[KernelOperation], Callable[..., None]]] = {}
_lock = ForkLock()


def announce(variants: Sequence[KernelOperation], entry: Callable[..., None]) -> None:
    """Make an operator of ``entry`` known. Nothing is registered yet."""
    _entries[name_of(variants)] = variants, entry


def name_of(variants: Sequence[KernelOperation]) -> str:
    """The operator's name: that of the function without its form, which is an argument."""
    return re.sub("_nt(?=_|$)", "", variants[0].name.replace(" ", "_"))


def register(name: str) -> int:
    """Register the operator ``name``, once."""
    if name not in _libraries:
        with _lock.lock:
            if name not in _libraries:
                variants, entry = _entries[name]
                _define(name, schema(variants), _real(variants, entry), _fake(variants))
    _divide(name, _entries[name][0])
    return 0


def _divide(name: str, variants: Sequence[KernelOperation]) -> None:
    """Register the rules of operator ``name`` for DTensors, once, if the process has DTensors."""
    if name not in _divided and "torch.distributed.tensor" in sys.modules:
        from deep_gemm.runtime import sharding

        with _lock.lock:
            if name not in _divided:
                parts = [part for parameter in _passed(variants[0]) for part in _parts(parameter)]
                sharding.register(name, _libraries[name], variants[0], parts, _written(variants))
                _divided.add(name)


def _define(name: str, arguments: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    # The strides that a caller chose stay: the check may refuse others.
    library.define(f"{name}{arguments}", tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _libraries[name] = library


_libraries: dict[str, torch.library.Library] = {}
"""By operator, which lives as long as its library."""
_divided: set[str] = set()
"""Operators whose rules for DTensors are registered. A process without DTensors needs none."""

register._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""What `torch.compiler.assume_constant_result` sets, without importing Dynamo: a trace calls `register`."""


def register_all() -> tuple[str, ...]:
    """Register the operators of all entries that exist, and their functional variants. Returns their names."""
    for name, (variants, entry) in _entries.items():
        register(name)
        with _lock.lock:
            if (functional := f"{name}_functional") not in _libraries:
                real, fake = _real(variants, entry), _fake(variants)
                made = (_functional(variants, each) for each in (real, fake))
                _define(functional, schema(variants, functional=True), *made)
        _divide(functional, variants)
    return tuple(sorted(_libraries))


def is_recorded(arguments: Sequence[Any]) -> bool:
    """Whether a call must be recorded as a call of its operator: its tensors are DTensors, or they are fake and belong
    to a program that is exported without tracing our code. ``is_compiling`` alone says only that some thread of the
    process compiles."""
    if DTENSOR not in sys.modules and not torch.compiler.is_compiling():
        return False  # as most calls are
    tensors = [x for each in arguments for x in (each if isinstance(each, (tuple, list)) else (each,))]
    return is_sharded(tensors) or (torch.compiler.is_compiling() and is_fake(tensors))


def is_recording() -> bool:
    """Whether `torch.fx.experimental.proxy_tensor.make_fx` makes a graph of what this thread calls."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def record(variants: Sequence[KernelOperation], arguments: Sequence[Any]) -> None:
    """Call the operator of ``variants`` with the arguments of their entry."""
    name = name_of(variants)
    flat: list[Any] = []
    register(name)
    for parameter, value in zip(variants[0].arguments, arguments, strict=True):
        if parameter.use != "must_be_none":
            flat += value if parameter.type == _PAIR else [value]
    getattr(getattr(torch.ops, NAMESPACE), name)(*flat)


def schema(variants: Sequence[KernelOperation], *, functional: bool = False) -> str:
    """The operator's arguments. A pair is two tensors; what is written is marked, or returned by a functional one."""
    written, passed, texts, marks = _written(variants), _passed(variants[0]), [], iter("abcdefgh")
    returned = []
    for index, parameter in enumerate(passed):
        optional = all(each.default is not REQUIRED for each in passed[index:])
        for name, part in _parts(parameter):
            kind = "Tensor" if parameter.type == _PAIR else _TYPES[parameter.type]
            if part in written and functional:
                returned.append(kind)
            elif part in written:
                kind = kind.replace("Tensor", f"Tensor({next(marks)}!)")
            texts.append(f"{kind} {name}" + (_default(parameter) if optional else ""))
    if "Tensor?" in returned:
        returned = ["Tensor[]"]  # an operator cannot return None
    return f"({', '.join(texts)}) -> ({', '.join(returned)})"


def _written(variants: Sequence[KernelOperation]) -> set[str]:
    """The arguments, or parts of them, that are written."""
    return {operation.operands[name] for operation in variants for name in operation.outputs or (operation.output,)}


def call_text(variants: Sequence[KernelOperation], own: Callable[[Parameter], str]) -> str:
    """The arguments with which an entry, whose own arguments are called ``own``, calls its operator."""
    texts = []
    for parameter in _passed(variants[0]):
        name = own(parameter)
        texts += [f"{name}[0]", f"{name}[1]"] if parameter.type == _PAIR else [name]
    return ", ".join(texts)


def _passed(operation: KernelOperation) -> list[Parameter]:
    return [parameter for parameter in operation.arguments if parameter.use != "must_be_none"]


def _parts(parameter: Parameter) -> list[tuple[str, str]]:
    """The names of the operator's arguments for ``parameter``, and of the operation's."""
    name = parameter.name
    if parameter.type == _PAIR:
        return [(name, f"{name}[0]"), (f"{name}_scales", f"{name}[1]")]
    return [(name, name)]


def _default(parameter: Parameter) -> str:
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    return f'="{default}"' if isinstance(default, str) else f"={default}"


def _arguments(operation: KernelOperation, flat: Sequence[Any]) -> list[Any]:
    """The arguments of an entry from those of its operator. torch leaves out the last ones that have their defaults."""
    rest, found = iter(flat), []
    for parameter in operation.arguments:
        if parameter.use == "must_be_none":
            found.append(parameter.default)
        elif parameter.type == _PAIR:
            found.append((next(rest), next(rest)))
        else:
            value = next(rest, parameter.default)
            found.append(tuple(value) if isinstance(value, list) else value)
    return found


def _real(variants: Sequence[KernelOperation], entry: Callable[..., None]) -> Callable[..., None]:
    """The function of the operator's arguments that calls ``entry``. Generated: a loop over them takes 3 us longer."""
    taken, given = list[str](), list[str]()
    namespace: dict[str, Any] = {"entry": entry}
    for index, parameter in enumerate(variants[0].entry_arguments):
        namespace[f"default{index}"] = None if parameter.use == "redirects" else parameter.default
        if parameter.use in ("must_be_none", "redirects"):
            given.append(f"default{index}")
            continue
        names = [name for name, _ in _parts(parameter)]
        # torch leaves out the last arguments that have their defaults.
        taken += [f"{name}=default{index}" for name in names]
        value = ", ".join(names)
        if parameter.type == _PAIR:
            value = f"({value})"
        elif parameter.type.startswith("tuple"):  # torch passes a list
            value = f"None if {value} is None else (*{value},)"
        given.append(value)
    source = f"def real({', '.join(taken)}):\n    entry({', '.join(given)})\n"
    return function(source, "real", f"operator of {variants[0].name}", namespace)


def _fake(variants: Sequence[KernelOperation]) -> Callable[..., None]:
    """The operator's function for fake tensors: it runs the checks of a call."""

    def fake(*flat: Any) -> None:
        arguments = _arguments(variants[0], flat)
        given = dict(zip((parameter.name for parameter in variants[0].arguments), arguments, strict=True))
        for operation in variants:
            if all(given[name] is None for name in operation.absent):
                operation.check(*arguments)
                return

    return fake


def _functional(variants: Sequence[KernelOperation], call: Callable[..., None]) -> Callable[..., Any]:
    """``call`` with fresh tensors in the place of those that it writes, which it returns."""
    written = _written(variants)
    kept = {operation.operands[name] for operation in variants for name in operation.kept if name in operation.operands}
    parts = [part for parameter in _passed(variants[0]) for _, part in _parts(parameter)]
    places = {index: part in kept for index, part in enumerate(parts) if part in written}

    def functional(*flat: Any) -> Any:
        given, fresh = list(flat), []
        for index, keeps in places.items():
            if index < len(given) and (x := given[index]) is not None:
                # With the strides that the caller chose, which torch keeps of dense tensors only: kernels need them.
                strides = torch.empty_like(x).stride() if 0 in x.stride() else x.stride()
                new = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
                given[index] = new.copy_(x) if keeps else new
                fresh.append(new)
        call(*given)
        return fresh[0] if len(places) == 1 else fresh

    return functional
