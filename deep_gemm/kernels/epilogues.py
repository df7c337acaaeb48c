"""What GEMM kernels do with final sums before they are rounded: see ``templates/include/finish.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal

from ..records import record
from ..spec import AMAX_MIN, Dtype, GemmSpec, Operand, QuantizeSpec, float_bits
from .base import Argument, Numbers, Strides, Value, parameters
from .expressions import MARK, Expression

SWIGLU = "swiglu"
"""The activation of a product whose columns are a gate's and up's."""

FP8, GROUPS = "fp8", "groups"
"""With `SWIGLU`, what a part may refuse: a D of FP8, and groups along M."""
NOT_CAST = "{0} and a d of FP8 cannot be combined. Pass a d of {0}'s dtype, and cast it with deep_gemm.quantize.rows."

_CASTS = {"": "", "1x128": "fp8", "ue8m0": "fp8:ue8m0"}
_ARGUMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32", "": "kNoBias", False: "false", True: "true"}
_DECLARED = {
    "m": "const float* {0}, i64 {0}_stride",
    "n": "const u8* {0}, i64 {0}_stride_g",
    "mn": "const u8* {0}, i64 {0}_stride",
}


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
    Part("bias", "bias", "n", ("f32", "bf16", "f16")),
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

    A part of `PARTS` is its dtype, if it may have several. ``clamp`` is SwiGLU's limit, and ``cast`` says whether D is
    FP8 with "1x128" scales, or with such that are powers of two, "ue8m0". In place of an ``activation`` there may be an
    ``expression``. ``interleaved``: rows of B are a gate's and up's in turn. Specs and params hold the text of this,
    such as "alpha+bias:f32+gelu"; "none" if there is no epilogue.
    """

    alpha: bool = False
    row_factor: bool = False
    bias: str = ""
    activation: str = ""
    residual: bool = False
    clamp: float | None = None
    cast: str = ""
    expression: Expression | None = None
    interleaved: bool = False

    def __str__(self) -> str:
        texts = {part.name: part.text(getattr(self, part.name)) for part in PARTS}
        after = [texts.pop(name) for name in MATRICES]
        clamp = "" if self.clamp is None else f"clamp:{self.clamp!r}"
        more = "interleaved" * self.interleaved, clamp, _CASTS[self.cast]
        text = "+".join(filter(None, ("alpha" * self.alpha, *texts.values(), self.activation, *after, *more)))
        if self.expression is not None:  # the last part, since it may have any letters
            text += f"{'+' * bool(text)}{self.expression}"
        return text or "none"

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
        if not others:
            return ""
        found = [part.refused.get(other, "") for part in PARTS for other in others if getattr(self, part.name)]
        return next(filter(None, found), "")

    @property
    def device_name(self) -> str:
        """The template arguments of ``EpilogueOf`` after D's elements; "" without an epilogue."""
        if self == Parts():
            return ""
        activation = self.activation.title().replace("_", "") or ("Custom" if self.expression else "Identity")
        if self.is_gated:
            limit = float("inf") if self.clamp is None else self.clamp
            turns = ", true" if self.interleaved else ""
            activation += f"<0x{float_bits(limit):08x}{turns}>"
        given = [getattr(self, part.name) for part in PARTS]
        flags = [_ARGUMENTS[flag] for flag in (self.alpha, *given[:3], self.cast == "ue8m0", *given[3:])]
        while len(flags) > 4 and flags[-1] == "false":  # the defaults of those behind the first three parts
            flags.pop()
        return ", ".join((activation, *flags))

    @property
    def device_code(self) -> str:
        """The device code of an expression; "" without one."""
        return "" if self.expression is None else self.expression.device_code

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters."""
        found = ["f32 alpha"] * self.alpha
        found += [_DECLARED[part.axes].format(part.name) for part in PARTS if getattr(self, part.name)]
        found += ["float* sfd, i64 sfd_stride_m, i64 sfd_stride_n, i64 sfd_stride_g"] * bool(self.cast)
        vectors = () if self.expression is None else self.expression.arguments
        return (parameters(", ".join(found)) if found else ()) + vectors

    def values(self, strides: Strides, numbers: Numbers) -> Mapping[str, Value]:
        """The parameters' values, without pointers. The stride of a group's FP8 scales is how much further apart they
        are than its rows."""
        found: dict[str, Value] = {"alpha": numbers["alpha"]} if self.alpha else {}
        for part in PARTS:
            if getattr(self, part.name):
                own = strides[part.name]
                of_columns = {f"{part.name}_stride_g": own[0] if len(own) > 1 else 0}
                found |= of_columns if part.axes == "n" else {f"{part.name}_stride": own[-len(part.axes)]}
        if self.cast:
            *group, row, block = strides["sfd"]
            found |= {"sfd_stride_g": group[0] if group else 0, "sfd_stride_m": row, "sfd_stride_n": block}
        return found


def every(has_matrices: bool) -> str:
    """The text of an epilogue with all parts, for tests; without those of elements of D if a family has none."""
    given: dict[str, Any] = {part.name: part.given("bf16") for part in PARTS if has_matrices or part.axes != "mn"}
    return str(Parts(True, activation="silu", **given))


@functools.cache
def parse(text: str) -> Parts:
    """The parts of an epilogue from their text."""
    text, _, own = text.partition(MARK)
    words = {} if text == "none" else dict(word.partition(":")[::2] for word in text.split("+") if word)
    fields: dict[str, Any] = {part.name: part.given(words.pop(part.word, None)) for part in PARTS}
    fields |= {name: words.pop(name, None) is not None for name in ("alpha", "interleaved")}
    clamp, cast = words.pop("clamp", None), words.pop("fp8", "none")
    return Parts(
        activation=next(iter(words), ""),
        clamp=None if clamp is None else float(clamp),
        cast={"": "1x128", "ue8m0": "ue8m0"}.get(cast, ""),
        expression=Expression.parse(own) if own else None,
        **fields,
    )


def apart(spec: GemmSpec) -> tuple[GemmSpec, QuantizeSpec] | None:
    """Two launches that compute what ``spec`` does in one, if D is FP8 and there are no groups: the product with a
    contiguous float32 D, and the cast of it, that of `deep_gemm.quantize.rows`. None for others."""
    if spec.d.dtype != "e4m3" or spec.grouping != "none":
        return None
    parts, epsilon = parse(spec.epilogue), float_bits(AMAX_MIN)
    columns, powers = spec.n // 2 if parts.is_gated else spec.n, parts.cast == "ue8m0"
    product = replace(spec, d=Operand("f32", "mn"), epilogue=str(replace(parts, cast="")))
    return product, QuantizeSpec(spec.m, columns, "f32", "row", "none", epsilon=epsilon, power_of_two=powers)
