"""Users' own expressions in epilogues: what they are given, and the same in torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from deep_gemm.parts import MAX_VECTORS, VECTORS

from ..errors import InvalidInputError, UnsupportedError
from ..tensors import check_tensor, kind_of, shape_of, shown

if TYPE_CHECKING:
    from deep_gemm.expression import Expression

MAX_NAME = 40
"""Letters of a name, which is part of the kernel's."""

Vectors: TypeAlias = Mapping[str, Tensor]
Reference: TypeAlias = Callable[..., Tensor]

_references: dict[str, Reference] = {}
"""By the text of an expression, which is all that a recorded program has of it."""


@dataclass(frozen=True, eq=False)
class CustomActivation:
    """The activation of `deep_gemm.Epilogue.custom`: an expression, and its vectors in the order of `VECTORS`."""

    expression: Expression
    tensors: dict[str, Tensor]


def custom_activation(
    name: str, body: str, rows: Vectors | None, columns: Vectors | None, reference: Reference | None
) -> CustomActivation:
    """Check the arguments of `deep_gemm.Epilogue.custom`. Raises InvalidInputError."""
    from deep_gemm.expression import Expression  # here: few processes have one
    from deep_gemm.names import is_name, is_text

    if not is_name(name) or len(name) > MAX_NAME:
        raise InvalidInputError(
            f"name of an expression must be a name that C++ can have, of at most {MAX_NAME} letters, but it is "
            f"{shown(name)}."
        )
    given = [*_named(name, "rows", rows), *_named(name, "columns", columns)]
    text = textwrap.dedent(body).strip() if is_text(body) else ""
    expression = Expression(name, text, *(tuple(each for kind, each, _ in given if kind == at) for at in _KINDS))
    if not expression.uses("return"):
        raise InvalidInputError(
            f'body of {name} must be statements in C++ that return a float, such as "return x > 0 ? x * x : 0.0f;", '
            f"but it is {shown(body)}."
        )
    for kind, each, _ in given:
        if not expression.uses(each):
            raise InvalidInputError(f"body of {name} does not use {kind}[{each!r}]. Leave it out.")
    if len(given) > MAX_VECTORS or len({each for _, each, _ in given}) < len(given):
        raise InvalidInputError(
            f"rows and columns of {name} must be at most {MAX_VECTORS} vectors with different names, but they are "
            f"{', '.join(f'{kind}[{each!r}]' for kind, each, _ in given)}."
        )
    if reference is not None:
        _references[str(expression)] = reference
    return CustomActivation(expression, dict(zip(VECTORS, (x for _, _, x in given), strict=False)))


_KINDS = ("rows", "columns")
_PLACES = ("x", "row", "column")


def _named(name: str, kind: str, vectors: Any) -> list[tuple[str, str, Tensor]]:
    """Checked vectors, each with its kind and its name."""
    if vectors is None:
        return []
    if not isinstance(vectors, Mapping):
        raise InvalidInputError(f"{kind} of {name} must be a dictionary of vectors, but it is {kind_of(vectors)}.")
    from deep_gemm.names import is_name

    for each, x in vectors.items():
        label = f"{kind}[{each!r}] of {name}"
        if not is_name(each) or each in _PLACES:
            raise InvalidInputError(f"{label}: its name must be one that C++ can have, and not be x, row or column.")
        _check_vector(label, x)
    return [(kind, each, x) for each, x in vectors.items()]


def _check_vector(label: str, x: Any) -> None:
    check_tensor(label, x, (1,))
    if x.dtype != torch.float32 or (x.numel() > 1 and x.stride(0) != 1):
        raise InvalidInputError(
            f"{label} must be torch.float32 and contiguous, but it is {kind_of(x)} with strides {x.stride()}."
        )


def check_vectors(expression: Expression, tensors: Mapping[str, Tensor], m: int, n: int) -> None:
    """Check the vectors for a D of M x N."""
    for at, (name, label) in enumerate(expression.labels.items()):
        wanted = (m if at < len(expression.rows) else n,)
        _check_vector(f"{label} of {expression.name}", tensors[name])
        if tuple(tensors[name].shape) != wanted:
            raise InvalidInputError(
                f"{label} of {expression.name} must have the shape {wanted}, but it has {shape_of(tensors[name])}."
            )


def in_torch(expression: Expression, tensors: Mapping[str, Tensor]) -> Callable[[Tensor, tuple[slice, slice]], Tensor]:
    """The reference, for sums in the rows and columns of D that its second argument gives. Raises UnsupportedError if
    the caller gave none."""
    reference = _references.get(str(expression))
    if reference is None:
        raise UnsupportedError(
            f"{expression.name} has no reference to run in torch: pass CUDA tensors with K above 0, or give it one, "
            f'Epilogue.custom("{expression.name}", ..., reference=function), outside of what torch.compile traces.'
        )

    def activated(x: Tensor, where: tuple[slice, slice]) -> Tensor:
        named = {}
        for at, (name, label) in enumerate(
            zip((*expression.rows, *expression.columns), expression.labels, strict=True)
        ):
            is_row = at < len(expression.rows)
            named[name] = _as_row_or_column(tensors[label][where[not is_row]], is_row)
        for name, is_row in (("row", True), ("column", False)):
            if expression.uses(name):
                start, size = where[not is_row].start or 0, x.shape[not is_row]
                named[name] = _as_row_or_column(torch.arange(start, start + size, device=x.device), is_row)
        found = reference(x, **named)
        if not isinstance(found, Tensor) or found.shape != x.shape:
            what = f"one of {shape_of(found)}" if isinstance(found, Tensor) else kind_of(found)
            raise InvalidInputError(
                f"the reference of {expression.name} must return a tensor of the shape of x, {shape_of(x)}, but it "
                f"returned {what}."
            )
        return found.float()

    return activated


def _as_row_or_column(x: Tensor, is_row: bool) -> Tensor:
    return x.reshape(-1, 1) if is_row else x.reshape(1, -1)
