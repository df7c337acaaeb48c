"""The parts of an epilogue: what a product does with its final sums before they are rounded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from .records import record

if TYPE_CHECKING:
    from .expression import Expression
    from .spec import Dtype

SWIGLU = "swiglu"
"""The activation of a product whose columns are a gate's and up's."""

MAX_VECTORS = 4
"""Vectors that an expression can have: each takes registers of consumers."""
VECTORS = tuple(f"vector_{index}" for index in range(MAX_VECTORS))
"""The operands of a call that are an expression's vectors, those of rows first."""
EIGHT = 8
"""Rows of gate, and then of up, in turn, as DeepGEMM's fused mixture of experts stores them."""
MARK = "custom:"
"""What stands before the text of an expression."""

FP8, GROUPS, TURNS = "fp8", "groups", "turns"
"""With `SWIGLU`, what a part may refuse: a D of FP8, groups along M, and turns of `EIGHT`."""
NOT_CAST = "{0} and a d of FP8 cannot be combined. Pass a d of {0}'s dtype, and cast it with deep_gemm.quantize.rows."

_CASTS = {"": "", "1x128": "fp8", "ue8m0": "fp8:ue8m0"}
_TURNS = {0: "", 1: "interleaved", EIGHT: f"interleaved:{EIGHT}"}


@record(frozen=True)
class Part:
    """A tensor of an epilogue: the operand ``name``, in texts ``word``, and its dtype if it may have one of several.

    It has an element for each row of D ("m", float32 with any stride, or one for all rows), for each column of the
    product ("n", contiguous, with groups for each of these), or for each element of D ("mn", of D's dtype, without
    ``dtypes``). ``refused`` has sentences, by what it may not be combined with.
    """

    name: str
    word: str
    axes: Literal["m", "n", "mn"]
    dtypes: tuple[Dtype, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def given(self, dtype: str | None) -> str | bool:
        """Its field in `Parts`; None if it is not given."""
        return (dtype or "") if len(self.dtypes) > 1 else dtype is not None

    def text(self, given: str | bool) -> str:
        """The text of its field in `Parts`."""
        return self.word * given if isinstance(given, bool) else f"{self.word}:{given}" if given else ""


PARTS = (
    Part("row_factor", "rows", "m", ("f32",)),
    Part(
        *("bias", "bias", "n", ("f32", "bf16", "f16")),
        refused={TURNS: "bias and eight rows of gate and up in turn cannot be combined. Pass all rows of gate first."},
    ),
    Part(
        *("residual", "residual", "mn"),
        refused={
            SWIGLU: "swiglu and a residual cannot be combined. Add the residual after the call.",
            GROUPS: "a GEMM grouped by M adds no residual. Add it to d after the call.",
            FP8: NOT_CAST.format("residual"),
        },
    ),
)
"""Each has a field in `Parts`, `Epilogue` and `Finish`. They are in the order of template arguments: a new one comes
last, and is left out where it is false, so that other kernels stay as they are."""
MATRICES = tuple(part.name for part in PARTS if part.axes == "mn")


def by_part(m: Any, n: Any, mn: Any) -> dict[str, Any]:
    """For each part one of these, by what it has elements for."""
    return {part.name: {"m": m, "n": n, "mn": mn}[part.axes] for part in PARTS}


@record(frozen=True)
class Parts:
    """``D = activation(alpha * row_factor * product (+ C) + bias) + residual``: which of these there are.

    The field of a part of `PARTS` is its dtype, if the part may have one of several. ``clamp`` is SwiGLU's limit.
    ``cast`` is "1x128" if D is FP8, and "ue8m0" if D's scales are powers of two too. An ``expression`` takes the place
    of an ``activation``. ``interleaved``: so many rows of B are a gate's and up's in turn, 1 or `EIGHT`; of eight, B's
    scales are those of all of gate's rows, and then up's. If no field is set, there is no epilogue, and ``bool(parts)``
    is False. JSON, schemas of operators and the command line have the text, such as
    "alpha+bias:f32+gelu" or "none".
    """

    alpha: bool = False
    row_factor: bool = False
    bias: str = ""
    activation: str = ""
    residual: bool = False
    clamp: float | None = None
    cast: str = ""
    expression: Expression | None = None
    interleaved: int = 0

    def __str__(self) -> str:
        texts = {part.name: part.text(getattr(self, part.name)) for part in PARTS}
        after = [texts.pop(name) for name in MATRICES]
        clamp = "" if self.clamp is None else f"clamp:{self.clamp!r}"
        more = _TURNS[self.interleaved], clamp, _CASTS[self.cast]
        parts = ("alpha" * self.alpha, *texts.values(), self.activation, *after, *more)
        text = "+".join(part for part in parts if part)
        if self.expression is not None:  # the last part, since it may have any letters
            text += f"{'+' * bool(text)}{self.expression}"
        return text or "none"

    def __bool__(self) -> bool:
        return self is not NO_PARTS and self != NO_PARTS

    def __lt__(self, other: Parts) -> bool:
        """In the order of their texts, in which lists of shapes are sorted."""
        return str(self) < str(other)

    @property
    def is_gated(self) -> bool:
        """Whether D has half as many columns as the product."""
        return self.activation == SWIGLU

    @property
    def label(self) -> str:
        """The text for names of kernels, where an expression is its name."""
        own = self.expression
        return str(self) if own is None else str(self).removesuffix(str(own)) + own.name

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands of a call that only kernels with this epilogue have."""
        given = {part.name: getattr(self, part.name) for part in PARTS} | {"sfd": self.cast}
        vectors = () if self.expression is None else tuple(self.expression.labels)
        return (*(name for name, there in given.items() if there), *vectors)

    def refusal(self, groups: bool = False) -> str:
        """Why a part cannot be combined with what else there is, as a sentence; "" if all can. ``groups``: along M."""
        others = [SWIGLU] * self.is_gated + [GROUPS] * groups + [FP8] * bool(self.cast)
        others += [TURNS] * (self.interleaved == EIGHT)
        if not others:
            return ""
        found = [part.refused.get(other, "") for part in PARTS for other in others if getattr(self, part.name)]
        return next(filter(None, found), "")


NO_PARTS = Parts()
"""No epilogue."""


@functools.cache
def parse(text: str) -> Parts:
    """The parts of a text, which may have any order, but for an expression, which is last. What is none of the words
    here is an activation. Raises ValueError for a text that no parts have."""
    words, mark, own = text.partition(MARK)
    found: dict[str, Any] = {}
    if mark:
        from .expression import Expression  # here: few calls have one

        found["expression"] = Expression.parse(own)
    for word in words.removesuffix("+" * bool(mark)).split("+") if words and text != "none" else ():
        name, value = _field(word)
        if name in found:
            raise ValueError(f"an epilogue has one {name}, but the text {text!r} has several.")
        found[name] = value
    return Parts(**found) if found else NO_PARTS


def _field(word: str) -> tuple[str, Any]:
    """The field of `Parts` that a word of a text says, and its value."""
    name, mark, value = word.partition(":")
    part = next((part for part in PARTS if part.word == name), None)
    if part is not None and (value in part.dtypes if len(part.dtypes) > 1 else not mark):
        return part.name, part.given(value)
    if name == "clamp":
        return name, float(value)
    for field_name, texts in (("cast", _CASTS), ("interleaved", _TURNS)):
        for given, text in texts.items():
            if given and text == word:
                return field_name, given
    if part is None and word.isidentifier():
        return (word, True) if word == "alpha" else ("activation", word)
    raise ValueError(f"{word!r} is no part of an epilogue.")
