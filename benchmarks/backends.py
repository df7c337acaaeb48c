"""The backends that are compared on the same operands: our call, the vendor's library through torch, and DeepGEMM.

Everything that depends on the operation is here, in the class of its operands: other benchmarks name no operation.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import ops
from deep_gemm.aot.workload import GemmShape
from deep_gemm.benchmarks import timing
from deep_gemm.benchmarks.shapes import Problem
from deep_gemm.calls import Operation
from deep_gemm.errors import DeepGemmError
from deep_gemm.kernels.base import Strides
from deep_gemm.ops import fp8_dense, half_dense
from deep_gemm.ops.checks import TMA_BYTES
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import calc_diff, random_operands

Call = Callable[[], Any]


@dataclass
class FP8Operands:
    """`a` (m, k), `b` (n, k): E4M3; `sfa` (m, k/128) MN-major, `sfb` (n/128, k/128): float32; `d` (m, n): bf16."""

    peers = ("tensorwise", "blockwise")
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
        return (operation := fp8_dense.FP8GemmNT()), operation.check(*self.arguments)


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
        """As `FP8Operands.spec`."""
        one, form = Problem.of(shape), shape.op[-2:]
        return half_dense.spec(
            _nt(shape.op),
            shape.m,
            shape.n,
            shape.k,
            num_sms,
            majors=("mn" if form[0] == "t" else "k", "mn" if form[1] == "n" else "k"),
            wide=one.output == "f32",
            accumulate="in place" if one.accumulate else "none",
        )

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[HalfOperands]:
        """Normal data; with `accumulate`, `d` begins as zeros."""
        one, op = Problem.of(shape), shape.op
        dtype = half_dense.HalfGemm(_nt(op), one.accumulate).dtype
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
        """As `FP8Operands.weights`."""
        return {"b": self.b}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `FP8Operands.arguments`; with `accumulate`, `d` is also c."""
        return (self.a, self.b, self.d, self.d) if self.accumulate else (self.a, self.b, self.d)

    def checked(self) -> tuple[Operation, Any]:
        """As `FP8Operands.checked`."""
        operation = half_dense.HalfGemm(_nt(self.op), self.accumulate)
        return operation, operation.check(*self.arguments, "", self.op[-2:])


Operands = FP8Operands | HalfOperands
"""One set of an operation's tensors. `a` are activations, `b` weights, and `d` is written; `peers` are the backends
that ours is compared with, besides DeepGEMM."""


def _nt(op: str) -> str:
    """The operation's name in `half_dense`, the same for every form."""
    return f"{op[:-2]}nt"


def of(shape: GemmShape) -> type[FP8Operands] | type[HalfOperands]:
    """The class of a shape's operands."""
    return FP8Operands if shape.op == ops.DEFAULT else HalfOperands


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


def call(x: Operands, library: Any) -> Call:
    """A call of the operation's public function in `library`."""
    return functools.partial(getattr(library, x.op), *x.arguments)


def ours(x: Operands) -> Call:
    """The operation's public function."""
    return call(x, deep_gemm)


def ours_promised(x: Operands) -> Call:
    """`ours` with a weight promise, given before the first call.

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


def tensorwise(x: FP8Operands) -> Call:
    """cuBLASLt with one scale a tensor and fast accumulation: an easier problem, without promotion."""
    one = torch.ones((), dtype=torch.float32, device=x.a.device)
    weights = x.b.t()
    return lambda: torch._scaled_mm(
        x.a, weights, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True, out=x.d
    )


def blockwise(x: FP8Operands) -> Call:
    """cuBLASLt with the same 1x128 and 128x128 scales, in its own layouts: the same problem as ours."""
    from torch.nn.functional import ScalingType, pad, scaled_mm

    weights = x.b.t()
    sfa = x.sfa.t().contiguous().t()
    sfb = pad(x.sfb, (0, -x.sfb.shape[1] % 4)).t()
    recipe_a, recipe_b = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(x.a, weights, sfa, recipe_a, sfb, recipe_b, output_dtype=torch.bfloat16)


def cublaslt(x: HalfOperands) -> Call:
    """cuBLAS through torch, which writes `d` itself: the same problem as ours."""
    a, b = (x.a.t() if x.op[-2] == "t" else x.a), (x.b if x.op[-1] == "n" else x.b.t())
    wide: dict[str, Any] = {} if x.d.dtype == x.a.dtype else {"out_dtype": x.d.dtype}
    if x.accumulate:
        return lambda: torch.addmm(x.d, a, b, out=x.d, **wide)
    return lambda: torch.mm(a, b, out=x.d, **wide)


BACKENDS: dict[str, Callable[[Any], Call]] = {
    "ours": ours,
    "tensorwise": tensorwise,
    "blockwise": blockwise,
    "cublaslt": cublaslt,
}

DEEPGEMM = "deepgemm"
EASIER = ("tensorwise",)
"""Backends that solve another problem, so that their results differ."""


def names_for(shape: GemmShape) -> tuple[str, ...]:
    """All backends of a shape's operation, ours first."""
    return ("ours", *of(shape).peers, *(name for name in (DEEPGEMM,) if name in BACKENDS))


def add_deepgemm(library: Any) -> dict[str, str]:
    """Add the module of DeepGEMM to `BACKENDS`: the same problem and the same call as ours. It compiles a kernel for a
    shape in seconds, at the first call. Returns the fields that rows get."""
    BACKENDS[DEEPGEMM] = lambda x: call(x, library)
    return {DEEPGEMM: getattr(library, "__version__", "of no known version")}


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
