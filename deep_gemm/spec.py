"""Specs: complete descriptions of the work of a kernel, without pointers.

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal, TypeAlias

from .errors import InvalidInputError
from .parts import NO_PARTS, Parts, parse
from .records import record

SCALE_BLOCK = 128
"""Elements of K (and, for 128x128 scales, of N) that share one scale factor."""

AMAX_MIN = 1e-4
"""The least magnitude from which casts to FP8 compute a scale by default."""

Dtype: TypeAlias = Literal["e4m3", "e5m2", "bf16", "f16", "f32"]
Major: TypeAlias = Literal["k", "mn"]
Scaling: TypeAlias = Literal["none", "1x128", "128x128", "row", "tensor", "ue8m0"]
"""UE8M0: exponents of scales of 1x128, four to an int32."""
SCALINGS: dict[tuple[Scaling, Scaling], str] = {
    ("none", "none"): "none",
    ("1x128", "1x128"): "1d1d",
    ("1x128", "128x128"): "1d2d",
    ("row", "row"): "rowwise",
    ("ue8m0", "ue8m0"): "ue8m0",
}
"""The names of supported pairs of scalings, those of A and of B."""
Grouping: TypeAlias = Literal["none", "contiguous", "psum", "masked", "k", "batched", "summed", "heads"]
Accumulate: TypeAlias = Literal["none", "in place", "from c"]


def ceil_div(x: int, y: int) -> int:
    """The smallest integer that is not below ``x / y``.

    >>> deep_gemm.ceil_div(100, 16)
    7
    """
    try:
        return -(-x // y) if type(x) is type(y) is int else -(-_plain(x) // _plain(y))
    except (ZeroDivisionError, TypeError, ValueError):
        raise InvalidInputError(f"x and y must be numbers, and y not 0, but they are {x!r} and {y!r}.") from None


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``.

    >>> deep_gemm.align(100, 16)
    112
    """
    return ceil_div(x, y) * (y if type(y) is int else _plain(y))


def _plain(x: int) -> int:
    """A number of numpy as one of Python, which has as many bits as it needs."""
    if type(x).__module__ == "numpy":
        x = x.item()  # type: ignore[attr-defined]
    return x


@record(frozen=True)
class Operand:
    """One of A, B and D. ``major`` is the dimension that is contiguous in memory: K or the other one (N for D).
    ``aligned``: the Tensor Memory Accelerator can address it. Its base and its row stride are multiples of 16 bytes
    and, for D, so is the length of a row."""

    dtype: Dtype
    major: Major = "k"
    scaling: Scaling = "none"
    aligned: bool = True


@record(frozen=True)
class GemmSpec:
    """``D[m, n] = A[m, k] @ B[n, k]^T``, once, or for each of ``groups``.

    ``accumulate`` says what the product is added to: nothing, D itself, or another tensor C. ``compiled_dims`` is the
    subset of ``"mnk"`` that the caller wants compiled into the binary. ``num_sms`` is the number of SMs that the launch
    may use. ``whole_gpu`` says whether these are all SMs; if not, two CTAs must not share an SM, since the GPU would
    spread them over other SMs. ``block_multiple`` restricts (block_m, block_n). ``batch_invariant``: a row of D must
    have the same bits whatever M is, so K is summed in an order that does not depend on M.

    ``grouping`` says which rows of A and D belong to which of ``groups`` matrices B, of N x K each. The sizes of groups
    are on the device. "contiguous": ``m`` rows in all, each with a label. "psum": ``m`` rows in all, and the end of
    each group. In both forms a group starts at a multiple of ``alignment`` rows. "masked": ``m`` rows for each group,
    of which the first ones exist; the caller expects ``expected_m`` of them.

    Other groups are products of equal size, each with matrices A and B of its own. "batched": and with a D of its own.
    "summed": D is the sum of all products; ``k`` is then that of all of them together, each rounded up to a block of K.

    "heads": one product, whose columns belong to ``groups`` heads of D, which have columns more in the middle.
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
    groups: int = 1
    grouping: Grouping = "none"
    alignment: int = 1
    expected_m: int = 0
    accumulate: Accumulate = "none"
    epilogue: Parts = NO_PARTS
    batch_invariant: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> GemmSpec:
        """The spec that `to_json` wrote. Wrong fields raise TypeError, ValueError, KeyError and their like."""
        operands = {name: Operand(**fields[name]) for name in ("a", "b", "d")}
        multiple, epilogue = tuple(fields["block_multiple"]), parse(fields["epilogue"])
        return cls(**{**fields, **operands, "block_multiple": multiple, "epilogue": epilogue})

    @property
    def form(self) -> str:
        """The BLAS form of A and B: "nt" where both are K-major."""
        return ("n" if self.a.major == "k" else "t") + ("t" if self.b.major == "k" else "n")

    @property
    def dtypes(self) -> str:
        """The dtype of A and B, or both of them if they differ: "e5m2_e4m3"."""
        return self.a.dtype if self.a.dtype == self.b.dtype else f"{self.a.dtype}_{self.b.dtype}"

    @property
    def scaling(self) -> str:
        """The name in `SCALINGS` of the scalings of A and B; "" if no family has both."""
        return SCALINGS.get((self.a.scaling, self.b.scaling), "")

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add counts as two."""
        rows = self.expected_m or self.m
        return 2 * rows * self.n * self.k * (self.groups if self.grouping in ("masked", "batched") else 1)

    def __str__(self) -> str:
        scales = [x.scaling for x in (self.a, self.b) if x.scaling != "none"]
        scaled = f" with scales {' and '.join(scales)}" if scales else ""
        grouped = "" if self.grouping == "none" else f" in {self.groups} groups ({self.grouping})"
        return f"M={self.m}, N={self.n}, K={self.k}{grouped}, {self.a.dtype} x {self.b.dtype} -> {self.d.dtype}{scaled}"


@record(frozen=True)
class KGroupMapsSpec:
    """Tensor maps of the operands A (``m`` rows) and B (``n`` rows) of each of ``groups`` groups along K, made on the
    device from the sizes of the groups. ``padded_k`` is 0 if each group has a matrix of its own. Otherwise all groups
    are parts of one matrix with ``padded_k`` columns, and begin at multiples of 128 columns."""

    groups: int
    m: int
    n: int
    padded_k: int = 0

    @property
    def bytes(self) -> int:
        """Of all maps, 128 each."""
        return 2 * 128 * self.groups

    def __str__(self) -> str:
        return f"tensor maps of {self.groups} groups along K"


@record(frozen=True)
class TransposeSpec:
    """A transpose of ``batch`` float32 matrices of ``rows`` x ``columns``, with any strides. Columns are written
    contiguously, each padded to a multiple of four floats."""

    rows: int
    columns: int
    batch: int = 1

    def __str__(self) -> str:
        return f"transposing {self.batch} x {self.rows} x {self.columns} scales"


@record(frozen=True)
class TransposeBytesSpec:
    """A transpose of a matrix of ``rows`` x ``columns`` bytes from contiguous columns to contiguous rows. ``columns``
    is a multiple of 16."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"transposing {self.rows} x {self.columns} bytes"


@record(frozen=True)
class CopySpec:
    """A copy of a matrix of ``rows`` x ``columns`` 2-byte elements, with any strides, to contiguous rows, each padded
    to 16 bytes."""

    rows: int
    columns: int

    @property
    def padded_columns(self) -> int:
        """Elements from row to row of the copy."""
        return align(self.columns, 8)

    def __str__(self) -> str:
        return f"copying {self.rows} x {self.columns} elements"


def float_bits(x: float) -> int:
    """The bits of x as a float32, in which kernels take the rules for scales."""
    return int.from_bytes(struct.pack("<f", x), "little")


Blocks: TypeAlias = Literal["none", "row", "column", "tile"]


@record(frozen=True)
class QuantizeSpec:
    """A cast of a matrix of ``rows`` x ``columns`` to E4M3: as it is, transposed, or both.

    ``plain`` and ``transposed`` say which elements of a 128 x 128 tile share a scale: those of a row, those of a column
    (both of the input matrix), or all; with "none" there is no such output. ``gated``: the input has twice as many
    columns, and silu(left half) * right half is cast. ``epsilon``, as the bits of a float32, is the least magnitude
    from which a scale is computed. If ``source_rows`` is given, the ``rows`` rows are gathered by an index from a
    matrix with so many. ``factors``: stored scales are multiplied by a factor of each of the ``rows`` rows; if there is
    a transposed output, rows are multiplied before they are cast. ``gradient``, with ``gated``: the input has
    ``columns`` columns, and its gradient is cast, given that of silu(left half) * right half. ``groups`` matrices are
    cast, each as if it were alone, if all scales are of tiles.
    """

    rows: int
    columns: int
    dtype: Dtype
    plain: Blocks
    transposed: Blocks
    gated: bool = False
    epsilon: int = 0
    power_of_two: bool = False
    source_rows: int | None = None
    factors: bool = False
    groups: int = 1
    gradient: bool = False

    def __str__(self) -> str:
        groups = f"{self.groups} times " if self.groups > 1 else ""
        return f"quantising {groups}{self.rows} x {self.columns} elements of {self.dtype}"


@record(frozen=True)
class RowsSpec:
    """A function of each row of a matrix, whose result is ``rows`` x ``columns`` elements of ``output``; FP8 has a
    scale for each row per 128 columns, a power of two if ``power_of_two``.

    ``function`` is a name in `row_kernels.FUNCTIONS`; ``form`` says which of its forms, and ``given`` which optional
    operands there are. ``aligned``: rows of all operands begin at multiples of 16 bytes and have a multiple of eight
    columns. ``number`` is the epsilon of a norm, or the limit of a product. ``amax_min`` is the least magnitude from
    which a scale is computed.
    """

    function: str
    rows: int
    columns: int
    dtype: Dtype
    output: Dtype
    form: str = ""
    given: tuple[str, ...] = ()
    aligned: bool = True
    number: float = 0.0
    amax_min: float = 0.0
    power_of_two: bool = False

    def __str__(self) -> str:
        return f"{self.function} of {self.rows} x {self.columns} elements, {self.dtype} -> {self.output}"


@record(frozen=True)
class LogitsSpec:
    """Indexer logits of ``rows`` queries of ``heads`` x ``dim`` over ``keys`` keys, of which each query attends a
    range. With ``compressed`` a row begins with the first key that its query attends, and has ``columns`` columns;
    otherwise it has one for each key, and with ``clean`` those of other keys are minus infinity. ``num_sms`` and
    ``whole_gpu`` are as in `GemmSpec`."""

    rows: int
    keys: int
    heads: int
    dim: int
    columns: int
    compressed: bool = False
    clean: bool = False
    output: Dtype = "f32"
    num_sms: int = 1
    whole_gpu: bool = True

    @property
    def flops(self) -> int:
        """Floating-point operations if each query attends all keys; a multiply-add counts as two."""
        return 2 * self.rows * self.keys * self.heads * self.dim

    def __str__(self) -> str:
        return f"logits of {self.rows} queries over {self.keys} keys, {self.heads} heads of {self.dim}, {self.output}"


@record(frozen=True)
class PagedLogitsSpec:
    """Indexer logits of ``next_n`` tokens of each of ``batch`` requests over pages of ``page_keys`` keys each, of which
    there are ``pages``; a request has at most ``table_width``. A row has ``columns`` columns. A schedule says how the
    work is shared out among ``slots`` CTAs. ``lengths_per_token``: each token has a length of its own."""

    batch: int
    next_n: int
    heads: int
    dim: int
    page_keys: int
    pages: int
    table_width: int
    slots: int
    columns: int
    output: Dtype = "f32"
    lengths_per_token: bool = True

    def __str__(self) -> str:
        return (
            f"logits of {self.batch} x {self.next_n} tokens over pages of {self.page_keys} keys, {self.heads} heads of "
            f"{self.dim}, {self.output}"
        )


@record(frozen=True)
class LogitsScheduleSpec:
    """The schedule of paged logits: which part of the work of ``batch`` requests each of ``slots`` CTAs does. The last
    length of a request is at ``offset`` from its first."""

    batch: int
    slots: int
    offset: int = 0

    def __str__(self) -> str:
        return f"the schedule of paged logits of {self.batch} requests for {self.slots} CTAs"


@record(frozen=True)
class PrenormSpec:
    """``D[m, n] = A[m, k] @ B[n, k]^T`` by TF32 products of bf16 and float32, with few rows of B, and the sums of
    squares of the rows of A, in ``splits`` partial sums. The last three fields are as in `GemmSpec`."""

    BLOCK_K: ClassVar[int] = 64
    MOST_N: ClassVar[int] = 32

    m: int
    n: int
    k: int
    splits: int = 1
    num_sms: int = 1
    whole_gpu: bool = True
    batch_invariant: bool = False

    def __str__(self) -> str:
        return f"M={self.m}, N={self.n}, K={self.k} in {self.splits} splits, bf16 x f32 -> f32 by TF32 products"


@record(frozen=True)
class Fp4Spec:
    """``D[m, n] = A[m, k] @ B[n, k]^T`` with B in MXFP4, as `transform_fp4_weights` arranges it. ``dtype`` is A's:
    "e4m3" with scales of 1x128, or "bf16". ``absolute``: exponents have 8 bits, not 4 under the base of their row.
    The other fields are as in `GemmSpec`; ``m`` are the rows of a group if ``grouping`` is "masked". ``aligned``: rows
    of D begin at multiples of 16 bytes, and have whole pieces of 16 bytes."""

    m: int
    n: int
    k: int
    dtype: str
    absolute: bool = False
    groups: int = 1
    grouping: str = "none"
    alignment: int = 1
    expected_m: int = 0
    aligned: bool = True
    num_sms: int = 1
    whole_gpu: bool = True
    batch_invariant: bool = False

    def __str__(self) -> str:
        groups = "" if self.grouping == "none" else f" in {self.groups} {self.grouping} groups"
        return f"M={self.m}, N={self.n}, K={self.k}{groups}, {self.dtype} x MXFP4 -> bf16"


@record(frozen=True)
class DispatchSpec:
    """``top_k`` choices of each of ``tokens`` tokens among ``experts`` experts: each gets a row of its expert, to which
    the token's ``width`` elements go as E4M3 with scales of 1 x 128. ``dtype`` "e4m3": they are copied with their
    scales. ``masked``: an expert has a part of ``room`` rows, else its rows begin at a multiple of ``room``. ``given``:
    those of "weights" and "stats" that there are, and "copied" if bfloat16 elements stay what they are."""

    tokens: int
    width: int
    experts: int
    top_k: int
    room: int
    masked: bool
    dtype: Dtype = "bf16"
    given: tuple[str, ...] = ()
    num_sms: int = 1

    def __str__(self) -> str:
        return f"sending {self.tokens} tokens of {self.width} elements to {self.top_k} of {self.experts} experts"


@record(frozen=True)
class CombineSpec:
    """Sums of ``top_k`` rows of ``width`` bfloat16 elements for each of ``tokens`` tokens. ``weighted``: each row is
    multiplied by a float32 weight first. ``biased``: its expert's bias is added before."""

    tokens: int
    width: int
    top_k: int
    weighted: bool
    biased: bool = False

    def __str__(self) -> str:
        return f"adding {self.top_k} rows of {self.width} elements for each of {self.tokens} tokens"


@record(frozen=True)
class RouteSpec:
    """Rows for the ``top_k`` choices of each of ``tokens`` tokens among ``experts``, whose rows begin at multiples of
    ``room`` and of which there are ``capacity``. ``num_sms`` is as in `GemmSpec`."""

    tokens: int
    experts: int
    top_k: int
    room: int
    capacity: int
    num_sms: int = 1

    def __str__(self) -> str:
        return f"giving rows to {self.top_k} of {self.experts} experts for each of {self.tokens} tokens"


@record(frozen=True)
class DotsSpec:
    """Dot products in float32 of a row of ``width`` bfloat16 elements of each of ``tokens`` tokens with ``top_k``
    others."""

    tokens: int
    width: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.top_k} dot products of {self.width} elements for each of {self.tokens} tokens"


@record(frozen=True)
class ActivateSpec:
    """``function`` of gate and up of the rows that ``choices`` have among ``rows``, to ``columns`` elements as
    ``output`` "bf16", or "e4m3" with scales of 1 x 128. ``room``: the rows of an expert's part, or 0. ``biased``: the
    bias of the choice's expert is added before. ``limit`` holds gate and up."""

    function: str
    choices: int
    rows: int
    columns: int
    room: int
    output: str
    biased: bool
    limit: float

    def __str__(self) -> str:
        return f"{self.function} of {self.choices} of {self.rows} rows of {self.columns} elements to {self.output}"


@record(frozen=True)
class MeetSpec:
    """Meeting ``which`` of a call, 0 or 1, at which ``rank`` waits for all of ``ranks``."""

    rank: int
    ranks: int
    which: int

    def __str__(self) -> str:
        return f"meeting {self.which} of rank {self.rank} of {self.ranks}"


@record(frozen=True)
class PullSpec:
    """``tokens`` of each of ``ranks``, of ``width`` elements, of which rank ``rank`` pulls those that chose one of its
    ``experts``."""

    rank: int
    ranks: int
    tokens: int
    width: int
    experts: int
    all_experts: int
    top_k: int
    num_sms: int = 1

    def __str__(self) -> str:
        return f"pulling {self.tokens} tokens of {self.width} elements from each of {self.ranks} ranks"


@record(frozen=True)
class ReturnSpec:
    """Rows of ``width`` elements for ``top_k`` choices of ``tokens`` of each of ``ranks``."""

    ranks: int
    tokens: int
    width: int
    top_k: int
    num_sms: int = 1

    def __str__(self) -> str:
        return f"returning rows of {self.tokens} tokens to each of {self.ranks} ranks"


Spec: TypeAlias = (
    QuantizeSpec
    | RowsSpec
    | GemmSpec
    | KGroupMapsSpec
    | TransposeSpec
    | TransposeBytesSpec
    | CopySpec
    | LogitsSpec
    | PagedLogitsSpec
    | LogitsScheduleSpec
    | PrenormSpec
    | Fp4Spec
    | DispatchSpec
    | CombineSpec
    | DotsSpec
    | RouteSpec
    | ActivateSpec
    | MeetSpec
    | PullSpec
    | ReturnSpec
)


def to_json(spec: Spec) -> dict[str, Any]:
    """A JSON-ready dictionary of its fields; an epilogue is its text."""
    return asdict(spec) | ({"epilogue": str(spec.epilogue)} if isinstance(spec, GemmSpec) else {})
