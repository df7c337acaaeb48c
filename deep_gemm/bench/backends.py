"""What is timed for the record: our call, the vendor's library and DeepGEMM, on the same operands.

The backends are those of `deep_gemm.backends`. The class of an operation's operands
has all that this package must know about it; no other module here names an operation.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import ops
from deep_gemm.aot.workload import GemmShape
from deep_gemm.backends import deepgemm, get_kernel
from deep_gemm.backends.operations import RowwiseGemm, ScaledGemm, WeightGradient
from deep_gemm.bench.shapes import Problem
from deep_gemm.errors import DeepGemmError
from deep_gemm.kernels.base import Strides
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.layouts import TMA_BYTES
from deep_gemm.ops.table import FP8
from deep_gemm.runtime.calls import Operation
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import calc_diff, random_operands, timing

Call = Callable[[], Any]


@dataclass
class FP8Operands:
    """`a` (m, k), `b` (n, k): E4M3; `sfa` (m, k/128) MN-major, `sfb` (n/128, k/128): float32; `d` (m, n): bf16."""

    peers: ClassVar[tuple[str, ...]] = ("tensorwise", "blockwise")
    element_bytes = 1
    op = ops.DEFAULT
    accumulate = False

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor

    @staticmethod
    def spec(shape: GemmShape, num_sms: int) -> GemmSpec:
        """The spec of a call with fresh tensors of this shape."""
        return ops.spec(shape.m, shape.n, shape.k, num_sms, shape.op)

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[FP8Operands]:
        """Normal data through the real 1x128 and 128x128 quantisation."""
        (a, sfa), _, _, _ = random_operands(shape.m, 1, shape.k, device)
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
        out = []
        for index in range(sets):
            _, (b, sfb), _, _ = random_operands(1, shape.n, shape.k, device, seed=index)
            out.append(cls(a, sfa, b, sfb, torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device=device)))
        return out

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that a model keeps, by field."""
        return {"b": self.b, "sfb": self.sfb}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operation's function."""
        return (self.a, self.sfa), (self.b, self.sfb), self.d

    def checked(self) -> tuple[Operation, Any]:
        """The operation, and its checked operands."""
        return (operation := Dense(FP8)), operation.check(*self.arguments)


@dataclass
class GradientOperands(FP8Operands):
    """The same with scales of 1 x 128 on both sides, both MN-major, added to a float32 `d`."""

    op = ops.WGRAD
    accumulate = True

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[FP8Operands]:
        """Normal data through the real quantisation; `d` begins as zeros."""
        return _cast_operands(cls, WeightGradient(), shape, sets, device)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operation's function; `d` is also c."""
        return (self.a, self.sfa), (self.b, self.sfb), self.d, self.d

    def checked(self) -> tuple[Operation, Any]:
        operation = Dense(FP8, accumulates=True)
        return operation, operation.check(*self.arguments, WeightGradient.recipe)


@dataclass
class RowwiseOperands(FP8Operands):
    """The same with one scale for each row of `a` and of `b`."""

    peers = ("cublaslt",)
    op = ops.ROWWISE

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[FP8Operands]:
        """Normal data, cast."""
        return _cast_operands(cls, RowwiseGemm(), shape, sets, device)


def _cast_operands(
    cls: type[FP8Operands], gemm: ScaledGemm, shape: GemmShape, sets: int, device: str
) -> list[FP8Operands]:
    """Sets that share a. ``d`` is zeros."""
    place, found = torch.device(device), []
    a, _, _ = gemm.make((shape.m, 1, shape.k), place)
    for index in range(sets):
        _, b, _ = gemm.make((1, shape.n, shape.k), place, seed=index + 1)
        found.append(cls(a[0], a[1], b[0], b[1], torch.zeros(shape.m, shape.n, dtype=gemm.out, device=place)))
    return found


@dataclass
class HalfOperands:
    """`a` and `b` are stored as the form of `op` says: "tn" means (k, m) and (k, n). With `accumulate` the product is
    added to `d`."""

    peers = ("cublaslt",)
    element_bytes = 2

    op: str
    a: Tensor
    b: Tensor
    d: Tensor
    accumulate: bool

    @staticmethod
    def spec(shape: GemmShape, num_sms: int) -> GemmSpec:
        one, form = Problem.of(shape), shape.op[-2:]
        return ops.spec(
            shape.m,
            shape.n,
            shape.k,
            num_sms,
            _nt(shape.op),
            majors=("mn" if form[0] == "t" else "k", "mn" if form[1] == "n" else "k"),
            output="f32" if one.output == "f32" else None,
            accumulate="in place" if one.accumulate else "none",
        )

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[HalfOperands]:
        """Normal data; with `accumulate`, `d` begins as zeros."""
        one, op = Problem.of(shape), shape.op
        dtype = Dense(_nt(op)).dtype
        wide = torch.float32 if one.output == "f32" else dtype
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device, generator=generator)

        a, b = (one.k, one.m) if op[-2] == "t" else (one.m, one.k), (one.k, one.n) if op[-1] == "n" else (one.n, one.k)
        tokens, size = normal(*a), (one.m, one.n)
        return [
            cls(op, tokens, normal(*b), torch.zeros(size, dtype=wide, device=device), one.accumulate)
            for _ in range(sets)
        ]

    @property
    def weights(self) -> dict[str, Tensor]:
        return {"b": self.b}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `FP8Operands.arguments`; with `accumulate`, `d` is also c."""
        return (self.a, self.b, self.d, self.d) if self.accumulate else (self.a, self.b, self.d)

    def checked(self) -> tuple[Operation, Any]:
        operation = Dense(_nt(self.op), self.accumulate)
        return operation, operation.check(*self.arguments, form=self.op[-2:])


Operands = FP8Operands | HalfOperands
"""One set of an operation's tensors. `a` are activations, `b` weights, and `d` is written; `peers` are the backends
that ours is compared with, besides DeepGEMM."""


def _nt(op: str) -> str:
    """The operation's name in `ops.PRODUCTS`, the same for every form."""
    return f"{op[:-2]}nt"


def of(shape: GemmShape) -> type[FP8Operands] | type[HalfOperands]:
    """The class of a shape's operands."""
    fp8 = {one.op: one for one in (FP8Operands, GradientOperands, RowwiseOperands)}
    return fp8.get(shape.op, HalfOperands)


def make_operands(shape: GemmShape, sets: int, device: str = "cuda") -> list[Any]:
    """Random normal data; zeros would run faster than any user's data.

    The sets share the activations and have weights and outputs of their own, as the layers of a model do.
    """
    return of(shape).make(shape, sets, device)


MAX_SETS, STEADY_SETS = 256, 4


def sets_for(shape: GemmShape, mode: str) -> int:
    """How many sets a mode uses in turn. Tiny weights would need thousands of sets to leave the L2; in a real model
    they stay in it, too."""
    size = shape.n * shape.k * of(shape).element_bytes
    graph = min(MAX_SETS, max(2, -(-timing.GRAPH_WEIGHT_BYTES // size)))
    return {"flush": 1, "steady": STEADY_SETS}.get(mode, graph)


def addressable(shape: GemmShape) -> bool:
    """Whether TMA can read fresh operands of this shape without a copy."""
    asked, size = of(shape).spec(shape, 1), of(shape).element_bytes
    inner = (shape.m if asked.a.major == "mn" else shape.k, shape.n if asked.b.major == "mn" else shape.k)
    return all(elements * size % TMA_BYTES == 0 for elements in inner)


def placed(x: Operands, device: int) -> tuple[Strides, Mapping[str, int]]:
    """Strides and addresses with which a call launches its GEMM."""
    operation, checked = x.checked()
    step = operation.work(checked, device).steps[-1]
    return step.strides, {name: checked.tensors[given].data_ptr() for name, given in step.operands.items()}


def through(name: str) -> Callable[[Any], Call]:
    """The call of a backend of `deep_gemm.backends`, with what a model does once done before it."""

    def prepare(x: Operands) -> Call:
        return get_kernel(name, x.op).prepare(*x.arguments)

    return prepare


ours = through("cuda")
"""The operation's public function."""
cublaslt = blockwise = through("cublaslt")
"""Our problem: 16 bits, into `d` itself, and FP8 with the same scales, which returns its result."""
tensorwise = through("cublaslt:tensorwise")
"""The easier problem: one scale a tensor."""
DEEPGEMM = "deepgemm"
BACKENDS: dict[str, Callable[[Any], Call]] = {
    "ours": ours,
    "tensorwise": tensorwise,
    "blockwise": blockwise,
    "cublaslt": cublaslt,
}
"""The backends by their names in rows. `add_deepgemm` adds DeepGEMM."""
EASIER = ("tensorwise",)
"""Backends whose results are not ours."""


def ours_promised(x: Operands) -> Call:
    """`ours` on weights that are declared constant before the first call.

    Take it back with `retract` after the timing.
    """
    if x.b.is_cuda:
        torch.cuda.synchronize(x.b.device)  # the promise: nothing that still runs writes them
    deep_gemm.declare_constant(*x.weights.values())
    return ours(x)


def retract(x: Operands) -> None:
    """Take back the promise of `ours_promised`, if it was given."""
    deep_gemm.retract_constant(*x.weights.values())


def own_weights(x: Any) -> Any:
    """The same problem with weights and output at other addresses, without a promise."""
    return replace(x, d=torch.zeros_like(x.d), **{name: tensor.clone() for name, tensor in x.weights.items()})


def names_for(shape: GemmShape) -> tuple[str, ...]:
    """All backends of a shape's operation, ours first."""
    return ("ours", *of(shape).peers, *(name for name in (DEEPGEMM,) if name in BACKENDS))


def add_deepgemm(library: Any) -> dict[str, str]:
    """Make the module of DeepGEMM one of `BACKENDS`. Returns what rows say of it."""
    BACKENDS[DEEPGEMM] = through(DEEPGEMM)
    return {DEEPGEMM: deepgemm.use(library)}


def usable(name: str, x: Operands) -> str | None:
    """Why a backend cannot run this problem, in its own words, or None. Runs it once.

    The result of a backend that solves the same problem is compared with ours, so that a misread scale layout is not
    taken for a fast kernel.
    """
    if name == "ours":
        BACKENDS[name](x)()  # our own errors are raised
        return None
    begin = 0.0 if x.accumulate else float("nan")  # NaN shows elements that are not written
    x.d.fill_(begin)
    try:
        result = BACKENDS[name](x)()
        torch.cuda.synchronize()
    except DeepGemmError:
        raise
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        return textwrap.shorten(str(error), 100) or type(error).__name__
    if name not in EASIER:
        theirs = (x.d if result is None else result).clone()  # a copy, since ours may be written there
        x.d.fill_(begin)
        ours(x)()
        difference = float(calc_diff(theirs, x.d))
        if not difference < 1e-3:
            return f"its result differs from ours by {difference:.1e}"
    return None
