"""Dense FP8 GEMM with scales: ``d = (c +) (a * scales of a) @ (b * scales of b)^T``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..calls import Operation, Step, Work, entry
from ..errors import InvalidInputError
from ..reference import fp8_gemm_reference
from ..spec import Accumulate, Dtype, GemmSpec, Operand, TransposeBytesSpec, TransposeSpec, align
from . import checks, fp8_checks
from .checks import TMA_BYTES
from .cublaslt import fp8_by_cublaslt
from .fp8_checks import BLOCKS, Scalings, is_k_major

NAME = "fp8_gemm_nt"

_OUTPUTS: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}


def spec(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    whole_gpu: bool = True,
    aligned: bool | None = None,
    compiled_dims: str = "",
    scaling: Scalings = BLOCKS,
    output: Dtype = "bf16",
    accumulate: Accumulate = "none",
) -> GemmSpec:
    """The spec of a call, under the options of this process. ``aligned`` says whether TMA can write D (and read C);
    None means that they are freshly allocated."""
    fresh = n % (4 if output == "f32" else 8) == 0  # rows that start at multiples of 16 bytes
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=Operand("e4m3", scaling=scaling[0]),
        b=Operand("e4m3", scaling=scaling[1]),
        d=Operand(output, major="mn", aligned=fresh if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        accumulate=accumulate,
        batch_invariant=options.get_batch_invariant(),
    )


@dataclass(frozen=True, eq=False)
class FP8GemmOperands:
    """Checked operands. a (m, k) and b (n, k) are E4M3, K-major or MN-major. sfa and sfb are float32 with any strides;
    their shapes follow from ``scaling``. d, and c if there is one, are (m, n), row-major and of one dtype."""

    tensors: Mapping[str, Tensor]
    m: int
    n: int
    k: int
    device: torch.device
    compiled_dims: str
    scaling: Scalings
    accumulate: Accumulate


class FP8GemmNT(Operation):
    """See `deep_gemm.fp8_gemm_nt`. ``accumulates``: there is a c."""

    name = NAME
    output = "d"
    weights = ("b", "sfb")
    unsigned = ("a", "b")
    settings = ("forbid_transpose",)
    fallbacks = MappingProxyType({"cublaslt": fp8_by_cublaslt})

    def __init__(self, accumulates: bool = False) -> None:
        c = ("c",) if accumulates else ()
        options = ("recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast")
        self.parameters = ("a", "b", *c, "d", *options)
        self.operands = {"a": "a[0]", "sfa": "a[1]", "b": "b[0]", "sfb": "b[1]", **{name: name for name in (*c, "d")}}
        self.in_place = "c" if accumulates else ""

    def check(self, *arguments: Any) -> FP8GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is no product to compute.
        Arguments after d may be left out.

        ``disable_ue8m0_cast`` has no effect on Hopper: float32 scales are used as they are, powers of two or not.
        """
        given = dict(zip(self.parameters, arguments, strict=False))
        asked = fp8_checks.check_recipe(*(given.get(name) for name in ("recipe", "recipe_a", "recipe_b")))
        dims = checks.check_compiled_dims(given.get("compiled_dims") or "")
        if not isinstance(disabled := given.get("disable_ue8m0_cast", False), bool):
            raise InvalidInputError(f"disable_ue8m0_cast must be True or False, but it is {disabled!r}.")
        a, sfa = checks.pair("a", given["a"])
        b, sfb = checks.pair("b", given["b"])
        named: dict[str, Any] = {"a": a, "the scales of a": sfa, "b": b, "the scales of b": sfb}
        named |= {name: given[name] for name in ("c", "d") if name in given}
        for name, tensor in named.items():
            checks.check_plain(name, tensor, dims=(0, 1, 2) if name.startswith("the scales") else (2,))
        device = checks.check_devices(named)
        checks.check_output_gradient("d", named["d"])
        m, n, k, scaling = fp8_checks.check_shapes(named, asked)
        if checks.is_fake(named.values()):
            return None
        checks.check_memory(named)
        fp8_checks.check_alignment("a", a)
        fp8_checks.check_alignment("b", b)
        accumulate = checks.check_places(named)
        if m == 0 or n == 0:
            return None
        if k == 0:
            checks.write_empty_sum(named["d"], named.get("c"), accumulate)
            return None
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return FP8GemmOperands(tensors, m, n, k, device, dims, scaling, accumulate)

    def work(self, x: FP8GemmOperands, device: int) -> Work:
        """The GEMM, after transposes of those operands and scales that TMA cannot read as they are."""
        d, c = x.tensors["d"], x.tensors.get("c")
        asked = spec(
            x.m,
            x.n,
            x.k,
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            aligned=checks.tma_writable(d) and (c is None or checks.tma_writable(c)),
            compiled_dims=x.compiled_dims,
            scaling=x.scaling,
            output=_OUTPUTS[d.dtype],
            accumulate=x.accumulate,
        )
        found = Preparation({name: name for name in x.tensors})
        for name, operand in (("a", asked.a), ("b", asked.b)):
            found.values(name, x.tensors[name])
            scales = x.tensors["sf" + name]
            if operand.scaling == "1x128":
                found.row_scales("sf" + name, scales)
            elif operand.scaling == "row":
                found.strides["sf" + name] = (_stride_of_rows(scales),)
            else:
                found.strides["sf" + name] = scales.stride()
        for name in ("c", "d"):
            if name in x.tensors:
                found.strides[name] = (checks.row_stride(x.tensors[name], TMA_BYTES // d.element_size()), 1)
        return Work((*found.steps, Step(asked, found.strides, found.operands)), found.scratch)

    def special(self, x: FP8GemmOperands) -> str:
        """Other libraries take scales of blocks and K-major values, and write bfloat16."""
        if x.scaling != BLOCKS:
            return f"scales of {x.scaling[0]} and {x.scaling[1]}"
        if x.tensors["d"].dtype != torch.bfloat16:
            return f"a d of {x.tensors['d'].dtype}"
        return "" if all(is_k_major(x.tensors[name]) for name in "ab") else "values whose K is not contiguous"

    def reference(self, x: FP8GemmOperands) -> None:
        """See `fp8_gemm_reference`."""
        fp8_gemm_reference(**x.tensors, scaling=x.scaling)


class Preparation:
    """The launches before a GEMM, and the places of its operands after them."""

    def __init__(self, operands: dict[str, str]) -> None:
        self.operands = operands
        self.strides: dict[str, tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.scratch: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def values(self, name: str, x: Tensor) -> None:
        """Add A or B. It is transposed first if it is MN-major."""
        if is_k_major(x):
            self.strides[name] = (checks.row_stride(x, TMA_BYTES), 1)
            return
        rows, k = x.shape
        place = self._scratch(name, (rows, k), torch.float8_e4m3fn)
        self.steps.append(Step(TransposeBytesSpec(rows, k), {"source": x.stride()}, {"source": name, "target": place}))
        self.strides[name] = (k, 1)

    def row_scales(self, name: str, sf: Tensor) -> None:
        """Add scales (rows, blocks of K). They are transposed first if TMA cannot read them as they are."""
        rows, blocks = sf.shape
        padded = align(rows, 4)
        if checks.tma_readable(sf):
            self.strides[name] = (1, sf.stride(1) if blocks > 1 else padded)
            return
        place = self._scratch(name, (blocks, padded), torch.float32)
        transpose = TransposeSpec(rows=rows, columns=blocks)
        self.steps.append(Step(transpose, {"source": (0, *sf.stride())}, {"source": name, "target": place}))
        self.strides[name] = (1, padded)

    def grouped_row_scales(self, name: str, sf: Tensor) -> None:
        """Add scales (groups, rows, blocks of K), which kernels read as rows x (groups * blocks). They are transposed
        first if TMA cannot read them as they are."""
        groups, rows, blocks = sf.shape
        step = block_stride(sf)
        if step is None:
            step = align(rows, 4)
            place = self._scratch(name, (groups, blocks, step), torch.float32)
            transpose = TransposeSpec(rows=rows, columns=blocks, batch=groups)
            self.steps.append(Step(transpose, {"source": sf.stride()}, {"source": name, "target": place}))
        self.strides[name] = (1, step)

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        place = self.operands[name] = f"{name} transposed"
        self.scratch[place] = (shape, dtype)
        return place


def block_stride(sf: Tensor) -> int | None:
    """The stride of sf (groups, rows, blocks) from one block to the next, over all groups, if TMA can read it as a
    matrix of rows x (groups * blocks); None otherwise."""
    groups, rows, blocks = sf.shape
    step = sf.stride(2) if blocks > 1 else sf.stride(0) if groups > 1 else align(rows, 4)
    if sf.data_ptr() % TMA_BYTES or (rows > 1 and sf.stride(1) != 1):
        return None
    if step < rows or step * sf.element_size() % TMA_BYTES or (groups > 1 and sf.stride(0) != blocks * step):
        return None
    return step


def _stride_of_rows(sf: Tensor) -> int:
    """The stride from one row's scale to the next: zero if all rows share one scale."""
    if sf.numel() == 1:
        return 0
    return next(stride for size, stride in zip(sf.shape, sf.stride(), strict=True) if size > 1)


without_c, with_c = entry(FP8GemmNT()), entry(FP8GemmNT(accumulates=True))


def call(
    a: Any,
    b: Any,
    d: Any,
    c: Any,
    recipe: Any,
    recipe_a: Any,
    recipe_b: Any,
    compiled_dims: Any,
    disable_ue8m0_cast: Any,
) -> None:
    """`fp8_gemm_nt` with all arguments by position. Calls with and without c are two operations, so that a call without
    c checks only five tensors."""
    if c is None:
        without_c(a, b, d, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)
    else:
        with_c(a, b, c, d, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def as_nt(x: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Transposed views of an operand and its scales."""
    if (
        not isinstance(x, (tuple, list))
        or len(x) != 2
        or not all(isinstance(t, Tensor) for t in x)
        or x[0].dim() != 2
        or x[1].dim() > 2
    ):
        raise InvalidInputError(f"{name} must be a pair (tensor, scales) of tensors with 2 dimensions.")
    values, scales = x
    return values.t(), scales.t()
