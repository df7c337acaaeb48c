"""Operands of the grouped GEMMs that are timed, and the calls on them: ours, DeepGEMM's and torch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deep_gemm import grouped
from deep_gemm.backends import deepgemm as theirs
from deep_gemm.benchmarks.grouped_shapes import ALIGNMENT, Shape
from deep_gemm.errors import UnsupportedError
from deep_gemm.layout import get_mn_major_tma_aligned_tensor
from deep_gemm.quantisation import cast_blocks
from deep_gemm.reference import exact_product
from deep_gemm.spec import SCALE_BLOCK, align, ceil_div
from deep_gemm.testing import calc_diff, timing

CAST_ROWS = 4096
"""Rows that are made at a time, so that float32 copies of large operands fit into memory."""
CHECKED_ROWS = 64
"""Rows of the last group that are compared with the exact product."""


def paired(*operands: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
    """Operands as functions take them: with their scales, or alone if they have none."""
    return tuple(values if scales is None else (values, scales) for values, scales in operands)


@dataclass
class Operands:
    """The tensors of a call. ``form`` is "index", "psum" or "masked". ``a`` and ``d`` have the group in front in the
    masked form. Scales are those of FP8: ``sfa`` MN-major."""

    shape: Shape
    form: str
    a: Tensor
    b: Tensor
    d: Tensor
    layout: Tensor
    sfa: Tensor | None = None
    sfb: Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of the public functions, ours and DeepGEMM's."""
        return *paired((self.a, self.sfa), (self.b, self.sfb)), self.d, self.layout

    def parts(self, x: Tensor) -> list[Tensor]:
        """The rows of each group of ``a``, ``sfa`` or ``d``, without padding."""
        counts = self.shape.counts
        if self.form == "masked":
            return [x[group, :rows] for group, rows in enumerate(counts)]
        return [x[start : start + rows] for start, rows in zip(self.shape.starts, counts, strict=True)]

    def gathered(self, x: Tensor) -> Tensor:
        """A copy of these rows, one after the other. It is made of bytes, since not all of torch knows FP8."""
        return torch.cat([part.view(torch.uint8) for part in self.parts(x)]).view(x.dtype)


def make(shape: Shape, device: str = "cuda") -> Operands:
    """Normal data, quantised for FP8, in the index form or the masked form. Rows of padding have such data too, since
    what the tensor cores draw depends on data."""
    if shape.n % SCALE_BLOCK:
        raise ValueError(f"N must be a multiple of {SCALE_BLOCK} here, but it is {shape.n}.")
    generator = torch.Generator(device).manual_seed(0)
    masked = shape.form == "masked"
    leading = (shape.groups, shape.max_m) if masked else (shape.padded_m,)
    a, sfa = cast(shape.kind, math.prod(leading), shape.k, 1, generator)
    b, sfb = cast(shape.kind, shape.groups * shape.n, shape.k, SCALE_BLOCK, generator)
    form = "masked" if masked else "index"
    return Operands(
        shape,
        form,
        a.view(*leading, shape.k),
        b.view(shape.groups, shape.n, shape.k),
        torch.full((*leading, shape.n), math.nan, dtype=torch.bfloat16, device=device),
        layout(shape, form, device),
        None if sfa is None else get_mn_major_tma_aligned_tensor(sfa.view(*leading, -1)),
        None if sfb is None else sfb.view(shape.groups, shape.n // SCALE_BLOCK, -1),
    )


def cast(kind: str, rows: int, k: int, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Values, and for FP8 scales of ``block`` x 128 elements."""
    device, fp8 = generator.device, kind == "fp8"
    values = torch.empty(rows, k, dtype=torch.uint8 if fp8 else torch.bfloat16, device=device)
    scales = torch.empty(ceil_div(rows, block), ceil_div(k, SCALE_BLOCK), device=device)
    for start in range(0, rows, CAST_ROWS):
        stop = min(start + CAST_ROWS, rows)
        x = torch.randn(stop - start, k, device=device, generator=generator)
        if fp8:
            x, sf = cast_blocks(x.bfloat16(), block, SCALE_BLOCK, False)
            x = x.view(torch.uint8)
            scales[start // block : ceil_div(stop, block)] = sf
        values[start:stop] = x
    return (values.view(torch.float8_e4m3fn), scales) if fp8 else (values, None)


def layout(shape: Shape, form: str, device: str) -> Tensor:
    """Labels of rows with -1 for padding, ends of groups, or numbers of rows."""
    if form == "masked":
        found = list(shape.counts)
    elif form == "psum":
        found = [start + rows for start, rows in zip(shape.starts, shape.counts, strict=True)]
    else:
        found = [-1] * shape.padded_m
        for group, (start, rows) in enumerate(zip(shape.starts, shape.counts, strict=True)):
            found[start : start + rows] = [group] * rows
    return torch.tensor(found, dtype=torch.int32, device=device)


def in_form(x: Operands, form: str) -> Operands:
    """The same problem in another form; ``x`` is in the index form. The output is a new one."""
    shape, place = x.shape, str(x.a.device)
    if form != "masked":
        return replace(x, form=form, d=torch.full_like(x.d, math.nan), layout=layout(shape, form, place))
    max_m = align(max(shape.counts), ALIGNMENT)
    bytes_of_a = torch.zeros(shape.groups, max_m, shape.k * x.a.element_size(), dtype=torch.uint8, device=place)
    a = bytes_of_a.view(x.a.dtype)
    d = torch.full((shape.groups, max_m, shape.n), math.nan, dtype=x.d.dtype, device=place)
    sfa = None if x.sfa is None else torch.ones(shape.groups, max_m, x.sfa.shape[1], device=place)
    other = replace(x, form=form, a=a, d=d, layout=layout(shape, form, place), sfa=sfa)
    for target, source in zip(other.parts(a), x.parts(x.a), strict=True):
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    if sfa is None or x.sfa is None:
        return other
    for target, source in zip(other.parts(sfa), x.parts(x.sfa), strict=True):
        target.copy_(source)
    return replace(other, sfa=get_mn_major_tma_aligned_tensor(sfa))


def ours(x: Operands) -> timing.Call:
    """Our public function."""
    form = "masked" if x.form == "masked" else "contiguous"
    function = getattr(grouped, f"m_grouped_{x.shape.kind}_gemm_nt_{form}")
    if form == "masked":
        return functools.partial(function, *x.arguments, x.shape.mean)
    return functools.partial(function, *x.arguments, use_psum_layout=x.form == "psum")


def deepgemm(x: Operands) -> timing.Call:
    """DeepGEMM's function of the same name, or of an older one."""
    library, kind = theirs.library(), x.shape.kind
    if x.form != "masked":
        return functools.partial(getattr(library, f"m_grouped_{kind}_gemm_nt_contiguous"), *x.arguments)
    names = f"m_grouped_{kind}_gemm_nt_masked", f"{kind}_m_grouped_gemm_nt_masked"
    name = next((name for name in names if hasattr(library, name)), names[0])
    return functools.partial(getattr(library, name), *x.arguments, x.shape.mean)


def _ends(x: Operands) -> Tensor:
    """What torch takes as ``offs``: ends of groups that have no padding between them."""
    if x.form == "masked":
        raise UnsupportedError("torch has no masked form")
    return torch.tensor(x.shape.counts, device=x.a.device).cumsum(0).to(torch.int32)


def torch_bf16(x: Operands) -> timing.Call:
    """torch's grouped GEMM. It needs no padding, and gets none."""
    ends = _ends(x)
    return functools.partial(torch._grouped_mm, x.gathered(x.a), x.b.transpose(1, 2), offs=ends)


def torch_rowwise(x: Operands) -> timing.Call:
    """The easier problem: one scale for each row of A and each column of D, and sums that are never promoted."""
    ends = _ends(x)
    scales = [torch.full(size, 0.01, device=x.a.device) for size in ((x.shape.m,), (x.shape.groups, x.shape.n))]
    operands = x.gathered(x.a), x.b.transpose(1, 2), scales[0], scales[1]
    grouped_mm = torch._scaled_grouped_mm
    return functools.partial(grouped_mm, *operands, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)


PEERS: dict[str, Callable[[Operands], timing.Call]] = {
    "deepgemm": deepgemm,
    "torch": torch_bf16,
    "torch_rowwise": torch_rowwise,
}
"""Each writes ``d``, or returns the rows of all groups one after the other."""
EASIER = "torch_rowwise", "torch_overwrite"
"""Peers whose problem is easier. The second is of GEMMs grouped along K."""


def peers_of(shape: Shape) -> list[str]:
    """The peers of a shape's kind."""
    return ["deepgemm", "torch" if shape.kind == "bf16" else "torch_rowwise"]


def apart(x: Operands, one: Tensor, other: Tensor) -> float:
    """The largest difference between the rows of a group, by `calc_diff`; NaN if there is one."""
    sizes = list(x.shape.counts)
    return worst(zip(one.split(sizes), other.split(sizes), strict=True))


def worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of a pair, by `calc_diff`; NaN if there is one."""
    found = [float(calc_diff(*pair)) for pair in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)


def from_exact(x: Operands) -> float:
    """How far the last rows of the last group of ``d`` are from the exact product, by `calc_diff`."""

    def last(tensor: Tensor) -> Tensor:
        return x.parts(tensor)[-1][-CHECKED_ROWS:]

    if x.sfa is None or x.sfb is None:
        exact = last(x.a).double() @ x.b[-1].double().t()
    else:
        exact = exact_product(last(x.a), last(x.sfa), x.b[-1], x.sfb[-1])
    return float(calc_diff(last(x.d), exact))
