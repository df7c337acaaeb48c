"""The parameters of a user's kernel, each declared once, with a type in C++ style."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidInputError
from ..jit.driver.launch import Map
from ..kernels.base import Argument
from ..names import is_name

ELEMENTS = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
}
"""Types of tensors' elements, by their names in ``custom.cuh``."""

NUMBERS = {"i32": (-(1 << 31), (1 << 31) - 1), "u32": (0, (1 << 32) - 1), "i64": (-(1 << 63), (1 << 63) - 1)}
"""Integer types, with the least and the largest value of each."""
FLOAT = "f32"

MAP_ELEMENTS = {"f32": "f32", "f16": "f16", "bf16": "bf16", "e4m3": "u8", "i8": "u8", "u8": "u8"}
"""Element types of tensor maps, by their names in ``custom.cuh``."""

_DECLARATION = re.compile(
    r"(?P<const>const )?(?:(?P<element>\w+)\*|TensorMap<(?P<mapped>\w+)>)(?: (?P<operand>\w+))?|(?P<number>\w+)"
)


@dataclass(frozen=True)
class KernelParameter:
    """A pointer to a tensor, a tensor map of one, or a number. ``operand`` is the tensor's name, or empty for a
    number."""

    argument: Argument
    operand: str
    element: str
    is_map: bool
    written: bool

    @property
    def name(self) -> str:
        return self.argument.name

    @classmethod
    def parse(cls, kernel: str, name: str, text: object) -> KernelParameter:
        """Parse a declaration such as ``"const f32*"``. Raises InvalidInputError."""
        match = _DECLARATION.fullmatch(text) if isinstance(text, str) else None
        element = match and (match["element"] or match["mapped"] or match["number"])
        known = match and (
            match["number"] in (*NUMBERS, FLOAT)
            if match["number"]
            else match["mapped"] in MAP_ELEMENTS
            if match["mapped"]
            else match["element"] in ELEMENTS
        )
        if match is None or not element or not known:
            raise InvalidInputError(
                f"parameters of {kernel}: {name} must be a number ({', '.join((*NUMBERS, FLOAT))}), a pointer such as "
                f'"const f32*" (to {", ".join(ELEMENTS)}), or a tensor map such as "const TensorMap<bf16> x" (of '
                f'{", ".join(MAP_ELEMENTS)}), but it is {text!r}. "const" says that the kernel only reads it; the '
                "tensor's name may stand behind the type."
            )
        if not is_name(name):
            raise InvalidInputError(f"parameters of {kernel}: {name!r} is no name that a parameter in C++ can have.")
        const = match["const"] or ""
        if match["number"]:
            return cls(Argument(name, element), "", element, False, False)
        operand = match["operand"] or name
        ctype = "TensorMap" if match["mapped"] else f"{const}{element}*"
        return cls(Argument(name, ctype, operand), operand, element, bool(match["mapped"]), not const)

    def check(self, kernel: str, value: Any) -> Any:
        """The checked value of a number or a tensor map, ready to be packed. Raises InvalidInputError."""
        if self.is_map:
            if not isinstance(value, Map):
                raise InvalidInputError(
                    f"{self.name} of {kernel} must be a deep_gemm.tensor_map(...), but it is {value!r}."
                )
            return value
        if self.element == FLOAT:
            return self._float(kernel, value)
        least, largest = NUMBERS[self.element]
        if not isinstance(value, int) or not least <= value <= largest:
            raise InvalidInputError(
                f"{self.name} of {kernel} must be an integer from {least} to {largest} ({self.element}), but it is "
                f"{_shown(value)}."
            )
        return int(value)

    def _float(self, kernel: str, value: Any) -> float:
        try:
            if isinstance(value, (int, float)):
                struct.pack("=f", value)
                return float(value)
        except OverflowError:
            pass
        raise InvalidInputError(f"{self.name} of {kernel} must be a number of float32, but it is {_shown(value)}.")


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}: call .item()" if isinstance(value, torch.Tensor) else repr(value)


@dataclass(frozen=True)
class Declared:
    """The parameters of a kernel, and of the function that launches it."""

    kernel: str
    parameters: tuple[KernelParameter, ...]
    arguments: tuple[str, ...]
    """The function's arguments, in order."""
    tensors: Mapping[str, str]
    """The element type of each argument that is a tensor."""
    written: tuple[str, ...]
    pointers: frozenset[str]

    @property
    def signature(self) -> str:
        return ", ".join(parameter.argument.declaration for parameter in self.parameters)

    @property
    def computed(self) -> tuple[str, ...]:
        """Parameters whose values the function returns: tensor maps, and numbers that are not its arguments."""
        return tuple(p.name for p in self.parameters if p.is_map or (not p.operand and p.name not in self.arguments))

    @property
    def floats(self) -> tuple[str, ...]:
        """Arguments that may be floats: those without an integer parameter."""
        integers = {p.name for p in self.parameters if p.element in NUMBERS and not p.operand}
        return tuple(name for name in self.arguments if name not in self.tensors and name not in integers)


def declare(kernel: str, parameters: object, signature: inspect.Signature) -> Declared:
    """Parse ``parameters`` for a function with the given signature. Raises InvalidInputError."""
    if not isinstance(parameters, Mapping) or not parameters:
        raise InvalidInputError(
            f"parameters of {kernel} must be a dictionary of names and types, such as {{'out': 'f32*', 'n': 'u32'}}, "
            f"but it is {parameters!r}."
        )
    found = tuple(KernelParameter.parse(kernel, str(name), text) for name, text in parameters.items())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = tuple(signature.parameters)
    for name, argument in signature.parameters.items():
        if argument.kind not in kinds:
            raise InvalidInputError(f"{kernel}: {name} must be a plain argument, not *, ** or keyword-only.")
    tensors: dict[str, str] = {}
    for parameter in found:
        if not parameter.operand:
            continue
        if parameter.operand not in arguments:
            raise InvalidInputError(
                f"parameters of {kernel}: {parameter.name} is of the tensor {parameter.operand}, which is no argument "
                f"of the function: {', '.join(arguments) or 'it has none'}."
            )
        if tensors.setdefault(parameter.operand, parameter.element) != parameter.element:
            raise InvalidInputError(f"parameters of {kernel}: {parameter.operand} has elements of two types.")
    written = tuple(dict.fromkeys(p.operand for p in found if p.written))
    if not written:
        raise InvalidInputError(f"parameters of {kernel}: all tensors are const, so that it has no result.")
    ordered = {name: tensors[name] for name in arguments if name in tensors}
    pointers = frozenset(p.operand for p in found if p.operand and not p.is_map)
    return Declared(kernel, found, arguments, ordered, written, pointers)
