"""The reference: plain torch on any device, slow, and simple enough to be trusted.

It serves tensors on the CPU, GPUs without kernels (`DG_FALLBACK=torch`), and tests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deep_gemm.parts import PARTS, SWIGLU
from deep_gemm.records import record
from deep_gemm.spec import SCALE_BLOCK, Grouping, Scaling, align, ceil_div

CHUNK_ELEMENTS = 1 << 24
"""At most this many dequantised elements of A, of B and of the product exist at a time (128 MiB each in float64)."""

Scalings: TypeAlias = tuple[Scaling, Scaling]
"""The scalings of A and of B."""

BLOCKS: Scalings = ("1x128", "128x128")

Block: TypeAlias = tuple[slice, slice, Tensor]
"""Rows, columns, and their part of a product."""


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``. As all activations here, it is a formula in float64, rounded to the dtype of x: torch's own
    functions depend on the CPU. Its `gelu` of infinity is NaN on some, and infinity on others."""
    wide = x.double()
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def silu_gradient(both: Tensor, d: Tensor) -> Tensor:
    """The gradient of gate and up (rows, 2 * n), given the gradient d (rows, n) of silu(gate) * up, in float32."""
    (gate, up), d = both.double().chunk(2, dim=1), d.double()
    sigmoid = torch.sigmoid(gate)
    return torch.cat([d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid], dim=1).float()


def gelu(x: Tensor) -> Tensor:
    """torch's with ``approximate="tanh"``. It is written as a sigmoid, since 1 + tanh cancels."""
    wide = x.double()
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def gelu_erf(x: Tensor) -> Tensor:
    """``x * (1 + erf(x / sqrt(2))) / 2``. It is written with erfc, since 1 + erf cancels."""
    wide = x.double()
    return (0.5 * wide * torch.special.erfc(wide * -math.sqrt(0.5))).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}
"""What can be applied to sums before they are rounded, by the names that callers give. In ``sum_activations.cuh``
each has a struct, whose name is the same in the form of a C++ name."""


@record(frozen=True, eq=False)
class Finish:
    """An epilogue (see `deep_gemm.Epilogue`), for the rows and columns ``where`` of the product. If D is FP8, ``sfd``
    are its scales, powers of two if ``power_of_two``."""

    activation: str = ""
    alpha: float = 1.0
    row_factor: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    clamp: float | None = None
    interleaved: bool = False
    sfd: Tensor | None = None
    power_of_two: bool = False
    own: Callable[[Tensor, tuple[slice, slice]], Tensor] | None = None
    """In place of an activation: a user's, of sums and ``where``."""

    @property
    def needs_rows(self) -> bool:
        """Whether it needs whole rows of the product."""
        return self.activation == SWIGLU or self.sfd is not None

    def __call__(self, product: Tensor, where: tuple[slice, slice], c: Tensor | None = None) -> Tensor:
        """In float32: ``activation(alpha * row_factor * product + c + bias) + residual``. ``c`` is that part of C. With
        SwiGLU row_factor is a factor of the result."""
        rows, columns = where
        factor = torch.tensor(self.alpha, dtype=torch.float32, device=product.device)
        each = None
        if self.row_factor is not None:
            each = self.row_factor if self.row_factor.numel() == 1 else self.row_factor[rows]
            each = each.reshape(-1, 1)
        if each is not None and self.activation != SWIGLU:
            factor = each * factor
        x = product.float() * factor
        x = x if c is None else x + c
        x = x if self.bias is None else x + self.bias[columns]
        if self.activation == SWIGLU:
            gate, up = (x[:, ::2], x[:, 1::2]) if self.interleaved else x.chunk(2, dim=1)
            if self.clamp is not None:
                gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
            x = silu(gate) * up
            return x if each is None else x * each
        x = ACTIVATIONS[self.activation](x) if self.activation else x
        x = x if self.own is None else self.own(x, where)
        return x if self.residual is None else x + self.residual[where]

    def of_group(self, group: int, rows: slice, d: Tensor) -> Finish:
        """That of one group of a GEMM grouped by M, whose ``rows`` are in the matrix of all groups. ``d`` has the shape
        of the call's."""
        sfd = self.sfd
        if sfd is not None:
            first = rows.start - group * d.shape[-2]
            sfd = sfd[rows] if d.dim() == 2 else sfd[group, first : first + rows.stop - rows.start]
        found: dict[str, Any] = {"sfd": sfd}
        for part in PARTS:
            if (x := getattr(self, part.name)) is not None and (part.axes != "m" or x.numel() > 1):
                found[part.name] = x[group if part.axes == "n" else rows]
        return replace(self, **found)

    def write_zeros(self, d: Tensor, rows: slice) -> None:
        """Zeros in rows of d without a group; their scales are those of the cast of zeros."""
        d[rows].view(torch.uint8).zero_()
        if self.sfd is not None:
            from deep_gemm.ops.cast_reference import cast_blocks  # here: a GPU needs none of it

            zeros = torch.zeros(1, SCALE_BLOCK, device=d.device)
            self.sfd[rows] = cast_blocks(zeros, 1, SCALE_BLOCK, self.power_of_two)[1]

    def write(self, d: Tensor, where: tuple[slice, slice], product: Tensor, c: Tensor | None = None) -> None:
        """Round the result to d's dtype. `needs_rows`: ``where`` is all of d."""
        x = self(product, where, c)
        if self.sfd is None:
            (d if self.needs_rows else d[where]).copy_(x)
            return
        from deep_gemm.ops.cast_reference import cast_blocks  # here: a GPU needs none of it

        values, scales = cast_blocks(x, 1, SCALE_BLOCK, self.power_of_two)
        d.view(torch.uint8).copy_(values.view(torch.uint8))
        self.sfd.copy_(scales)


def fp8_gemm_reference(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    scaling: Scalings = BLOCKS,
    finish: Finish | None = None,
) -> None:
    """Write ``(c +) (a * sfa) @ (b * sfb)^T``, or its `Finish`, into ``d``, rounded once to d's dtype. Shapes are those
    of `fp8_gemm_nt`; c (M, N) may be d."""
    with plain_arithmetic(a.device):
        blocks = _product_blocks(a, sfa, b, sfb, torch.float64, scaling)
        for rows, columns, block in _as_needed(blocks, (a.shape[0], b.shape[0]), d.device, finish):
            _write(d, (rows, columns), block, c, finish)


def _as_needed(
    blocks: Iterator[Block], shape: tuple[int, int], device: torch.device, finish: Finish | None
) -> Iterator[Block]:
    """The blocks of a product of this shape, or all of it in float32 if its `Finish` needs whole rows."""
    if finish is None or not finish.needs_rows:
        yield from blocks
        return
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    for rows, columns, block in blocks:
        whole[rows, columns] = block
    yield slice(None), slice(None), whole


def _write(d: Tensor, where: tuple[slice, slice], block: Tensor, c: Tensor | None, finish: Finish | None) -> None:
    added = None if c is None else c[where]
    if finish is not None:
        finish.write(d, where, block, added)
    else:
        d[where].copy_(block if added is None else block + added)


def dequantised(x: Tensor, sf: Tensor, kind: Scaling, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """The dequantised values of an operand (rows, K) of `fp8_gemm_nt`, or of some of its rows, which begin at a
    multiple of 128."""
    from deep_gemm.ops.cast_reference import dequantise, unpack_ue8m0_from_int  # here: a GPU needs none of it

    if kind == "ue8m0":
        sf, kind = unpack_ue8m0_from_int(sf)[:, : ceil_div(x.shape[1], SCALE_BLOCK)], "1x128"
    if kind == "row":
        each = sf.reshape(-1, 1).expand(x.shape[0], 1)[rows]
        return dequantise(x[rows], each, (1, max(1, x.shape[1])), dtype)
    if kind == "128x128":
        start, stop, _ = rows.indices(x.shape[0])
        blocks = slice(start // SCALE_BLOCK, align(stop, SCALE_BLOCK) // SCALE_BLOCK)
        return dequantise(x[rows], sf[blocks], (SCALE_BLOCK, SCALE_BLOCK), dtype)
    return dequantise(x[rows], sf[rows], (1, SCALE_BLOCK), dtype)


def b16_gemm_reference(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, finish: Finish | None = None) -> None:
    """Write ``(c +) a @ b^T``, or its `Finish`, into ``d``, rounded once to d's dtype. a (M, K) and b (N, K) have any
    floating-point dtype and any strides; c (M, N) may be d. Sums are float64, in which products of two 16-bit elements
    are exact. Modes of the process (TF32, bfloat16 instead of float32) do not change them."""
    (m, k), n = a.shape, b.shape[0]

    def blocks() -> Iterator[Block]:
        step_n = max(1, CHUNK_ELEMENTS // max(k, 1))
        step_m = max(1, CHUNK_ELEMENTS // max(k, min(step_n, n), 1))
        for n0 in range(0, n, step_n):
            b_t = b[n0 : n0 + step_n].double().t()
            for m0 in range(0, m, step_m):
                yield slice(m0, m0 + step_m), slice(n0, n0 + step_n), a[m0 : m0 + step_m].double() @ b_t

    with plain_arithmetic(a.device):
        for rows, columns, block in _as_needed(blocks(), (m, n), d.device, finish):
            _write(d, (rows, columns), block, c, finish)


def batched_reference(a: Tensor, b: Tensor, d: Tensor, sfa: Tensor | None = None, sfb: Tensor | None = None) -> None:
    """Write ``a[i] @ b[i]^T`` into each ``d[i]`` of d (batch, M, N), rounded once to d's dtype. FP8 operands come with
    their scales."""
    for index, out in enumerate(d):
        if sfa is None or sfb is None:
            b16_gemm_reference(a[index], b[index], out)
        else:
            fp8_gemm_reference(a[index], sfa[index], b[index], sfb[index], out)


@contextlib.contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off process-wide modes: autocast, which multiplies in bfloat16 or float16; gradients; and
    ``torch.set_default_device``. It uses inference mode and not no_grad, because inference tensors cannot be written
    outside of inference mode. TF32, and bfloat16 instead of float32, do not matter: the reference is float64."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), torch.device(device):
        yield


def exact_product(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    elementwise: Callable[[Tensor], Tensor] | None = None,
    scaling: Scalings = BLOCKS,
) -> Tensor:
    """The product of the dequantised operands in float64, shape (M, N).

    a (M, K) and b (N, K) are FP8; sfa and sfb are float32 with the shapes that `fp8_gemm_nt` takes. It is called exact
    because a product of two FP8 values and two float32 scales has at most 56 significant bits: its error is some 2^-53
    times the sum of the magnitudes, far below the rounding of a GPU kernel. ``elementwise`` is applied to the
    dequantised operands first: torch.abs and torch.square give bounds on errors.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    with plain_arithmetic(a.device):
        for rows, columns, block in _product_blocks(a, sfa, b, sfb, torch.float64, scaling, elementwise):
            out[rows, columns] = block
    return out


def _product_blocks(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    dtype: torch.dtype,
    scaling: Scalings,
    elementwise: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Block]:
    """The product in blocks (rows, columns, values), so that memory is bounded for any size."""

    def factor(x: Tensor, sf: Tensor, kind: Scaling, rows: slice) -> Tensor:
        values = dequantised(x, sf, kind, dtype, rows)
        return values if elementwise is None else elementwise(values)

    (m, k), n = a.shape, b.shape[0]
    # A chunk has whole scale blocks of rows, so that its scales are a slice.
    step_n = align(max(1, CHUNK_ELEMENTS // max(k, 1)), SCALE_BLOCK)
    step_m = align(max(1, CHUNK_ELEMENTS // max(k, min(step_n, n), 1)), SCALE_BLOCK)
    for n0 in range(0, n, step_n):
        columns = slice(n0, min(n0 + step_n, n))
        b_t = factor(b, sfb, scaling[1], columns).t()
        for m0 in range(0, m, step_m):
            rows = slice(m0, min(m0 + step_m, m))
            yield rows, columns, factor(a, sfa, scaling[0], rows) @ b_t


def m_grouped_reference(
    a: Tensor,
    b: Tensor,
    layout: Tensor,
    d: Tensor,
    grouping: Grouping,
    alignment: int = 1,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    finish: Finish | None = None,
    scaling: Scalings = BLOCKS,
) -> None:
    """Multiply the rows of each group by its matrix, and write that, or its `Finish`, rounded once to d's dtype.

    a (M, K) and d (M, N) have the group in front in the masked form, and each group right after the one before; b is
    (G, N, K). FP8 operands come with their scales. In the index form, rows without a group are written with zeros. In
    the other forms, rows of no group stay as they are. ``layout`` is copied to the host.
    """
    rows, n = d.shape[-2:]
    with plain_arithmetic(a.device):
        flat_a, flat_d = a.flatten(0, -2), d.view(-1, n)
        for group, where in group_rows(layout, grouping, rows, alignment):
            if group < 0:
                (finish or Finish()).write_zeros(flat_d, where)
                continue
            own = finish and finish.of_group(group, where, d)
            if sfa is None or sfb is None:
                b16_gemm_reference(flat_a[where], b[group], flat_d[where], finish=own)
            else:
                scales = sfa.flatten(0, -2)[where], sfb[group]
                fp8_gemm_reference(
                    flat_a[where], scales[0], b[group], scales[1], flat_d[where], scaling=scaling, finish=own
                )


def group_rows(layout: Tensor, grouping: Grouping, rows: int, alignment: int = 1) -> Iterator[tuple[int, slice]]:
    """The groups of a GEMM grouped by M, each with a range of its rows. Rows of no group have the group -1 in the index
    form, and are left out in the other forms. In the masked form ``rows`` are those of one group, and a range counts
    the rows of all groups."""
    if grouping == "contiguous":
        labels, counts = torch.unique_consecutive(layout.cpu(), return_counts=True)
        start = 0
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            yield label, slice(start, start + count)
            start += count
        return
    start = 0
    for group, size in enumerate(layout.tolist()):
        if grouping == "masked":
            yield group, slice(group * rows, group * rows + size)
        else:
            yield group, slice(start, max(start, size))
            start = align(size, alignment)


def k_grouped_reference(
    a: Tensor,
    b: Tensor,
    layout: Tensor,
    d: Tensor,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    c: Tensor | None = None,
    scaling: Scalings = ("1x128", "1x128"),
) -> None:
    """Write ``(c[g] +) A_g @ B_g^T`` into each ``d[g]`` of d (G, M, N). ``layout`` is K of each group. Without scales,
    a (K, M) and b (K, N) hold the groups' rows one after the other. With scales of 1 x 128, of shape (M, blocks) and
    (N, blocks), or for b of 128 x 128, of shape (ceil(N / 128), blocks), a and b hold the groups' matrices (M, K_g) and
    (N, K_g) one after the other, and each group's scales begin with a new block."""
    groups, m, n = d.shape
    sizes = layout.tolist()
    start = first = 0
    with plain_arithmetic(a.device):
        for group, size in zip(range(groups), sizes, strict=True):
            added = None if c is None else c[group]
            if sfa is None or sfb is None:
                rows = slice(start, start + size)
                b16_gemm_reference(a[rows].t(), b[rows].t(), d[group], added)
            else:
                blocks = slice(first, first + -(-size // SCALE_BLOCK))
                ours = (
                    x.flatten()[start * rows : (start + size) * rows].view(rows, size) for x, rows in ((a, m), (b, n))
                )
                of_a, of_b = ours
                fp8_gemm_reference(of_a, sfa[:, blocks], of_b, sfb[:, blocks], d[group], added, scaling)
                first = blocks.stop
            start += size
