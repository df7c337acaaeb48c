"""What is timed for the record: our call, the vendor's library and DeepGEMM, on the same operands, all of them those of
`deep_gemm.backends`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import ops
from deep_gemm.aot.layers import FP8_OPS
from deep_gemm.aot.workload import GemmShape
from deep_gemm.backends import deepgemm, get_kernel, get_operation
from deep_gemm.backends.operations import RECIPES
from deep_gemm.bench.shapes import Problem
from deep_gemm.errors import DeepGemmError
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.layouts import TMA_BYTES
from deep_gemm.runtime.calls import KernelOperation, Step
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import calc_diff, timing

Call = Callable[[], Any]


@dataclass
class Operands:
    """One set of tensors: activations `a`, weights `b`, the result `d`, and for FP8 the scales."""

    shape: GemmShape
    a: Tensor
    b: Tensor
    d: Tensor
    sfa: Tensor | None = None
    sfb: Tensor | None = None

    @property
    def accumulate(self) -> bool:
        """Whether the product is added to `d`."""
        return Problem.of(self.shape).accumulate or self.shape.op == ops.WGRAD

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that a model keeps, by field."""
        return {"b": self.b} | ({} if self.sfb is None else {"sfb": self.sfb})

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operation's function; if the product is added to `d`, that is also c."""
        a, b = (self.a, self.b) if self.sfa is None else ((self.a, self.sfa), (self.b, self.sfb))
        return (a, b, self.d, self.d) if self.accumulate else (a, b, self.d)

    def checked(self) -> tuple[KernelOperation, Any]:
        """The operation, and its checked operands."""
        op = self.shape.op
        operation = Dense(ops.DEFAULT if op in FP8_OPS else _nt(op), self.accumulate)
        named = {"recipe": RECIPES.get(op)} if op in FP8_OPS else {"form": op[-2:]}
        return operation, operation.check(*self.arguments, **named)


def _nt(op: str) -> str:
    """The name in `ops.PRODUCTS` of an operation of 16 bits, the same for every form."""
    return f"{op[:-2]}nt"


def spec_of(shape: GemmShape, num_sms: int) -> GemmSpec:
    """The spec of a call with fresh tensors of this shape."""
    one, op = Problem.of(shape), shape.op
    if op in FP8_OPS:
        return ops.spec(one.m, one.n, one.k, num_sms, op)
    majors = "mn" if op[-2] == "t" else "k", "mn" if op[-1] == "n" else "k"
    more: dict[str, Any] = {"majors": majors, "output": one.output or None}
    more["accumulate"] = "in place" if one.accumulate else "none"
    return ops.spec(one.m, one.n, one.k, num_sms, _nt(op), **more)


def element_bytes(shape: GemmShape) -> int:
    """Bytes of an element of the operands."""
    return 1 if shape.op in FP8_OPS else 2


def make_operands(shape: GemmShape, sets: int, device: str = "cuda") -> list[Operands]:
    """Random normal data; zeros would run faster. The sets share the activations and have weights and outputs of their
    own, as the layers of a model do. Where a product is added to `d`, that begins as zeros."""
    one, gemm, made = Problem.of(shape), get_operation(shape.op), []  # type: tuple[Problem, Any, list[Operands]]
    for seed in range(sets):
        a, b, d = gemm.make((one.m, one.n, one.k), torch.device(device), seed)
        d = torch.zeros_like(d, dtype=torch.float32 if one.output else d.dtype)
        if shape.op in FP8_OPS:
            made.append(Operands(shape, a[0], b[0], d, a[1], b[1]))
        else:
            made.append(Operands(shape, a, b, d))
    return [replace(x, a=made[0].a, sfa=made[0].sfa) for x in made]


MAX_SETS, STEADY_SETS = 256, 4


def sets_for(shape: GemmShape, mode: str) -> int:
    """How many sets a mode uses in turn. Tiny weights would need thousands of sets to leave the L2; in a real model
    they stay in it, too."""
    graph = min(MAX_SETS, max(2, -(-timing.GRAPH_WEIGHT_BYTES // (shape.n * shape.k * element_bytes(shape)))))
    return {"flush": 1, "steady": STEADY_SETS}.get(mode, graph)


def addressable(shape: GemmShape) -> bool:
    """Whether TMA can read fresh operands of this shape without a copy."""
    asked = spec_of(shape, 1)
    inner = (shape.m if asked.a.major == "mn" else shape.k, shape.n if asked.b.major == "mn" else shape.k)
    return all(elements * element_bytes(shape) % TMA_BYTES == 0 for elements in inner)


def placed(x: Operands, device: int, memory: dict[str, Tensor]) -> tuple[Step, Mapping[str, int]]:
    """The launch of a call's GEMM, and the addresses of its operands. Scratch memory that it needs is taken from
    ``memory`` by name, and added there if it is not; the caller keeps it alive."""
    operation, checked = x.checked()
    sequence = operation.launches(checked, device)
    step = sequence.steps[-1]
    for name in step.operands.values():
        if name not in checked.tensors and name not in memory:
            shape, dtype = sequence.scratch[name]
            memory[name] = torch.empty(shape, dtype=dtype, device=x.d.device)
    tensors = {**memory, **checked.tensors}
    return step, {name: tensors[given].data_ptr() for name, given in step.operands.items()}


def through(name: str) -> Callable[[Operands], Call]:
    """The call of a backend of `deep_gemm.backends`, with what a model does once done before it."""
    return lambda x: get_kernel(name, x.shape.op).prepare(*x.arguments)


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
    """`ours` on weights that are declared constant before the first call. `retract` takes it back."""
    if x.b.is_cuda:
        torch.cuda.synchronize(x.b.device)  # the promise: nothing that still runs writes them
    deep_gemm.declare_constant(*x.weights.values())
    return ours(x)


def retract(x: Operands) -> None:
    """Take back the promise of `ours_promised`, if it was given."""
    deep_gemm.retract_constant(*x.weights.values())


def own_weights(x: Operands) -> Operands:
    """The same problem with weights and output at other addresses, without a promise."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in x.weights.items()}
    return replace(x, d=torch.zeros_like(x.d), **copies)


def names_for(shape: GemmShape) -> tuple[str, ...]:
    """All backends of a shape's operation, ours first."""
    peers = ("tensorwise", "blockwise") if shape.op in (ops.DEFAULT, ops.WGRAD) else ("cublaslt",)
    return ("ours", *peers, *(name for name in (DEEPGEMM,) if name in BACKENDS))


def add_deepgemm(library: Any) -> dict[str, str]:
    """Make the module of DeepGEMM one of `BACKENDS`. Returns what rows say of it."""
    BACKENDS[DEEPGEMM] = through(DEEPGEMM)
    return {DEEPGEMM: deepgemm.use(library)}


def usable(name: str, x: Operands) -> str | None:
    """Why a backend cannot run this problem, in its own words, or None. Runs it once, and compares the result with
    ours, so that a misread scale layout is not taken for a fast kernel."""
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
