"""Several operations as one call: what one writes and a later one reads lies in scratch memory, or in a buffer that the
caller keeps. Each is checked, planned and launched as it is alone, so that results have the same bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Step
from deep_gemm.runtime.operation import SCRATCH_ALIGNMENT

from ..errors import InvalidInputError
from ..records import record
from ..spec import Blocks, align
from . import checks
from .layouts import TMA_BYTES
from .quantize import scales_shape

Named: TypeAlias = dict[str, str | tuple[str, str]]
"""Arguments of an operation that are tensors, or pairs of them, by the chain's names."""

CASTS = "casts"
"""The name of a chain's own scratch memory."""


class Place(NamedTuple):
    """Where a tensor lies in a buffer of bytes. A tuple, since torch 2.11 cannot trace the making of a `record`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, a view; of a fake buffer one of its shape."""
        if checks.is_fake([buffer]):
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=buffer.device)
        start = buffer.storage_offset() + self.offset
        return buffer.detach().view(self.dtype).as_strided(self.shape, self.strides, start // self.dtype.itemsize)


class Layout:
    """Casts to FP8 and other tensors that lie one after the other in a buffer of bytes. ``"x"`` are the values of the
    cast that was added as x, ``"padded x"`` the same with the padding at the end of their rows, and ``"sf x"`` their
    scales."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.bytes = 0

    def add(self, name: str, rows: int, columns: int, blocks: Blocks, transposed: bool = False) -> Layout:
        """Add the cast of a matrix, or of its transpose. The layouts of both are those of `quantize.empty_output`."""
        height, width = (columns, rows) if transposed else (rows, columns)
        padded = -(-width // TMA_BYTES) * TMA_BYTES
        for title, shown in ((name, width), (f"padded {name}", padded)):
            self.places[title] = Place(self.bytes, (height, shown), (padded, 1), torch.float8_e4m3fn)
        self.bytes += align(height * padded, SCRATCH_ALIGNMENT)
        lines, steps = scales_shape(rows, columns, blocks, transposed)
        step = align(lines, 4)
        strides, size = ((steps, 1), lines * steps) if blocks == "tile" else ((1, step), step * steps)
        self.places[f"sf {name}"] = Place(self.bytes, (lines, steps), strides, torch.float32)
        self.bytes += align(size * 4, SCRATCH_ALIGNMENT)
        return self

    def add_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
        over: str = "",
    ) -> Layout:
        """Add a tensor, contiguous unless it has other strides. It begins where ``over`` does, a tensor that nothing
        reads once this one is written."""
        if strides is None:
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        size = sum((most - 1) * stride for most, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
        offset = self.places[over].offset if over else self.bytes
        self.places[name] = Place(offset, shape, strides, dtype)
        self.bytes = max(self.bytes, offset + align(size * dtype.itemsize, SCRATCH_ALIGNMENT))
        return self


def pair(name: str, padded: bool = False) -> tuple[str, str]:
    """The names of a cast's values and scales."""
    return f"padded {name}" if padded else name, f"sf {name}"


@record(frozen=True)
class Link:
    """An operation of a chain, with its arguments: tensors, and others."""

    operation: KernelOperation
    tensors: Named
    options: Mapping[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """The chain's names of the operation's operands."""
        found = {}
        for name, argument in self.operation.operands.items():
            whole, _, part = argument.partition("[")
            given = self.tensors[whole]
            found[name] = given if isinstance(given, str) else given[int(part[0])]
        return found

    def check(self, known: Mapping[str, Tensor]) -> Any:
        """The operation's check."""
        given = {
            name: known[named] if isinstance(named, str) else tuple(known[each] for each in named)
            for name, named in self.tensors.items()
        }
        return self.operation.check(**given, **self.options)


@record(frozen=True, eq=False)
class ChainOperands:
    """Checked operands: those of the chain, and for each of its operations with something to do its checked operands
    and the chain's names of them. ``inside`` says where the others lie: see `LaunchSequence`."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    parts: Sequence[tuple[KernelOperation, Any, Mapping[str, str]]]
    inside: Mapping[str, tuple[str, int]]
    scratch_bytes: int
    zeroed: bool


@record(frozen=True)
class Links:
    """The operations of a call, and what lies in its scratch memory and in the operand ``saved``. ``zeroed``: both are
    zeros first, because kernels read padding that no cast writes."""

    links: Iterable[Link]
    scratch: Layout
    saved: Layout
    zeroed: bool


class Chain(KernelOperation):
    """Several operations as one. `links` says which, and in which order."""

    rows: tuple[str, ...] = ()
    """Operands of any rank, which are taken as matrices of all their rows."""
    ranks: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """The numbers of dimensions of operands that are no matrices."""
    settings: tuple[str, ...] = ("forbid_transpose",)

    @abstractmethod
    def links(self, given: Mapping[str, Any]) -> Links:
        """The operations of a call with these arguments. Tensors are matrices, except a bias, ``saved`` and `ranks`."""

    def check(self, *arguments: Any, **named: Any) -> ChainOperands | None:
        """None for fake tensors, and where there is nothing to do."""
        given = self.given(arguments, named)
        tensors: dict[str, Any] = {name: given[argument] for name, argument in self.operands.items()}
        ranks = {"bias": (1,), "saved": (1,), **self.ranks, **dict.fromkeys(self.rows)}
        device = checks.check_tensors(self.name, tensors, ranks, (2,), self.outputs)
        tensors |= {name: _as_matrix(name, tensors[name]) for name in self.rows if name in tensors}
        chain = self.links({**given, **tensors})
        if "saved" in tensors:
            check_saved(tensors["saved"], chain.saved.bytes)
        new = torch.zeros if chain.zeroed else torch.empty
        buffers = {CASTS: new(chain.scratch.bytes, dtype=torch.uint8, device=device), "saved": tensors.get("saved")}
        known, inside = dict(tensors), dict[str, tuple[str, int]]()
        for name, layout in ((CASTS, chain.scratch), ("saved", chain.saved)):
            if (buffer := buffers[name]) is not None:
                known |= {each: place.of(buffer) for each, place in layout.places.items()}
                inside |= {each: (name, place.offset) for each, place in layout.places.items()}
        parts = []
        for link in chain.links:
            if (x := link.check(known)) is not None:
                parts.append((link.operation, x, names := link.names))
                # A check may have copied an operand.
                tensors |= {names[each]: y for each, y in x.tensors.items() if names[each] in tensors}
        if checks.is_fake(tensors.values()):
            return None
        for name in self.outputs:
            others = {other: y for other, y in tensors.items() if other != name}
            checks.check_no_overlap(name, tensors[name] if tensors[name].dim() == 2 else tensors[name][None], others)
        return ChainOperands(tensors, device, parts, inside, chain.scratch.bytes, chain.zeroed) if parts else None

    def launches(self, x: ChainOperands, device: int) -> LaunchSequence:
        """The launches of all operations."""
        steps = list[Step]()
        scratch: dict[str, tuple[tuple[int, ...], torch.dtype]] = {CASTS: ((x.scratch_bytes,), torch.uint8)}
        for index, (operation, operands, names) in enumerate(x.parts):
            sequence = operation.launches(operands, device)
            own = {name: f"{name} of {index}" for name in sequence.scratch}
            scratch |= {own[name]: what for name, what in sequence.scratch.items()}
            named = {**names, **own}
            for step in sequence.steps:
                places = {kernel: named[place] for kernel, place in step.operands.items()}
                steps.append(replace(step, operands=places))
        used = {place for step in steps for place in step.operands.values()}
        inside = {name: place for name, place in x.inside.items() if name in used}
        return LaunchSequence(tuple(steps), scratch, inside, x.zeroed)

    def parts(self, x: ChainOperands) -> Sequence[tuple[KernelOperation, Any]]:
        """See `KernelOperation.parts`."""
        return [(operation, operands) for operation, operands, _ in x.parts]

    def reference(self, x: ChainOperands) -> None:
        """The references of all operations, in order."""
        for operation, operands in self.parts(x):
            operation.reference(operands)

    def shape(self, x: ChainOperands) -> str:
        """The sizes of the last operation."""
        operation, operands, _ = x.parts[-1]
        return operation.shape(operands)

    def flops(self, x: ChainOperands) -> int:
        """The floating-point operations of all of them."""
        return sum(operation.flops(operands) for operation, operands in self.parts(x))


def _as_matrix(name: str, x: Tensor) -> Tensor:
    """x (..., columns) as one matrix of all rows, a view."""
    if x.dim() == 2:
        return x
    if x.dim() == 0 or not x.is_contiguous():
        raise InvalidInputError(
            f"{name} must be a matrix, or contiguous with more dimensions, but it is {checks.shape_of(x)} with strides "
            f"{x.stride()}. Pass .contiguous()."
        )
    return x.detach().view(x.numel() // max(1, x.shape[-1]), x.shape[-1])


def check_saved(saved: Tensor, wanted: int) -> None:
    """Refuse a buffer of another size or layout than `Layout` gives it."""
    if saved.dtype != torch.uint8 or saved.shape[0] != wanted:
        raise InvalidInputError(
            f"saved must be torch.uint8 with {wanted} elements for these operands, but it is {saved.dtype} "
            f"{checks.shape_of(saved)}."
        )
    if checks.is_fake([saved]):
        return
    if (wanted > 1 and saved.stride(0) != 1) or saved.storage_offset() % TMA_BYTES or saved.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"saved must be contiguous and begin at a multiple of {TMA_BYTES} bytes. Pass one that torch.empty made."
        )
