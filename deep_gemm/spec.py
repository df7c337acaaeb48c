"""What is asked of a kernel, completely, and without pointers.

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SCALE_BLOCK = 128
"""Elements of K (and, for 128x128 scales, of N) that share one scale factor."""

Dtype: TypeAlias = Literal["e4m3", "bf16", "f16", "f32"]
Major: TypeAlias = Literal["k", "mn"]
Scaling: TypeAlias = Literal["none", "1x128", "128x128", "row", "tensor"]
Grouping: TypeAlias = Literal["none", "contiguous", "psum", "masked", "k"]
Accumulate: TypeAlias = Literal["none", "in place", "from c"]


def ceil_div(x: int, y: int) -> int:
    """The smallest integer that is not below ``x / y``."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


@dataclass(frozen=True)
class Operand:
    """One of A, B and D. ``major`` is the dimension that is contiguous in memory: K or the other one (N for D).
    ``aligned``: the Tensor Memory Accelerator can address it (16-byte aligned base, row stride and, to write, rows)."""

    dtype: Dtype
    major: Major = "k"
    scaling: Scaling = "none"
    aligned: bool = True


@dataclass(frozen=True)
class GemmSpec:
    """``D[m, n] = A[m, k] @ B[n, k]^T``, once, for each of ``batch``, or for each of ``groups``.

    ``accumulate`` says what is added to: nothing, D as it is, or another tensor C. ``compiled_dims`` is the subset of
    ``"mnk"`` that the caller wants baked into the binary. ``num_sms`` is how many SMs the launch may use, and
    ``whole_gpu`` whether these are all: if not, two CTAs must not share one, since the GPU would spread them over
    others. ``block_multiple`` restricts (block_m, block_n). ``batch_invariant``: a row of D must have the same bits
    whatever M is, so that K is summed in one order that does not depend on M.
    """

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    d: Operand
    num_sms: int
    whole_gpu: bool = True
    block_multiple: tuple[int, int] = (1, 1)
    compiled_dims: str = ""
    batch: int = 1
    groups: int = 1
    grouping: Grouping = "none"
    accumulate: Accumulate = "none"
    epilogue: str = "none"
    batch_invariant: bool = False

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two operations each."""
        return 2 * self.m * self.n * self.k * self.batch

    def __str__(self) -> str:
        scales = [x.scaling for x in (self.a, self.b) if x.scaling != "none"]
        scaled = f" with scales {' and '.join(scales)}" if scales else ""
        return f"M={self.m}, N={self.n}, K={self.k}, {self.a.dtype} x {self.b.dtype} -> {self.d.dtype}{scaled}"


@dataclass(frozen=True)
class TransposeSpec:
    """``batch`` float32 matrices of ``rows`` x ``columns``, of any strides, to be written columns first, each column
    padded to a multiple of four floats."""

    rows: int
    columns: int
    batch: int = 1

    def __str__(self) -> str:
        return f"transposing {self.batch} x {self.rows} x {self.columns} scales"


@dataclass(frozen=True)
class TransposeBytesSpec:
    """A matrix of ``rows`` x ``columns`` bytes whose columns are contiguous, to be written densely row by row.
    ``columns`` is a multiple of 16."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"transposing {self.rows} x {self.columns} bytes"


@dataclass(frozen=True)
class CopySpec:
    """A matrix of ``rows`` x ``columns``, two bytes an element, of any strides, to be written row by row, each row
    padded to 16 bytes."""

    rows: int
    columns: int

    @property
    def padded_columns(self) -> int:
        """Elements from row to row of the copy."""
        return align(self.columns, 8)

    def __str__(self) -> str:
        return f"copying {self.rows} x {self.columns} elements"


Blocks: TypeAlias = Literal["none", "row", "column", "tile"]


@dataclass(frozen=True)
class QuantizeSpec:
    """A matrix of ``rows`` x ``columns`` to be cast to E4M3, as it is, transposed, or both. In tiles of 128 x 128,
    ``plain`` and ``transposed`` say which elements share a scale: those of a row, of a column (of the matrix as it is
    given), or all; "none" writes nothing. ``gated``: the input has twice as many columns, and silu(left half) * right
    half is cast. ``epsilon``, in the bits of a float32, is the least magnitude that a scale is made of.
    """

    rows: int
    columns: int
    dtype: Dtype
    plain: Blocks
    transposed: Blocks
    gated: bool = False
    epsilon: int = 0
    power_of_two: bool = False

    def __str__(self) -> str:
        return f"quantising {self.rows} x {self.columns} elements of {self.dtype}"


Spec: TypeAlias = QuantizeSpec | GemmSpec | TransposeSpec | TransposeBytesSpec | CopySpec
