"""The base class of calibration constants: positive numbers by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..errors import InvalidInputError

Kind = TypeVar("Kind", bound="Constants")


@dataclass(frozen=True)
class Constants:
    WHAT: ClassVar[str]
    """Their name in an error message."""

    @classmethod
    def from_json(cls: type[Kind], data: dict[str, Any]) -> Kind:
        """The constants in ``data``, which must name each of them and nothing else. Raises InvalidInputError."""
        names = [field.name for field in fields(cls)]
        if sorted(data) != sorted(names) or not all(
            isinstance(value, (int, float)) and value > 0 for value in data.values()
        ):
            raise InvalidInputError(
                f"{cls.WHAT} holds positive numbers named {', '.join(names)}, but this one holds {data}. "
                "Make a new one with `deep-gemm calibrate fit`."
            )
        return cls(**{name: float(data[name]) for name in names})

    def to_json(self) -> dict[str, float]:
        return asdict(self)
