"""Frozen dataclasses that are made fast. A process defines some seventy before its first call, and `dataclasses`
compiles six functions for each: a third of the time to import this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["record"]


class _Factory:
    """The default of a field that has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _setattr(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    """The one function that is compiled, so that it has a signature and takes little time."""
    names: dict[str, Any] = {"_factory": _FACTORY}
    arguments, values = ["self"], []
    for field in fields:
        name, value = field.name, field.name
        names[f"_{name}"] = field.default
        if field.default_factory is not dataclasses.MISSING:
            names[f"_{name}"], value = field.default_factory, f"_{name}() if {name} is _factory else {name}"
            arguments.append(f"{name}=_factory")
        else:
            arguments.append(name if field.default is dataclasses.MISSING else f"{name}=_{name}")
        values.append(f" _own[{name!r}] = {value}")
    if hasattr(cls, "__post_init__"):
        values.append(" self.__post_init__()")
    # torch.compile of torch 2.7 traces writes to `__dict__`, and no call of its methods.
    exec("\n".join((f"def __init__({', '.join(arguments)}):", " _own = self.__dict__", *values)), names)
    made: Callable[..., None] = names["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
    return made


def _key(names: list[str]) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*names * (3 - min(len(names), 2))) if names else lambda self: ()


def _made(cls: type, eq: bool) -> type:
    cls.__doc__ = cls.__doc__ or cls.__name__  # otherwise `dataclass` writes a signature there, which takes long
    texts = vars(cls).get("__annotations__", {})
    # In annotations that are texts `dataclass` looks for ClassVar and its like, which takes half of its time.
    cls.__annotations__ = {name: text if "Var" in text or "KW_ONLY" in text else object for name, text in texts.items()}
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    cls.__annotations__ = texts
    fields = dataclasses.fields(cls)
    for field in fields:
        field.type = texts.get(field.name, field.type)
    if any(not field.init or field.kw_only for field in fields):
        raise TypeError(f"{cls.__qualname__} has a field that is no argument, or by keyword only: use dataclasses")
    methods = {"__init__": _init(cls, fields), "__repr__": _repr, "__setattr__": _setattr, "__delattr__": _delattr}
    if eq:
        compared = _key([field.name for field in fields if field.compare])
        hashed = _key([field.name for field in fields if (field.compare if field.hash is None else field.hash)])

        def __eq__(self: object, other: object) -> bool:
            return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

        def __hash__(self: object) -> int:
            return hash(hashed(self))

        methods |= {"__eq__": __eq__, "__hash__": __hash__}
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, eq: bool = True) -> Callable[[type], type]:
        """``@dataclass(frozen=True)``: the same instances, fields, comparisons and texts. Classes that inherit from a
        record are records."""
        if not frozen:
            raise TypeError("a record is frozen")
        return lambda cls: _made(cls, eq)
