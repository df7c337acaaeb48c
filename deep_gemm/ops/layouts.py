"""Memory layouts of operands: the strides with which TMA addresses them, and launches that bring others into such a
layout."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.runtime.calls import Parameter, Step

from ..errors import InvalidInputError
from ..jit.driver.tensor_map import ADDRESS_ALIGNMENT
from ..spec import CopySpec, Major, QuantizeSpec, Spec, TransposeBytesSpec, TransposeSpec, align
from .checks import shape_of

TMA_BYTES = ADDRESS_ALIGNMENT
"""The Tensor Memory Accelerator needs base addresses and row strides that are multiples of this many bytes."""


def tma_writable(d: Tensor) -> bool:
    """Whether TMA can write d without writing past its rows. It needs an aligned base, aligned rows, and rows of whole
    16-byte units, because it writes whole units (H200: with N = 2436 it overwrote eight bytes past the end of each
    row)."""
    rows, columns = d.shape
    size = d.element_size()
    aligned = d.data_ptr() % TMA_BYTES == 0 and (rows <= 1 or d.stride(0) * size % TMA_BYTES == 0)
    return aligned and columns * size % TMA_BYTES == 0


def axes(form: str | None) -> dict[str, str]:
    """`KernelOperation.axes` of a product in ``form``, "tn" for a (K, M) and b (K, N)."""
    form = form or "nt"
    return {"a": "mk" if form[0] == "n" else "km", "b": "nk" if form[1] == "t" else "kn", "c": "mn", "d": "mn"}


def form(forms: tuple[str, ...] = ("nt", "nn", "tn", "tt")) -> Parameter:
    """The parameter that says in which of these forms a and b are given."""
    return Parameter("form", "str", forms[0], "internal", choices=forms)


def row_stride(x: Tensor) -> int:
    """Elements from row to row. A single row may have any stride, but TMA needs a multiple of 16 bytes."""
    return x.stride(0) if x.shape[0] > 1 else align(x.shape[1], TMA_BYTES // x.element_size())


def is_k_major(x: Tensor) -> bool:
    """Whether K is contiguous in x (rows, K), as the tensor cores need FP8."""
    rows, k = x.shape
    return x.numel() == 0 or ((k == 1 or x.stride(1) == 1) and (rows == 1 or x.stride(0) >= k))


def addressed(x: Tensor) -> tuple[int, int] | None:
    """Strides with which TMA can address x (rows, K): (row stride, 1) if it is K-major, (1, stride of K) if it is
    contiguous along rows, None otherwise. A dimension of size 1 may have any stride."""
    (rows, k), (outer, inner), piece = x.shape, x.stride(), TMA_BYTES // x.element_size()
    if x.data_ptr() % TMA_BYTES:
        return None
    if (k == 1 or inner == 1) and (rows == 1 or (outer >= k and outer % piece == 0)):
        return row_stride(x), 1
    if (rows == 1 or outer == 1) and (k == 1 or (inner >= rows and inner % piece == 0)):
        return 1, (inner if k > 1 else align(rows, piece))
    return None


def flat_stride(x: Tensor) -> int | None:
    """Elements from row to row of x (rows, columns), or of x (groups, rows, columns) as one matrix of all rows. None if
    its columns are not contiguous, its rows overlap, or its groups do not lie right after one another."""
    groups, rows, columns = x.shape if x.dim() == 3 else (1, *x.shape)
    if columns > 1 and x.stride(-1) != 1:
        return None
    if rows > 1:
        stride = x.stride(-2)
        if groups > 1 and x.stride(0) != rows * stride:
            return None
    else:
        stride = x.stride(0) if groups > 1 else align(columns, TMA_BYTES // x.element_size())
    return stride if stride >= columns else None


def flat(x: Tensor) -> Tensor:
    """x as one matrix of all rows, a view. `flat_stride` must not be None."""
    if x.dim() == 2:
        return x
    return x.as_strided((x.numel() // max(1, x.shape[-1]), x.shape[-1]), (flat_stride(x) or 0, 1))


def scales_stride(sf: Tensor) -> int | None:
    """The stride of sf (rows, blocks), or sf (groups, rows, blocks), from one block to the next over all groups, if TMA
    can read it as a matrix of rows x (groups * blocks); None otherwise."""
    groups, rows, blocks = sf.shape if sf.dim() == 3 else (1, *sf.shape)
    if sf.numel() == 0:
        return align(rows, 4)
    step = sf.stride(-1) if blocks > 1 else sf.stride(0) if groups > 1 else align(rows, 4)
    if sf.data_ptr() % TMA_BYTES or (rows > 1 and sf.stride(-2) != 1):
        return None
    if step < rows or step * sf.element_size() % TMA_BYTES or (groups > 1 and sf.stride(0) != blocks * step):
        return None
    return step


def check_start(name: str, x: Tensor) -> None:
    """Refuse an operand whose address is not a multiple of 16 bytes."""
    if past := x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
            "It is probably a view into a larger tensor: pass a copy (.clone())."
        )


def check_stride(name: str, x: Tensor, stride: int, dimension: str = "row") -> None:
    """Refuse an operand that TMA cannot read with this stride."""
    if stride * x.element_size() % TMA_BYTES:
        raise InvalidInputError(
            f"the {dimension} stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is "
            f"{stride * x.element_size()}. Allocate its rows with padding."
        )
    check_start(name, x)


def check_k_major(name: str, x: Tensor, k: str = "K") -> int:
    """The row stride of all rows of a K-major operand, or one that is contiguous along ``k``; refuse what TMA cannot
    read."""
    stride = flat_stride(x)
    if stride is None:
        groups = ", with each group right after the one before" if x.dim() == 3 else ""
        raise InvalidInputError(
            f"{name} must be {k}-major: {k} contiguous, rows of their own{groups}. But it is {shape_of(x)} with "
            f"strides {x.stride()}. Pass .contiguous()."
        )
    check_stride(name, x, stride)
    return stride


class Preparation:
    """The launches that prepare the operands of a GEMM, and what the GEMM then takes: for each operand where it is, an
    operand of the call or a name in ``scratch``, and its strides; and the numbers of the step."""

    def __init__(self, operands: dict[str, str]) -> None:
        self.operands = operands
        self.strides: dict[str, tuple[int, ...]] = {}
        self.numbers: dict[str, float | tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.scratch: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def add_values(self, name: str, x: Tensor) -> Major:
        """Add A or B of a dense product. FP8 is transposed first if it is not K-major, and 16-bit values are copied if
        TMA cannot read them. Returns the dimension that is contiguous then."""
        way, (rows, k) = addressed(x), x.shape
        if way is not None and (way[1] == 1 or x.element_size() > 1):
            self.strides[name] = way
            return "k" if way[1] == 1 else "mn"
        if x.element_size() == 1:
            columns = k
            self._launch_before(name, "transposed", TransposeBytesSpec(rows, k), x.stride(), (rows, k), x.dtype)
        else:
            columns = (copy := CopySpec(rows, k)).padded_columns
            self._launch_before(name, "copied", copy, x.stride(), (rows, columns), x.dtype)
        self.strides[name] = (columns, 1)
        return "k"

    def add_row_scales(self, name: str, sf: Tensor) -> None:
        """Add scales (rows, blocks of K), or those of all groups, which kernels read as rows x (groups * blocks). They
        are transposed first if TMA cannot read them as they are."""
        *groups, rows, blocks = sf.shape
        step = scales_stride(sf)
        if step is None:
            step = align(rows, 4)
            strides = sf.stride() if groups else (0, *sf.stride())
            transpose = TransposeSpec(rows, blocks, *groups)
            self._launch_before(name, "transposed", transpose, strides, (*groups, blocks, step), sf.dtype)
        self.strides[name] = (1, step)

    def add_product_scales(self, name: str, sf: Tensor) -> None:
        """Add scales (products, rows, blocks of K), which kernels read as one matrix of rows x blocks for each product.
        They are transposed first if TMA cannot read them as they are."""
        products, rows, blocks = sf.shape
        step = scales_stride(sf[0])
        apart = sf.stride(0) if products > 1 else blocks * (step or 0)
        if step is None or apart <= 0 or apart * sf.element_size() % TMA_BYTES:
            step = align(rows, 4)
            apart = blocks * step
            transpose = TransposeSpec(rows, blocks, products)
            self._launch_before(name, "transposed", transpose, sf.stride(), (products, blocks, step), sf.dtype)
        self.strides[name] = (apart, 1, step)

    def _launch_before(
        self, name: str, done: str, spec: Spec, strides: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Add a launch that writes operand ``name`` to scratch memory, and let the GEMM read that."""
        place = self.operands[name] = f"{name} {done}"
        self.scratch[place] = (shape, dtype)
        self.steps.append(Step(spec, {"source": strides}, {"source": name, "target": place}))

    def add_cast_of_product(self, spec: QuantizeSpec) -> Step:
        """The cast of the product to an FP8 d, and its scales. The product is in scratch memory then."""
        place, row = "float32 d", (spec.columns, 1)
        strides = {"x": row, "values": self.strides["d"], "scales": self.strides.pop("sfd")}
        places = {"x": place, "values": self.operands["d"], "scales": self.operands.pop("sfd")}
        self.scratch[place] = (spec.rows, spec.columns), torch.float32
        self.strides["d"], self.operands["d"] = row, place
        return Step(spec, strides, places)
