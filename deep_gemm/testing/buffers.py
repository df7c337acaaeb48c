"""Tensors in the middle of a larger allocation whose other bytes are NaN, and must still be so afterwards: writing
outside a tensor changes the guard, reading outside it gives NaN. The filler byte, 0xFF, is NaN in all our dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.spec import align
from deep_gemm.tensors import check_tensor

GUARD_BYTES = 4096
_FILLER = 0xFF
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Guarded:
    """``tensor`` is a view into ``memory`` (bytes); all other bytes are filler.

    >>> d = deep_gemm.testing.guarded((8, 32), torch.bfloat16, "cpu")
    >>> d.memory[0] = 1
    >>> try:
    ...     d.check("d")
    ... except AssertionError as error:
    ...     print(str(error)[:32])
    1 bytes around d were overwritte
    """

    tensor: Tensor
    memory: Tensor

    def check(self, name: str = "the tensor") -> None:
        """Raise AssertionError if a byte outside the tensor, gaps between its rows included, has changed."""
        check_tensor(name, self.tensor)
        check_tensor(f"the memory around {name}", self.memory)
        expected = torch.full_like(self.memory, _FILLER)
        bits = _BITS[self.tensor.element_size()]
        view, mine = self.tensor, self.tensor.view(bits) if self.tensor.numel() else None
        if mine is not None:
            expected.view(bits).as_strided(mine.shape, mine.stride(), mine.storage_offset()).copy_(mine)
        if not torch.equal(expected, self.memory):
            changed = (expected != self.memory).nonzero().flatten() - int(view.storage_offset()) * view.element_size()
            raise AssertionError(
                f"{len(changed)} bytes around {name} were overwritten, from byte {int(changed[0])} of it "
                f"to byte {int(changed[-1])}; it is {tuple(view.shape)} {view.dtype}, strides {view.stride()}"
            )


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> Guarded:
    """A tensor of NaN with guards around it.

    Args:
        strides: in elements; row-major without gaps by default.
        offset: in bytes, how far past an aligned address (of 64 bytes at least) the tensor starts; a multiple of the
            element's size.

    >>> d = deep_gemm.testing.guarded((8, 32), torch.bfloat16, "cpu")
    >>> deep_gemm.bf16_gemm_nt(torch.ones(8, 64).bfloat16(), torch.ones(32, 64).bfloat16(), d.tensor)
    >>> d.check("d")
    """
    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    size = torch.empty((), dtype=dtype, device="meta").element_size()
    if offset % size:
        raise InvalidInputError(f"offset must be a multiple of the {size} bytes of {dtype}, but it is {offset}.")
    empty = any(length == 0 for length in shape)
    span = 0 if empty else sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + 1
    total = align(GUARD_BYTES + offset + span * size + GUARD_BYTES, 64)
    memory = torch.full((total,), _FILLER, dtype=torch.uint8, device=device)
    tensor = memory.view(dtype).as_strided(tuple(shape), tuple(strides), (GUARD_BYTES + offset) // size)
    return Guarded(tensor, memory)


def guarded_copy(values: Tensor, strides: Sequence[int] | None = None, offset: int = 0) -> Guarded:
    """A copy of ``values`` with guards around it; ``strides`` and ``offset`` as in `guarded`.

    >>> deep_gemm.testing.guarded_copy(torch.ones(8, 32)).tensor.sum().item()
    256.0
    """
    check_tensor("values", values)
    out = guarded(values.shape, values.dtype, values.device, strides, offset)
    out.tensor.copy_(values)
    return out
