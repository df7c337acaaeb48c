"""What is compared: our call, the vendor's library through torch, and DeepGEMM, on the same operands.

What is to be said of an operation is said here, by the class of its operands: nothing else that times it names one.
"""

from __future__ import annotations

import functools
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import calc_diff, random_operands

Call = Callable[[], Any]


class Operands(ABC):
    """One set of an operation's tensors. `a` are activations, `b` weights, and `d` is written."""

    peers: ClassVar[tuple[str, ...]]
    """The backends that ours is compared with, besides DeepGEMM."""
    weight_bytes: ClassVar[int]
    """Of an element of `b`."""
    accumulate: bool = False
    """Whether the product is added to `d`."""
    a: Tensor
    b: Tensor
    d: Tensor

    @staticmethod
    @abstractmethod
    def spec(shape: GemmShape, num_sms: int) -> GemmSpec:
        """What a call with fresh tensors of this shape asks for."""

    @classmethod
    @abstractmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[Any]:
        """See `make_operands`."""

    @property
    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """What a model keeps, by field."""

    @abstractmethod
    def call(self, library: Any) -> Call:
        """The operation's function in a module of our interface."""

    @abstractmethod
    def asked(self) -> tuple[Operation, tuple[Any, ...]]:
        """The operation, and the arguments of its check."""

    @staticmethod
    def addressable(shape: GemmShape) -> bool:
        """Whether TMA can read fresh tensors of this shape, so that none is copied."""
        return True


@dataclass
class FP8Operands(Operands):
    """`a` (m, k), `b` (n, k): E4M3; `sfa` (m, k/128) MN-major, `sfb` (n/128, k/128): float32; `d` (m, n): bf16."""

    peers = ("tensorwise", "blockwise")
    weight_bytes = 1

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor

    @staticmethod
    def spec(shape: GemmShape, num_sms: int) -> GemmSpec:
        return ops.spec(shape.m, shape.n, shape.k, num_sms, shape.op)

    @classmethod
    def make(cls, shape: GemmShape, sets: int, device: str) -> list[FP8Operands]:
        """Through the real 1x128 and 128x128 quantisation."""
        (a, sfa), _, _, _ = random_operands(shape.m, 1, shape.k, device)
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
        out = []
        for index in range(sets):
            _, (b, sfb), _, _ = random_operands(1, shape.n, shape.k, device, seed=index)
            out.append(cls(a, sfa, b, sfb, torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device=device)))
        return out

    @property
    def weights(self) -> dict[str, Tensor]:
        return {"b": self.b, "sfb": self.sfb}

    def call(self, library: Any) -> Call:
        """With the scales ready."""
        return functools.partial(library.fp8_gemm_nt, (self.a, self.sfa), (self.b, self.sfb), self.d)

    def asked(self) -> tuple[Operation, tuple[Any, ...]]:
        return fp8_dense.FP8GemmNT(), ((self.a, self.sfa), (self.b, self.sfb), self.d)


@dataclass
class HalfOperands(Operands):
    """`a` and `b` lie as the form of `op` says, "tn" for (k, m) and (k, n)."""

    peers = ("cublaslt",)
    weight_bytes = 2

    op: str
    a: Tensor
    b: Tensor
    d: Tensor
    accumulate: bool = False

    @staticmethod
    def spec(shape: GemmShape, num_sms: int) -> GemmSpec:
        name, form, one = _nt(shape.op), shape.op[-2:], Problem.of(shape)
        return half_dense.spec(
            name,
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
        """What is added to begins as zeros."""
        form, one = shape.op[-2:], Problem.of(shape)
        dtype = half_dense.HalfGemm(_nt(shape.op), one.accumulate).dtype
        generator = torch.Generator(device).manual_seed(0)

        def normal(rows: int, turned: bool) -> Tensor:
            size = (shape.k, rows) if turned else (rows, shape.k)
            return torch.randn(size, dtype=dtype, device=device, generator=generator)

        a, wide = normal(shape.m, form[0] == "t"), torch.float32 if one.output == "f32" else dtype
        return [
            cls(
                shape.op,
                a,
                normal(shape.n, form[1] == "n"),
                torch.zeros(shape.m, shape.n, dtype=wide, device=device),
                one.accumulate,
            )
            for _ in range(sets)
        ]

    @property
    def weights(self) -> dict[str, Tensor]:
        return {"b": self.b}

    @property
    def _given(self) -> tuple[Tensor, ...]:
        return (self.a, self.b, self.d, self.d) if self.accumulate else (self.a, self.b, self.d)

    def call(self, library: Any) -> Call:
        """With `d` as c where it is added to."""
        return functools.partial(getattr(library, self.op), *self._given)

    def asked(self) -> tuple[Operation, tuple[Any, ...]]:
        return half_dense.HalfGemm(_nt(self.op), self.accumulate), (*self._given, "", self.op[-2:])

    @staticmethod
    def addressable(shape: GemmShape) -> bool:
        inner = (shape.m if shape.op[-2] == "t" else shape.k, shape.n if shape.op[-1] == "n" else shape.k)
        return all(size % half_dense.PIECE == 0 for size in inner)


def _nt(op: str) -> str:
    """What `half_dense` calls it in every form."""
    return f"{op[:-2]}nt"


def of(shape: GemmShape) -> type[Operands]:
    """The class of a shape's operands."""
    return FP8Operands if shape.op == ops.DEFAULT else HalfOperands


def make_operands(shape: GemmShape, sets: int, device: str = "cuda") -> list[Any]:
    """Random normal data; zeros would run faster than any user's data.

    The sets share the activations and have weights and outputs of their own, as the layers of a model do.
    """
    return of(shape).make(shape, sets, device)


MAX_SETS, STEADY_SETS = 256, 4


def sets_for(shape: GemmShape, mode: str) -> int:
    """How many sets are taken in turn in a mode. Tiny weights would need thousands of them to leave the L2; a real
    model's would not leave it either."""
    size = shape.n * shape.k * of(shape).weight_bytes
    graph = min(MAX_SETS, max(2, -(-timing.GRAPH_WEIGHT_BYTES // size)))
    return {"flush": 1, "steady": STEADY_SETS}.get(mode, graph)


def placed(x: Operands, device: int) -> tuple[Strides, Mapping[str, int]]:
    """Strides and addresses with which a call launches its GEMM."""
    operation, arguments = x.asked()
    checked = operation.check(*arguments)
    step = operation.work(checked, device).steps[-1]
    return step.strides, {name: checked.tensors[given].data_ptr() for name, given in step.operands.items()}


def ours(x: Operands) -> Call:
    """The operation's public function."""
    return x.call(deep_gemm)


def ours_promised(x: Operands) -> Call:
    """`ours` after the promise that nobody writes the weights and their scales again, given before the first call.

    Give it back with `retract` once all has been timed: a later tensor at the same address has promised nothing.
    """
    if x.b.is_cuda:
        torch.cuda.synchronize(x.b.device)  # the promise is that nothing that still runs writes them
    deep_gemm.declare_constant(*x.weights.values())
    return ours(x)


def retract(x: Operands) -> None:
    """Take back the promise of `ours_promised`, if it was given."""
    deep_gemm.retract_constant(*x.weights.values())


def own_weights(x: Any) -> Any:
    """The same problem with weights and output at other addresses, of which nothing is promised."""
    return replace(x, d=torch.zeros_like(x.d), **{name: tensor.clone() for name, tensor in x.weights.items()})


def tensorwise(x: FP8Operands) -> Call:
    """cuBLASLt with one scale a tensor and fast accumulation: the easier problem, since it promotes nothing."""
    one = torch.ones((), dtype=torch.float32, device=x.a.device)
    weights = x.b.t()
    return lambda: torch._scaled_mm(
        x.a, weights, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True, out=x.d
    )


def blockwise(x: FP8Operands) -> Call:
    """cuBLASLt with the same 1x128 and 128x128 scales: our problem. It wants other layouts of them."""
    from torch.nn.functional import ScalingType, pad, scaled_mm

    weights = x.b.t()
    sfa = x.sfa.t().contiguous().t()
    sfb = pad(x.sfb, (0, -x.sfb.shape[1] % 4)).t()
    recipe_a, recipe_b = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(x.a, weights, sfa, recipe_a, sfb, recipe_b, output_dtype=torch.bfloat16)


def cublaslt(x: HalfOperands) -> Call:
    """cuBLAS through torch, into `d` itself: our problem."""
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
"""Backends whose results are not ours."""


def names_for(shape: GemmShape) -> tuple[str, ...]:
    """All backends of a shape's operation, ours first."""
    return ("ours", *of(shape).peers, *(name for name in (DEEPGEMM,) if name in BACKENDS))


def add_deepgemm(library: Any) -> None:
    """Make the module of DeepGEMM one of `BACKENDS`: our problem, called as ours is. It compiles a kernel for a shape
    in seconds, at the first call."""
    BACKENDS[DEEPGEMM] = lambda x: x.call(library)


def usable(name: str, x: Operands) -> str | None:
    """Why a backend cannot run this problem, in its own words, or None. Runs it once.

    Results of who solves our problem are compared with ours, so that a misread scale layout does not pass for a fast
    kernel.
    """
    if name == "ours":
        BACKENDS[name](x)()  # an error of ours is not swallowed
        return None
    begin = 0.0 if x.accumulate else float("nan")  # what is not written is seen
    x.d.fill_(begin)
    try:
        result = BACKENDS[name](x)()
        torch.cuda.synchronize()
    except DeepGemmError:
        raise
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        return textwrap.shorten(str(error), 100) or type(error).__name__
    if name not in EASIER:
        theirs = (x.d if result is None else result).clone()  # ours comes to where it may be
        x.d.fill_(begin)
        ours(x)()
        difference = float(calc_diff(theirs, x.d))
        if not difference < 1e-3:
            return f"its result differs from ours by {difference:.1e}"
    return None
