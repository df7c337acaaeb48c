"""Dense GEMMs of bfloat16 and float16, in every layout: ``d = (c +) a @ b^T``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..calls import Operation, Step, Work, entry
from ..errors import InvalidInputError
from ..reference import half_gemm_reference
from ..spec import Accumulate, CopySpec, Dtype, GemmSpec, Major, Operand, align
from . import checks
from .checks import TMA_BYTES, shape_of
from .cublaslt import half_by_cublaslt

BF16, FP16 = "bf16_gemm_nt", "fp16_gemm_nt"
"""Names of the operations, in every layout."""

_DTYPES: dict[str, tuple[torch.dtype, Dtype]] = {BF16: (torch.bfloat16, "bf16"), FP16: (torch.float16, "f16")}
PIECE = TMA_BYTES // 2
"""The number of 16-bit elements in 16 bytes."""


def spec(
    op: str,
    m: int,
    n: int,
    k: int,
    num_sms: int,
    whole_gpu: bool = True,
    majors: tuple[Major, Major] = ("k", "k"),
    wide: bool = False,
    aligned: bool | None = None,
    accumulate: Accumulate = "none",
    compiled_dims: str = "",
) -> GemmSpec:
    """The spec of a call, under the options of this process. ``majors`` are those of A and B. ``wide`` means float32
    output. ``aligned`` says whether TMA can write D (and read C); None means that they are freshly allocated."""
    dtype = _DTYPES[op][1]
    fresh = n % (PIECE // 2 if wide else PIECE) == 0
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=Operand(dtype, majors[0]),
        b=Operand(dtype, majors[1]),
        d=Operand("f32" if wide else dtype, major="mn", aligned=fresh if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        accumulate=accumulate,
        batch_invariant=options.get_batch_invariant(),
    )


@dataclass(frozen=True, eq=False)
class HalfGemmOperands:
    """Checked operands. a (m, k) and b (n, k) are views with any strides. d, and c if there is one, are (m, n),
    row-major and of one dtype."""

    tensors: Mapping[str, Tensor]
    m: int
    n: int
    k: int
    device: torch.device
    compiled_dims: str
    accumulate: Accumulate


class HalfGemm(Operation):
    """See `deep_gemm.bf16_gemm_nt`. ``accumulates``: there is a c."""

    output = "d"
    weights = ("b",)
    fallbacks = MappingProxyType({"cublaslt": half_by_cublaslt})

    def __init__(self, name: str, accumulates: bool) -> None:
        self.name = name
        self.dtype = _DTYPES[name][0]
        tensors = ("a", "b", "c", "d") if accumulates else ("a", "b", "d")
        self.parameters = (*tensors, "compiled_dims", "form")
        self.operands = {name: name for name in tensors}
        self.in_place = "c" if accumulates else ""

    def check(self, *arguments: Any) -> HalfGemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is no product to compute.

        ``form`` says how a and b are given: "tn" for a (K, M) and b (K, N).
        """
        *given, compiled_dims, form = arguments
        named: dict[str, Any] = dict(zip(self.operands, given, strict=True))
        dims = checks.check_compiled_dims(compiled_dims or "")
        for name, tensor in named.items():
            checks.check_plain(name, tensor)
        device = checks.check_devices(named)
        checks.check_output_gradient("d", named["d"])
        self._check_dtypes(named)
        named = _as_nt(named, form)
        (m, k), n = named["a"].shape, named["b"].shape[0]
        self._check_shapes(named, form)
        if checks.is_fake(named.values()):
            return None
        checks.check_memory(named)
        accumulate = checks.check_places(named)
        if m == 0 or n == 0:
            return None
        if k == 0:
            checks.write_empty_sum(named["d"], named.get("c"), accumulate)
            return None
        return HalfGemmOperands(named, m, n, k, device, dims, accumulate)

    def _check_dtypes(self, named: Mapping[str, Tensor]) -> None:
        for name in ("a", "b"):
            dtype = named[name].dtype
            if dtype != self.dtype:
                other = next((op for op, (takes, _) in _DTYPES.items() if takes == dtype), None)
                instead = f"{other} takes {dtype}." if other else f"Pass {name}.to({self.dtype})."
                raise InvalidInputError(f"{name} of {self.name} must be {self.dtype}, but it is {dtype}. {instead}")
        d = named["d"]
        if d.dtype not in (self.dtype, torch.float32):
            raise InvalidInputError(f"d of {self.name} must be {self.dtype} or torch.float32, but it is {d.dtype}.")
        if "c" in named and named["c"].dtype != d.dtype:
            raise InvalidInputError(f"c must have d's dtype, {d.dtype}, but it is {named['c'].dtype}.")

    def _check_shapes(self, named: Mapping[str, Tensor], form: str) -> None:
        a, b, d = named["a"], named["b"], named["d"]
        if a.shape[1] != b.shape[1]:
            a_given = f"{shape_of(a)} (M, K)" if form[0] == "n" else f"{shape_of(a.t())} (K, M)"
            b_given = f"{shape_of(b)} (N, K)" if form[1] == "t" else f"{shape_of(b.t())} (K, N)"
            raise InvalidInputError(
                f"a and b must agree in K, but in the form {form}, a is {a_given} and b is {b_given}."
                f"{self._other_form(a, b, d, form)}"
            )
        shape = (a.shape[0], b.shape[0])
        for name in ("c", "d"):
            if name in named and tuple(named[name].shape) != shape:
                raise InvalidInputError(
                    f"{name} must have the shape {shape}, M x N of a and b, but it has {shape_of(named[name])}."
                )
        for name, tensor in (("a", a), ("b", b), ("d", d)):
            checks.check_sizes(name, tensor)

    def _other_form(self, a: Tensor, b: Tensor, d: Tensor, form: str) -> str:
        """The form in which these tensors agree, as a sentence; "" if there is none."""
        for other in ("nt", "nn", "tn", "tt"):
            x = a if other[0] == form[0] else a.t()
            y = b if other[1] == form[1] else b.t()
            if x.shape[1] == y.shape[1] and d.shape == (x.shape[0], y.shape[0]):
                return f" They agree in the form {other}: call {self.name[:-2]}{other}."
        return ""

    def work(self, x: HalfGemmOperands, device: int) -> Work:
        """The GEMM, after copies of A and B if TMA cannot read them as they are."""
        d, c = x.tensors["d"], x.tensors.get("c")
        ways = {name: addressed(x.tensors[name]) for name in ("a", "b")}
        asked = spec(
            self.name,
            x.m,
            x.n,
            x.k,
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            majors=(_major(ways["a"]), _major(ways["b"])),
            wide=d.dtype == torch.float32,
            aligned=checks.tma_writable(d) and (c is None or checks.tma_writable(c)),
            accumulate=x.accumulate,
            compiled_dims=x.compiled_dims,
        )
        operands = {name: name for name in x.tensors}
        strides: dict[str, tuple[int, ...]] = {
            name: (checks.row_stride(x.tensors[name], PIECE), 1) for name in ("c", "d") if name in x.tensors
        }
        steps, scratch = [], {}
        for name, way in ways.items():
            tensor = x.tensors[name]
            if way is None:
                copy = CopySpec(*tensor.shape)
                operands[name] = f"{name} copied"
                steps.append(Step(copy, {"source": tensor.stride()}, {"source": name, "target": operands[name]}))
                scratch[operands[name]] = ((copy.rows, copy.padded_columns), tensor.dtype)
                strides[name] = (copy.padded_columns, 1)
            else:
                strides[name] = way
        return Work((*steps, Step(asked, strides, operands)), scratch)

    def reference(self, x: HalfGemmOperands) -> None:
        """See `half_gemm_reference`."""
        half_gemm_reference(**x.tensors)


def addressed(x: Tensor) -> tuple[int, int] | None:
    """Strides with which TMA can address x (rows, K): (row stride, 1) if it is K-major, (1, stride of K) if it is
    contiguous along rows, None otherwise. A dimension of size 1 may have any stride."""
    (rows, k), (outer, inner) = x.shape, x.stride()
    if x.data_ptr() % TMA_BYTES:
        return None
    if (k == 1 or inner == 1) and (rows == 1 or (outer >= k and outer % PIECE == 0)):
        return (outer if rows > 1 else align(k, PIECE)), 1
    if (rows == 1 or outer == 1) and (k == 1 or (inner >= rows and inner % PIECE == 0)):
        return 1, (inner if k > 1 else align(rows, PIECE))
    return None


def _major(way: tuple[int, int] | None) -> Major:
    """The major dimension with the strides ``way``; None stands for a copy, which is K-major."""
    return "k" if way is None or way[1] == 1 else "mn"


def _as_nt(named: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The tensors, with a and b as views (M, K) and (N, K)."""
    flipped = {"a": form[0] == "t", "b": form[1] == "n"}
    return {name: tensor.t() if flipped.get(name) else tensor for name, tensor in named.items()}


@dataclass(frozen=True)
class Entries:
    """The functions behind a public function, with all arguments by position. Calls with and without c are two
    operations, so that a call without c checks only three tensors."""

    without_c: Callable[..., None]
    """Its arguments are a, b, d, compiled_dims, form."""
    with_c: Callable[..., None]
    """Its arguments are a, b, c, d, compiled_dims, form."""

    @classmethod
    def of(cls, name: str) -> Entries:
        """The entries of an operation."""
        return cls(entry(HalfGemm(name, accumulates=False)), entry(HalfGemm(name, accumulates=True)))


bf16, fp16 = Entries.of(BF16), Entries.of(FP16)
