"""Products with an epilogue: an operation for each set of tensors of an epilogue, made when it is first called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.parts import PARTS, VECTORS
from deep_gemm.runtime import operators
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, make_entry

from .table import DTYPES

EPILOGUE_TENSORS = (*(part.name for part in PARTS), "sfd", *VECTORS)
"""The tensors of an epilogue, and the scales of a d of FP8."""

_operators = getattr(torch.ops, operators.NAMESPACE)
_traced: dict[str, EpilogueOperator] = {}


def call(
    kind: Callable[..., KernelOperation], product: str, given: Mapping[str, Any], tensors: tuple[str, ...]
) -> None:
    """Call the operation ``kind`` of ``product`` with an epilogue that has ``tensors``; ``given`` are all arguments."""
    function, names = _entry(kind, product, given.get("c") is not None, tensors)
    function(*[given[name] for name in names])


def with_bias(kind: Callable[..., KernelOperation], product: str) -> Callable[..., None]:
    """``function(a, b, d, bias, form)``: the call of ``product`` with `Epilogue(bias)` and no other option, without
    making one for each call."""
    defaults = {parameter.name: parameter.default for parameter in _traced[product].arguments}

    def call_with_bias(a: Any, b: Any, d: Tensor, bias: Tensor, form: str = "nt") -> None:
        named = {"a": a, "b": b, "d": d, "epilogue": f"bias:{DTYPES[bias.dtype]}", "form": form, "bias": bias}
        if torch.compiler.is_compiling() and records(product, {**defaults, **named}):
            return
        function, names = _entry(kind, product, False, ("bias",))
        function(*[named[name] if name in named else defaults[name] for name in names])

    return call_with_bias


def records(product: str, given: Mapping[str, Any]) -> bool:
    """Record a call in the program that torch traces. False if it traces none."""
    operation = _traced[product]
    flat = [value for name in operation.names for value in _flat(given.get(name))]
    if not (torch.compiler.is_dynamo_compiling() or operators.is_recorded(flat)):
        return False
    operators.register(operation.operator)
    getattr(_operators, operation.operator)(*flat)
    return True


def _flat(value: Any) -> tuple[Any, ...]:
    """A pair of values and scales is two arguments of an operator; a recipe is one."""
    return tuple(value) if isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor) else (value,)


@functools.cache
def _entry(
    kind: Callable[..., KernelOperation], product: str, accumulates: bool, tensors: tuple[str, ...]
) -> tuple[Callable[..., None], tuple[str, ...]]:
    operation = kind(product, accumulates, tensors)
    return make_entry(operation), tuple(parameter.name for parameter in operation.entry_arguments)


class EpilogueOperator(KernelOperation):
    """All calls of ``product``, an operation ``kind``, with an epilogue, as one operator of torch. Tensors that an
    epilogue has not are None."""

    def __init__(self, kind: Callable[..., KernelOperation], product: str) -> None:
        self.name, self._kind, self._product = f"{product}_epilogue", kind, product
        every = kind(product, True, EPILOGUE_TENSORS)
        self.operands, self.output, self.outputs = every.operands, every.output, every.outputs
        self.kept = every.kept
        required = [x for x in every.parameters if x.name not in EPILOGUE_TENSORS and x.use != "public_only"]
        self.parameters = *required, *(Parameter(name, "Tensor | None", None, "internal") for name in EPILOGUE_TENSORS)
        self.operator, self.names = operators.name_of((self,)), [parameter.name for parameter in self.arguments]
        _traced[product] = self
        operators.announce((self,), self._call)

    def _call(self, *arguments: Any) -> None:
        given = self.given(arguments, {})
        call(self._kind, self._product, given, _present(given))

    def _operation(self, given: Mapping[str, Any]) -> KernelOperation:
        return self._kind(self._product, given.get("c") is not None, _present(given))

    def axes(self, form: str | None) -> Mapping[str, str]:
        """The operation's, but K cannot be sharded: an epilogue needs complete sums."""
        return {
            name: own.replace("k", "K")
            for name, own in self._kind(self._product, True, EPILOGUE_TENSORS).axes(form).items()
        }

    def check(self, *arguments: Any, **named: Any) -> Any:
        """The check of the operation that has the tensors that are given."""
        given = self.given(arguments, named)
        operation = self._operation(given)
        return operation.check(*(given[parameter.name] for parameter in operation.arguments))

    def launches(self, x: Any, device: int) -> LaunchSequence:
        """The launches of the operation that has these tensors."""
        return self._operation(x.tensors).launches(x, device)

    def reference(self, x: Any) -> None:
        """The reference of the operation that has these tensors."""
        self._operation(x.tensors).reference(x)


def _present(given: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in EPILOGUE_TENSORS if given.get(name) is not None)
