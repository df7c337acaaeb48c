"""What runs before a GEMM: transposes of operands and scales that TMA cannot read as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import Step
from ..spec import TransposeBytesSpec, TransposeSpec, align
from . import checks
from .checks import TMA_BYTES
from .fp8_checks import is_k_major


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
