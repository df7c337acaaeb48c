"""Memory through which the CTAs of a launch give each other sums.

Slots hold the sums, and flags, which are zero between launches, say that they are there. The launches of a stream
follow each other, so that one piece of memory for each stream does. A CUDA graph may run beside anything, other graphs
that were captured on the same stream included, so that it has flags of its own for each of its streams, and takes slots
from the memory of the graph for each launch, which others of the graph may use as well.

What is kept comes from the driver: torch wants back all that its pools for CUDA graphs have handed out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

import torch

from .errors import DriverError
from .jit.driver import api
from .jit.driver.launch import Launch
from .jit.driver.memory import allocate_zeros
from .kernels.stream_k import FLAG_BYTES

LEAST_SLOTS = 132 * 256 * 128 * 4
"""Bytes of slots for a stream: what the largest tiles need on an H200, so that a piece seldom proves too small. One
that does is given up, not freed: launches that use it may still be waiting."""

FLAGS_AT_ONCE = 64
"""Captures whose flags are allocated together: a graph may be replayed at any time, so that they are never freed."""

_lock = threading.Lock()
_kept: dict[tuple[int, int], tuple[int, int]] = {}
_captured: dict[tuple[int, int], tuple[int, int]] = {}
_spare_flags: dict[int, list[int]] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def of_stream(device: int, stream: int, size: int) -> tuple[int, int]:
    """Addresses of flags and of at least ``size`` bytes of slots, for launches on ``stream`` of ``device``."""
    with _lock:
        address, there = _kept.get((device, stream), (0, 0))
        if there < size:
            there = max(size, LEAST_SLOTS)
            address = _allocate(device, FLAG_BYTES + there)
            _kept[device, stream] = address, there
        return address, address + FLAG_BYTES


def flags_of_capture(device: int, stream: int) -> int:
    """The address of flags for launches that are being captured on ``stream`` of ``device``: the same within one
    capture."""
    capture = _capture_id(stream)
    with _lock:
        known, flags = _captured.get((device, stream), (None, 0))
        if known != capture:
            spare = _spare_flags.setdefault(device, [])
            if not spare:
                first = _allocate(device, FLAGS_AT_ONCE * FLAG_BYTES)
                spare += range(first, first + FLAGS_AT_ONCE * FLAG_BYTES, FLAG_BYTES)
            flags = spare.pop()
            _captured[device, stream] = capture, flags
        return flags


def _allocate(device: int, size: int) -> int:
    try:
        return allocate_zeros(device, size)
    except DriverError as error:
        if "OUT_OF_MEMORY" not in error.name or torch.cuda.is_current_stream_capturing():
            raise
        torch.cuda.empty_cache()  # what torch keeps for itself may be enough
        return allocate_zeros(device, size)


def _capture_id(stream: int) -> int:
    status, _, identity, *_ = api.cuda().cuStreamGetCaptureInfo(stream)
    api.check(int(status), "cuStreamGetCaptureInfo", f"stream {stream:#x}")
    return int(identity)


class WorkspaceLaunch:
    """A launch with ``size`` bytes of slots. ``make`` makes its record for addresses of flags and slots."""

    def __init__(self, make: Callable[[int, int], Launch], device: int, stream: int, size: int) -> None:
        self._make, self._device, self._stream, self._size = make, device, stream, size
        self._eager: Launch | None = None

    def __call__(self) -> None:
        """Launch, on the current stream of the current device. Raises DriverError."""
        if torch.cuda.is_current_stream_capturing():
            # Freed at once, and reused by what follows on the stream only.
            slots = torch.empty(self._size, dtype=torch.uint8, device=f"cuda:{self._device}")
            self._make(flags_of_capture(self._device, self._stream), slots.data_ptr())()
            return
        if self._eager is None:
            self._eager = self._make(*of_stream(self._device, self._stream, self._size))
        self._eager()


class MovingWorkspaceLaunch:
    """The same for operands that are elsewhere from call to call: ``launch`` is called with where they are, and where
    flags and slots are."""

    def __init__(self, launch: Callable[[Mapping[str, int]], None], device: int, stream: int, size: int) -> None:
        self._launch, self._device, self._stream, self._size = launch, device, stream, size

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launch, on the current stream of the current device. Raises DriverError."""
        if torch.cuda.is_current_stream_capturing():
            room = torch.empty(self._size, dtype=torch.uint8, device=f"cuda:{self._device}")
            flags, slots = flags_of_capture(self._device, self._stream), room.data_ptr()
        else:
            flags, slots = of_stream(self._device, self._stream, self._size)
        self._launch({**addresses, "flags": flags, "slots": slots})
