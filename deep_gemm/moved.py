"""Calls that differ from one that was made before in nothing but where their operands are.

Activations are seldom where they were, and each layer has weights of its own: what was found out of sizes, strides and
dtypes holds for all of these. What depends on addresses is looked at again: alignment, overlap, on which device they
are, and whether weights were promised to be constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import engine
from .kernels.sm90_fp8_launch import Addresses, Geometry
from .params import GemmProblem, align
from .validate import TMA_BYTES, FP8GemmOperands, byte_range

Places = tuple[int, int, int, int, int]
"""Addresses of a, its scales, b, its scales, and d."""


@dataclass(frozen=True)
class Gemm:
    """A call but for its addresses, of which ``addresses`` are an example; constant_b: whether B and its scales were
    promised to be constant."""

    problem: GemmProblem
    geometry: Geometry
    addresses: Addresses
    device: int
    stream: int
    constant_b: bool


class MovedCall:
    """A call of which ``gemm`` is the first, on operands ``x`` or on others of these sizes, strides and dtypes. Holds
    addresses and sizes only, never the caller's tensors."""

    def __init__(self, gemm: Gemm, x: FP8GemmOperands) -> None:
        self._gemm = gemm
        ranges = [byte_range(tensor) for tensor in (x.a, x.sfa, x.b, x.sfb, x.d)]
        self._first = [start for start, _ in ranges]
        self._bytes = [end - start for start, end in ranges]
        self._scales = None if x.sfa_ready else _LooseScales(x.sfa)
        self._run: Callable[[Places], None] | None = None

    def fits(self, at: Places) -> bool:
        """Whether operands there are aligned as the first ones were, and d shares no memory with the others."""
        a, sfa, b, sfb, d = at
        first_a, first_sfa, first_b, _, first_d = self._first
        if ((a ^ first_a) | (sfa ^ first_sfa) | (b ^ first_b) | (d ^ first_d)) % TMA_BYTES:
            return False
        bytes_a, bytes_sfa, bytes_b, bytes_sfb, bytes_d = self._bytes
        end = d + bytes_d  # written out, since each call that moved comes here: a loop takes 1 us longer
        return (
            (end <= a or a + bytes_a <= d)
            and (end <= sfa or sfa + bytes_sfa <= d)
            and (end <= b or b + bytes_b <= d)
            and (end <= sfb or sfb + bytes_sfb <= d)
        )

    def __call__(self, at: Places) -> None:
        """Multiply operands at addresses that fit. Raises DriverError."""
        if self._run is None:  # two threads may come here at once: either's records will do
            self._run = self._ready() if self._scales is None else self._transposing(self._scales)
        self._run(at)

    def _ready(self) -> Callable[[Places], None]:
        launch = self._moving(self._gemm.addresses)

        def run(at: Places) -> None:
            launch({"a": at[0], "sfa": at[1], "b": at[2], "sfb": at[3], "d": at[4]})

        return run

    def _transposing(self, scales: _LooseScales) -> Callable[[Places], None]:
        gemm, first = self._gemm, scales.room().data_ptr()
        transpose = engine.transpose_moving(
            self._first[1], first, scales.shape, scales.strides, gemm.device, gemm.stream
        )
        launch = self._moving(replace(gemm.addresses, sfa=first))

        def run(at: Places) -> None:
            room = scales.room()  # given back when both launches are under way
            target = room.data_ptr()
            transpose({"source": at[1], "target": target})
            launch({"a": at[0], "sfa": target, "b": at[2], "sfb": at[3], "d": at[4]})

        return run

    def _moving(self, addresses: Addresses) -> Callable[[Mapping[str, int]], None]:
        gemm = self._gemm
        return engine.fp8_gemm_moving(
            gemm.problem, gemm.geometry, addresses, gemm.device, gemm.stream, constant_b=gemm.constant_b
        )


class _LooseScales:
    """Scales of A that the kernel cannot read as they lie, and are transposed before each call."""

    def __init__(self, sfa: Tensor) -> None:
        self.shape = (1, sfa.shape[0], sfa.shape[1])
        self.strides = (0, sfa.stride(0), sfa.stride(1))
        self._padded = (sfa.shape[1], align(sfa.shape[0], 4))
        self._device = sfa.device

    def room(self) -> Tensor:
        """Memory for the transposed ones, which torch hands out: often the same."""
        return torch.empty(self._padded, dtype=torch.float32, device=self._device)
