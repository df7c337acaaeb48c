"""What all products share: their operands, the order of their arguments, and the launch after the operands are in a
layout that kernels read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import Finish, Scalings
from deep_gemm.runtime import engine
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step

from .. import arch, kernels, options
from ..errors import InvalidInputError, UnsupportedError
from ..parts import EIGHT, MATRICES, NO_PARTS, NOT_CAST, PARTS, VECTORS, Parts, by_part
from ..records import record
from ..spec import SCALE_BLOCK, Accumulate, Major, ceil_div
from . import checks, layouts, scales, with_epilogue
from .custom_activation import check_vectors, in_torch
from .epilogue import given_epilogue, is_float32, parts_of
from .layouts import Preparation
from .table import DTYPES, PRODUCTS, TORCH, spec
from .with_epilogue import EPILOGUE_TENSORS

kernels.gemms()  # imported here: every product needs them, and in a first call they would take half of its time

TENSOR, PAIR = "Tensor", "tuple[Tensor, Tensor]"
C = Parameter("c", "Tensor | None", None)
SCALES_OF_D = "the scales of d"
"""What messages call the operand sfd."""
COMPILED_DIMS = Parameter("compiled_dims", "str | None", None)
NO_EPILOGUE = Parameter("epilogue", "Any", None, "must_be_none")
RECIPES = (
    Parameter("recipe", "tuple[int, int, int] | None", None),
    Parameter("recipe_a", "tuple[int, int] | None", None),
    Parameter("recipe_b", "tuple[int, int] | None", None),
)
ALPHA = Parameter("alpha", "float | Tensor | None", None, "redirects")
EPILOGUE = Parameter("epilogue", "Epilogue | None", None, "redirects")
SCALED = (*RECIPES, COMPILED_DIMS, Parameter("disable_ue8m0_cast", "bool", False))
"""The options of FP8 products."""


@record(frozen=True, eq=False)
class GemmOperands:
    """Checked operands of a product ``op``, a name of `PRODUCTS`, by the names in `Gemm.operands`.

    a and b are views with the rows of A and of B, and d, and c if there is one, have one dtype. With groups, b (by M)
    or d (by K) has the group in front; so have a and d of the masked form, and all operands of a batch. ``k`` is the
    sum over all groups along K, and over all products that are summed.
    ``alignment`` is that of groups along M, and ``expected_m`` the expected rows of a group in the masked form.
    """

    op: str
    tensors: Mapping[str, Tensor]
    device: torch.device
    m: int
    n: int
    k: int
    compiled_dims: str
    scaling: Scalings
    accumulate: Accumulate = "none"
    groups: int = 1
    alignment: int = 1
    expected_m: int = 0
    epilogue: Parts = NO_PARTS
    alpha: float = 1.0

    @property
    def plain(self) -> dict[str, Tensor]:
        """The tensors without those of an epilogue, for the reference: b has gate's rows before up's, or one of each in
        turn."""
        found = {name: tensor for name, tensor in self.tensors.items() if name not in EPILOGUE_TENSORS}
        return found | ({"b": halves(found["b"])} if self.epilogue.interleaved == EIGHT else {})

    @property
    def finish(self) -> Finish | None:
        """The epilogue for the reference."""
        if not self.epilogue:
            return None
        more: dict[str, Any] = {name: tensor for name, tensor in self.tensors.items() if name in EPILOGUE_TENSORS}
        vectors = {name: more.pop(name) for name in VECTORS if name in more}
        parts = self.epilogue
        own = None if parts.expression is None else in_torch(parts.expression, vectors)
        more |= {"clamp": parts.clamp, "power_of_two": parts.cast == "ue8m0", "own": own}
        more |= {"interleaved": parts.interleaved == 1}
        return Finish(parts.activation, self.alpha, **more)


def halves(turned: Tensor) -> Tensor:
    """A copy of b (..., N, K), of which `EIGHT` rows are gate's and as many up's in turn, with all of gate's first."""
    both = turned.view(torch.uint8).unflatten(-2, (-1, 2, EIGHT))
    return both.transpose(-4, -3).reshape(turned.shape).view(turned.dtype)


class Gemm(KernelOperation):
    """One product, for all dtypes. ``accumulates``: there is a c. ``epilogue_tensors``: those of its epilogue, names in
    `EPILOGUE_TENSORS`. None: it has no epilogue, and a call that asks for one is redirected to a product that has."""

    output = "d"
    layout = ""
    """The argument with the groups."""
    has_weights = True

    floats = ("alpha",)
    asking: tuple[Parameter, ...] = (ALPHA, EPILOGUE)
    """The parameters of the public function that ask for an epilogue."""

    def __init__(self, name: str, accumulates: bool = False, epilogue_tensors: tuple[str, ...] | None = None) -> None:
        self.name, self.product = name, PRODUCTS[name]
        self.has_epilogue, self.epilogue_tensors = epilogue_tensors is not None, epilogue_tensors or ()
        self.epilogue_parameters = self.asking
        if self.has_epilogue:
            given = Parameter("alpha", "float", 1.0, "internal"), Parameter("epilogue", "str", "none", "internal")
            self.epilogue_parameters = (
                *given,
                *(Parameter(each, TENSOR, use="internal") for each in self.epilogue_tensors),
            )
            self.has_operator = False
        self.is_scaled = self.product.is_scaled
        self.dtype = TORCH[self.product.dtype]
        kind = PAIR if self.is_scaled else TENSOR
        self.options = SCALED if self.is_scaled else (COMPILED_DIMS,)
        self.first = Parameter("a", kind), Parameter("b", kind), Parameter("d", TENSOR)
        names = ("a", "sfa", "b", "sfb") if self.is_scaled else ("a", "b")
        parts = {"a": "a[0]", "sfa": "a[1]", "b": "b[0]", "sfb": "b[1]"} if self.is_scaled else {}
        self.operands = {name: parts.get(name, name) for name in names}
        self.operands |= {"layout": self.layout} if self.layout else {}
        self.operands |= {name: name for name in self.epilogue_tensors}
        self.operands |= {"c": "c", "d": "d"} if accumulates else {"d": "d"}
        self.outputs = ("d", "sfd") if "sfd" in self.epilogue_tensors else ()
        self.in_place = "c" if accumulates else next((name for name in MATRICES if name in self.epilogue_tensors), "")
        self.weights = tuple(name for name in names if "b" in name) if self.has_weights else ()
        self.unsigned = (*(("a", "b") if self.is_scaled else ()), *(("layout",) if self.layout else ()))
        self.unsigned += ("d",) if "sfd" in self.epilogue_tensors else ()

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors by the names that messages use, in the order of `operands`."""
        found: dict[str, Any] = {}
        if isinstance(given["d"], (tuple, list)) and not self.has_epilogue:
            raise InvalidInputError(
                f"d must be a torch.Tensor without an epilogue, but it is {checks.kind_of(given['d'])}. For FP8 values "
                "and their scales pass epilogue=deep_gemm.Epilogue()."
            )
        for name in ("a", "b"):
            if self.is_scaled:
                found[name], found[f"the scales of {name}"] = checks.pair(name, given[name])
            else:
                found[name] = given[name]
        return found | {
            SCALES_OF_D if name == "sfd" else name: given[name]
            for name in (self.layout, *self.epilogue_tensors, "c", "d")
            if name in self.operands.values()
        }

    def check_options(self, given: Mapping[str, Any]) -> tuple[Scalings | None, str]:
        """The scalings that a recipe asks for, if one is given, and the dimensions to compile into the kernel."""
        if not self.is_scaled:
            return None, checks.check_compiled_dims(given["compiled_dims"])
        asked = scales.check_recipe(given["recipe"], given["recipe_a"], given["recipe_b"])
        dims = checks.check_compiled_dims(given["compiled_dims"])
        checks.check_bool("disable_ue8m0_cast", given["disable_ue8m0_cast"])
        return asked, dims

    def redirect(self, arguments: Mapping[str, Any], plain: Callable[..., None]) -> None:
        """A call with an epilogue, by the operation for its tensors."""
        epilogue = given_epilogue(arguments["epilogue"], arguments.get("alpha"))
        is_pair = isinstance(arguments["d"], (tuple, list))
        if epilogue.use_ue8m0 and not is_pair:
            raise InvalidInputError(
                f"use_ue8m0 is for the scales of a d of FP8, but d is {checks.kind_of(arguments['d'])}. Leave it out, "
                "or pass d as a pair of FP8 values and scales."
            )
        text, tensors = epilogue.text, epilogue.tensors
        if text == "none" and not is_pair:
            plain(**{f"{name}_": value for name, value in ({**arguments, "epilogue": None}).items()})
            return
        if is_pair:
            values, scales = checks.pair("d", arguments["d"], "Pass FP8 values and their scales, or one tensor.")
            arguments, tensors = {**arguments, "d": values}, {**tensors, "sfd": scales}
            text = epilogue.fp8_text
        given = {**arguments, "alpha": epilogue.number, "epilogue": text, **tensors}
        may_record = torch.compiler.is_compiling() or type(given["d"]) is not Tensor  # a DTensor is one of others
        if not (may_record and with_epilogue.records(self.name, given)):
            with_epilogue.call(type(self), self.name, given, tuple(tensors))

    def columns(self, named: Mapping[str, Tensor], parts: Parts) -> int:
        """Columns of d: N, or with SwiGLU half of it. Refuses what cannot have a gate."""
        n: int = named["b"].shape[-2]
        if not parts.is_gated:
            return n
        if n % (step := 2 * (parts.interleaved or 1)):
            count = "an even number" if step == 2 else f"a multiple of {step}"
            raise InvalidInputError(
                f"b must have {count} of rows for swiglu, gate's and then as many of up, but N is {n}."
            )
        if "c" in named:
            raise UnsupportedError(
                "c and swiglu cannot be combined: c would have gate's and up's columns, and d has half of them. Add "
                "before the call, or without activation."
            )
        return n // 2

    def epilogue_of(self, given: Mapping[str, Any]) -> Parts:
        """The parts of the call's epilogue. Refuses a text that is none, and tensors or an alpha that do not fit it: a
        kernel reads what the text says."""
        text, alpha = given.get("epilogue", "none"), given.get("alpha", 1.0)
        parts = NO_PARTS if text == "none" else parts_of(text)
        if why := parts.refusal(groups=bool(self.layout)):
            raise UnsupportedError(why)
        tensors = parts.tensors
        for name in EPILOGUE_TENSORS:
            if (name in tensors) != (name in self.epilogue_tensors):
                has, what = ("has", "must be given") if name in tensors else ("has no", "must be None")
                raise InvalidInputError(f"{name} {what}: the epilogue is {checks.shown(text)}, which {has} {name}.")
        if not is_float32(alpha) or (alpha != 1 and not parts.alpha):
            raise InvalidInputError(
                f"alpha must be {'a finite float32 number' if parts.alpha else '1.0'}, as the epilogue is "
                f"{checks.shown(text)}, but it is {checks.shown(alpha)}. A text with an alpha begins with it: alpha+..."
            )
        return parts

    def check_epilogue_tensors(self, named: Mapping[str, Any], parts: Parts) -> None:
        """Check the tensors of an epilogue against the shape of d."""
        if not self.epilogue_tensors:
            return
        *groups, m, columns = named["d"].shape
        n = named["b"].shape[-2]
        shapes = by_part((*groups, m), (*named["b"].shape[:-2], n), tuple(named["d"].shape))
        if "sfd" in self.epilogue_tensors:
            self._check_cast(named, (*groups, m, ceil_div(columns, SCALE_BLOCK)))
        if parts.expression is not None:
            check_vectors(parts.expression, named, m, n)
        for part in (each for each in PARTS if each.name in self.epilogue_tensors):
            name, x, wanted, dtype = part.name, named[part.name], shapes[part.name], named["d"].dtype
            given = part.given(DTYPES.get(x.dtype, ""))
            if part.dtypes and (given != getattr(parts, name) or DTYPES.get(x.dtype) not in part.dtypes):
                known = [TORCH[each] for each in part.dtypes if part.given(each) == getattr(parts, name)]
                raise InvalidInputError(
                    f"{name} must be {known[0]}, as the epilogue {str(parts)!r} says, but it is {x.dtype}."
                )
            if tuple(x.shape) != wanted and not (part.axes == "m" and x.numel() == 1):
                raise InvalidInputError(
                    f"{name} of the epilogue must have the shape {wanted}, but it has {checks.shape_of(x)}."
                )
            if part.axes == "n" and n > 1 and x.stride(-1) != 1:
                raise InvalidInputError(
                    f"{name} of the epilogue must be contiguous, but its strides are {x.stride()}. Pass "
                    f"{name}.contiguous()."
                )
            if not part.dtypes and x.dtype != dtype:
                raise InvalidInputError(
                    f"{name} of the epilogue must have d's dtype, {dtype}, but it is {x.dtype}. Pass "
                    f"{name}.to({dtype})."
                )

    def _check_cast(self, named: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Check a d of FP8 and its scales."""
        if "c" in named:
            raise UnsupportedError(NOT_CAST.format("c"))
        d, sf = named["d"], named[SCALES_OF_D]
        if d.dtype != torch.float8_e4m3fn:
            raise InvalidInputError(f"the values of d must be torch.float8_e4m3fn, but they are {d.dtype}.")
        if sf.dtype != torch.float32 or tuple(sf.shape) != shape:
            raise InvalidInputError(
                f"{SCALES_OF_D} must be torch.float32 {shape}, one for each row and {SCALE_BLOCK} columns, but they "
                f"are {sf.dtype} {checks.shape_of(sf)}."
            )

    def called(self, form: str = "nt") -> str:
        """The name by which callers know this product in ``form``, for messages."""
        return self.name.replace("_nt", f"_{form}")

    def check_dtype(self, name: str, x: Tensor, called: str, instead: str) -> None:
        """Refuse 16-bit values of another dtype."""
        if x.dtype != self.dtype:
            raise InvalidInputError(f"{name} of {called} must be {self.dtype}, but it is {x.dtype}.{instead}")

    @abstractmethod
    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """Add a and b, and their scales. Returns the dimensions that are contiguous in a and b."""

    def place_outputs(self, prepared: Preparation, x: GemmOperands) -> bool:
        """Add c and d. Returns whether TMA can write them."""
        outputs = {name: layouts.flat(x.tensors[name]) for name in ("c", *MATRICES, "d") if name in x.tensors}
        for name, tensor in outputs.items():
            row = layouts.row_stride(tensor)
            prepared.strides[name] = (x.m * row, row, 1) if self.product.grouping == "k" else (row, 1)
        return all(map(layouts.tma_writable, outputs.values()))

    def launches(self, x: GemmOperands, device: int) -> LaunchSequence:
        """The GEMM, after the launches that prepare its operands; and its cast, if that is a launch of its own."""
        prepared = Preparation({name: name for name in x.tensors})
        for part in PARTS:
            if part.name in x.tensors and part.axes != "mn":
                own = x.tensors[part.name]
                prepared.strides[part.name] = own.stride() if part.axes == "n" else (_step(own),)
        if x.epilogue:
            prepared.numbers["alpha"] = x.alpha
        if "sfd" in x.tensors:
            *group, row, block = x.tensors["sfd"].stride()
            prepared.strides["sfd"] = (*(each - x.m * row for each in group), row, block)
        majors = self.place(prepared, x)
        aligned = self.place_outputs(prepared, x)
        asked = spec(
            x.m,
            x.n,
            x.k,
            options.num_sms_for(device),
            x.op,
            options.whole_gpu(device),
            groups=x.groups,
            alignment=x.alignment,
            expected_m=x.expected_m,
            scaling=x.scaling,
            majors=majors,
            dtypes=(DTYPES[x.tensors["a"].dtype], DTYPES[x.tensors["b"].dtype]),
            output=DTYPES[x.tensors["d"].dtype],
            accumulate=x.accumulate,
            epilogue=x.epilogue,
            aligned=aligned,
            compiled_dims=x.compiled_dims,
        )
        if size := kernels.memory_bytes(asked, arch.for_device(device)):
            prepared.scratch["memory"] = ((size,), torch.uint8)
            prepared.operands["memory"] = "memory"
        product, cast = engine.launches(asked, device)
        after = () if cast is None else (prepared.add_cast_of_product(cast),)
        step = Step(product, prepared.strides, prepared.operands, prepared.numbers)
        return LaunchSequence((*prepared.steps, step, *after), prepared.scratch)


def _step(x: Tensor) -> int:
    """Elements from one row's to the next: zero if all rows share one."""
    return 0 if x.numel() == 1 else x.stride(-1)
