"""Epilogues: what a product does with its sums before it rounds them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from deep_gemm.ops.reference import ACTIVATIONS
from deep_gemm.parts import NO_PARTS, PARTS, SWIGLU, Parts, parse

from ..errors import InvalidInputError, UnsupportedError
from ..tensors import check_tensor, kind_of, shape_of, shown
from .custom_activation import CustomActivation, Reference, Vectors, custom_activation
from .table import DTYPES, TORCH

if TYPE_CHECKING:
    from deep_gemm.expression import Expression


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What a product does with its sums, in float32, before they are rounded once to d's dtype:

    ``d = activation(alpha * row_factor * (a @ b^T) + c + bias) + residual``, from left to right.

    "swiglu" takes two halves of the product, gate and up, of which b has the rows one after the other: with
    ``[gate, up] = alpha * (a @ b^T) + bias`` and b of 2 I rows, d has I columns::

        d = silu(min(gate, clamp)) * min(max(up, -clamp), clamp) * row_factor

    With ``interleaved`` rows of b are one of gate and one of up in turn, and so are elements of bias. row_factor, such
    as a router's weights, is a factor of the result here. On a GPU, this version computes swiglu for
    FP8 with scales of 1 x 128 and 128 x 128 and I a multiple of 128, and for 16-bit operands that are K-major.

    d may be a pair (values, scales), E4M3 (M, columns) and float32 (M, columns / 128), in the masked form with the
    group in front: the bytes are those that `deep_gemm.quantize.rows` makes of the float32 result. There is neither c
    nor a residual then. Of GEMMs' operands, scales with contiguous columns are read without a copy:
    `deep_gemm.quantize.rows` and `get_mn_major_tma_aligned_tensor` return such. On a GPU, columns of such a d are a
    multiple of 128.

    Pass it as ``epilogue=``. It holds tensors, so make one for each call or keep one: both are cheap. All parts may be
    combined, with each other and with c.

    Args:
        bias: (N,) float32, bfloat16 or float16, contiguous. With groups along M, (G, N): a row for each group.
        activation: a name of `ACTIVATIONS`. "gelu" is that by tanh (``approximate="tanh"`` in torch), "gelu_erf"
            torch's default, and "relu2" the square of relu. "swiglu" combines with neither c nor residual. For one of
            your own see `custom`.
        alpha: a factor of all products: a finite number, or a float32 tensor of one element on the device of the
            others, which is read when the kernel runs.
        residual: what is added after the activation, of d's dtype, shape and number of dimensions, row-major. It may be
            d itself (the same address, shape and strides), unless c is given too. With groups there is none.
        row_factor: (M,) float32, a factor of each row's products, with any stride. In the masked form it is (G, max_m),
            each group right after the one before.
        clamp: swiglu's limit, a number from 0 on: gate is capped at it, and up is held between -clamp and clamp. Each
            number is another kernel.
        interleaved: whether rows of b are gate's and up's in turn, with swiglu, and not first all of gate's.
        use_ue8m0: whether the scales of a d of FP8 are rounded up to powers of two. Refused for another d.

    Raises:
        InvalidInputError: a part is wrong by itself; the message names it. What must agree with the operands is checked
            by the call.
        UnsupportedError: parts that this version cannot combine.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.bf16_gemm_nt(a, b, d, epilogue=deep_gemm.Epilogue(bias=torch.full((32,), -60.0), activation="relu"))
    >>> d[0, 0].item()
    4.0
    """

    bias: Tensor | None = None
    activation: str | CustomActivation | None = None
    alpha: float | Tensor | None = None
    residual: Tensor | None = None
    row_factor: Tensor | None = None
    clamp: float | None = None
    use_ue8m0: bool = False
    interleaved: bool = False
    text: str = field(init=False, repr=False)
    fp8_text: str = field(init=False, repr=False)
    parts: Parts = field(init=False, repr=False)
    number: float = field(init=False, repr=False)
    tensors: dict[str, Tensor] = field(init=False, repr=False)

    ACTIVATIONS: ClassVar[tuple[str, ...]] = (*ACTIVATIONS, SWIGLU)
    """The names of activations."""

    def __post_init__(self) -> None:
        own = self.activation if isinstance(self.activation, CustomActivation) else None
        is_known = isinstance(self.activation, str) and self.activation in self.ACTIVATIONS
        if own is None and self.activation is not None and not is_known:
            known = ", ".join(map(repr, self.ACTIVATIONS))
            raise InvalidInputError(
                f"the activation of an epilogue must be None or one of {known}, but it is {shown(self.activation)}."
            )
        plain = self.clamp is None and self.use_ue8m0 is False and self.interleaved is False
        if not plain or (is_known and self.activation == SWIGLU):
            self._check_gate()
        rows = self.row_factor
        if isinstance(self.alpha, Tensor):
            check_tensor("alpha", self.alpha)
            if rows is not None:
                raise UnsupportedError(
                    "alpha as a tensor and row_factor cannot be combined. Pass row_factor=alpha * row_factor."
                )
            if self.alpha.numel() != 1 or self.alpha.dtype != torch.float32:
                raise InvalidInputError(
                    "alpha must be a number or a float32 tensor of one element, but it is "
                    f"{kind_of(self.alpha)} of {shape_of(self.alpha)}."
                )
            rows = self.alpha.reshape(1)
        elif self.alpha is not None and not is_float32(self.alpha):
            raise InvalidInputError(
                "alpha must be a finite number or a float32 tensor of one element, but it is "
                f"{shown(self.alpha)}. A number is float32 too."
            )
        tensors: dict[str, Tensor] = {}
        for part in PARTS:
            tensor = rows if part.name == "row_factor" else getattr(self, part.name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                check_tensor(part.name, tensor)
            tensors[part.name] = tensor
        has_number = self.alpha is not None and not isinstance(self.alpha, Tensor)
        activation = self.activation if isinstance(self.activation, str) else ""
        clamp = None if self.clamp is None else abs(float(self.clamp))
        expression = own.expression if own else None
        dtypes = tuple([(name, tensor.dtype) for name, tensor in tensors.items()])
        make = _made if torch.compiler.is_compiling() else _parts  # torch would warn of the cache
        key = dtypes, has_number, activation, clamp, expression, self.interleaved, self.use_ue8m0
        parts, text, fp8_text = make(*key)
        tensors.update(own.tensors if own else {})
        number = float(self.alpha) if has_number else 1.0  # type: ignore[arg-type]
        found = {"text": text, "fp8_text": fp8_text, "parts": parts, "number": number, "tensors": tensors}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _check_gate(self) -> None:
        """Check what swiglu alone has, and what it cannot have."""
        for name in ("use_ue8m0", "interleaved"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be True or False, but it is {shown(value)}.")
        if self.activation != SWIGLU:
            if self.interleaved:
                raise InvalidInputError(
                    f"interleaved says how swiglu's rows of b lie, but the activation is {shown(self.activation)}. "
                    "Leave it out."
                )
            if self.clamp is not None:
                raise InvalidInputError(
                    f"clamp is swiglu's limit, but the activation is {shown(self.activation)}. Leave it out."
                )
            return
        if self.clamp is not None and not (is_float32(self.clamp) and float(self.clamp) >= 0):
            raise InvalidInputError(
                f"clamp must be a number from 0 that float32 can hold, but it is {shown(self.clamp)}."
            )
        if isinstance(self.alpha, Tensor):
            raise UnsupportedError("alpha must be a number with swiglu, not a tensor. Multiply the scales of a by it.")

    @classmethod
    def custom(
        cls,
        name: str,
        body: str,
        *,
        rows: Vectors | None = None,
        columns: Vectors | None = None,
        reference: Reference | None = None,
        **parts: Any,
    ) -> Epilogue:
        """An epilogue with an activation of your own, in CUDA C++::

            Epilogue.custom("relu2", "return x > 0 ? x * x : 0.0f;", reference=lambda x: torch.relu(x).square())
            Epilogue.custom("shifted", "return tanhf(x * scale + shift);", columns={"scale": scale, "shift": shift})

        Args:
            name: of the expression, which is part of the kernel's.
            body: statements that return a float. They may use ``x``, the sum; ``row`` and ``column``, its place in d,
                as unsigned 32-bit integers; and by their names the elements of vectors there.
            rows: float32 vectors (M,), contiguous: the element of ``row`` of each, by name.
            columns: the same of (N,), for ``column``. In all there may be four vectors.
            reference: the same in torch, for tensors on the CPU and for K = 0: a function of x, a float32 matrix, and
                by keyword of what ``body`` names. Vectors of rows, and ``row``, are (rows, 1); vectors of columns, and
                ``column``, (1, columns).
            parts: bias, alpha, residual and row_factor, as of `Epilogue`.

        Each body is a kernel of its own, which is compiled when it is first called. Raises InvalidInputError; a call
        also CompileError, whose message shows the line of ``body``, and UnsupportedError without a reference that it
        needs.

        >>> body = "return x > 0 ? x * x : 0.0f;"
        >>> relu2 = deep_gemm.Epilogue.custom("relu2", body, reference=lambda x: x.relu().square())
        >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
        >>> deep_gemm.bf16_gemm_nt(a, b, d, epilogue=relu2)
        >>> d[0, 0].item()
        4096.0
        """
        if "activation" in parts:
            raise InvalidInputError(f"activation and {name} cannot both be given: {name} is the activation.")
        return cls(activation=custom_activation(name, body, rows, columns, reference), **parts)


def _made(
    dtypes: tuple[tuple[str, torch.dtype], ...],
    alpha: bool,
    activation: str,
    clamp: float | None,
    expression: Expression | None,
    interleaved: bool,
    use_ue8m0: bool,
) -> tuple[Parts, str, str]:
    """The parts with tensors of these dtypes, their text, and that if d is FP8. Refuses those that cannot be."""
    given: dict[str, Any] = {"alpha": alpha, "activation": activation, "clamp": clamp, "expression": expression}
    given["interleaved"] = interleaved
    for part in PARTS:
        for dtype in (dtype for name, dtype in dtypes if name == part.name):
            given[part.name] = part.given(DTYPES.get(dtype, ""))
            if part.dtypes and DTYPES.get(dtype) not in part.dtypes:
                known = " or ".join(str(TORCH[each]) for each in part.dtypes)
                raise InvalidInputError(f"{part.name} of an epilogue must be {known}, but it is {dtype}.")
    parts = Parts(**given)
    if why := parts.refusal():
        raise UnsupportedError(why)
    return parts, str(parts), str(Parts(**given, cast="ue8m0" if use_ue8m0 else "1x128"))


_parts = functools.cache(_made)


Epilogues: TypeAlias = "str | Epilogue | Iterable[str | Epilogue] | None"


def epilogues_of(given: Epilogues) -> tuple[Parts, ...]:
    """The parts of epilogues or of their texts, each once. Raises InvalidInputError for what is none."""
    each = [given] if isinstance(given, (str, Epilogue)) else [] if given is None else given
    return tuple(dict.fromkeys(_parts_of(x) for x in each))


def _parts_of(given: Any) -> Parts:
    """Scales that are powers of two are those of a d of FP8; otherwise the d of an `Epilogue` is not FP8."""
    if isinstance(given, Epilogue):
        return replace(given.parts, cast="ue8m0") if given.use_ue8m0 else given.parts
    if (parts := parts_of(given)).refusal():
        raise _no_epilogue(given)
    return parts


def parts_of(text: Any) -> Parts:
    """The parts of an epilogue's text, in any order. Raises InvalidInputError for what is none."""
    try:
        parts = parse(text) if isinstance(text, str) else NO_PARTS
    except InvalidInputError:  # an expression, which has a sentence of its own
        raise
    except ValueError as error:
        raise _no_epilogue(text) from error
    has_gate, limit = parts.clamp is not None or parts.interleaved > 0, parts.clamp or 0.0
    known = parts.activation in ("", *Epilogue.ACTIVATIONS) and parts.is_gated >= has_gate
    if not parts or not known or not (is_float32(limit) and limit >= 0) or (parts.activation and parts.expression):
        raise _no_epilogue(text)
    return parts


def _no_epilogue(given: object) -> InvalidInputError:
    return InvalidInputError(
        "an epilogue must be a deep_gemm.Epilogue or the text of its parts, joined by +: alpha, rows (factors), "
        f"bias:f32 (or bf16, f16), an activation ({', '.join(Epilogue.ACTIVATIONS)}), residual; with swiglu alone "
        f"interleaved and clamp:LIMIT; and fp8 or fp8:ue8m0 for a d of FP8, without residual; but it is {shown(given)}."
    )


def is_float32(value: Any) -> bool:
    """Whether it is a finite number whose magnitude float32 can hold."""
    try:
        return not isinstance(value, (bool, str)) and abs(float(value)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError):
        return False


def given_epilogue(epilogue: Any, alpha: Any = None) -> Epilogue:
    """The epilogue of a call with these arguments. Refuses what is none."""
    if epilogue is None:
        return Epilogue(alpha=alpha)
    if not isinstance(epilogue, Epilogue):
        example = f"deep_gemm.Epilogue(activation={epilogue!r})" if isinstance(epilogue, str) else "deep_gemm.Epilogue"
        raise InvalidInputError(
            f"epilogue must be None or a deep_gemm.Epilogue, but it is {shown(epilogue)}. Pass {example}."
        )
    if alpha is not None:
        raise UnsupportedError(
            "alpha and epilogue cannot both be given. Pass epilogue=deep_gemm.Epilogue(alpha=..., ...)."
        )
    return epilogue
