"""Memory through which the CTAs of a launch give each other sums: one piece for each stream, since the launches of a
stream follow each other, and one for each stream of each CUDA graph, since graphs may run beside anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .jit.driver import api
from .jit.driver.launch import Launch
from .kernels.stream_k import FLAG_BYTES

_lock = threading.Lock()
_kept: dict[tuple[int, int], Tensor] = {}
_captured: dict[tuple[int, int], tuple[int, Tensor]] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def of_stream(device: int, stream: int, size: int) -> Tensor:
    """At least ``size`` bytes with flags of zero, for launches on ``stream``, the current one of ``device``. Who has
    been given a smaller piece keeps it."""
    with _lock:
        found = _kept.get((device, stream))
        if found is None or found.numel() < size:
            found = _kept[device, stream] = _fresh(device, size)
        return found


def of_capture(device: int, stream: int, size: int) -> Tensor:
    """The same for launches that are being captured on ``stream``, in the memory of the graph, which is what keeps it:
    the flags are cleared once in each replay."""
    capture = _capture_id(stream)
    with _lock:
        known, found = _captured.get((device, stream), (None, None))
        if found is None or known != capture or found.numel() < size:
            found = _fresh(device, size)
            _captured[device, stream] = capture, found
        return found


def _fresh(device: int, size: int) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    memory[:FLAG_BYTES].zero_()
    return memory


def _capture_id(stream: int) -> int:
    status, _, identity, *_ = api.cuda().cuStreamGetCaptureInfo(stream)
    api.check(int(status), "cuStreamGetCaptureInfo", f"stream {stream:#x}")
    return int(identity)


class WorkspaceLaunch:
    """Launches that need a workspace of ``size`` bytes. ``make`` makes the launch record for one at an address."""

    def __init__(self, make: Callable[[int], Launch], device: int, stream: int, size: int) -> None:
        self._make, self._device, self._stream, self._size = make, device, stream, size
        self._eager: tuple[Launch, Tensor] | None = None

    def __call__(self) -> None:
        """Launch, on the current stream of the current device. Raises DriverError."""
        if torch.cuda.is_current_stream_capturing():
            workspace = of_capture(self._device, self._stream, self._size)
            self._make(workspace.data_ptr())()
            return
        if self._eager is None:
            workspace = of_stream(self._device, self._stream, self._size)
            self._eager = self._make(workspace.data_ptr()), workspace
        self._eager[0]()
