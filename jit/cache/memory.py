"""The innermost layer: what this process has built or read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from deep_gemm.jit.forking import ForkLock

T = TypeVar("T")


class MemoryCache(Generic[T]):
    """A dictionary that threads share. Unbounded: a deployment uses hundreds of kernels of some tens of kilobytes."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, T] = {}
        self._lock = ForkLock()

    def get(self, key: Hashable) -> T | None:
        return self._entries.get(key)

    def put(self, key: Hashable, value: T) -> T:
        """Keep `value` unless there is one already; returns the one that is kept."""
        with self._lock.lock:
            return self._entries.setdefault(key, value)

    def clear(self) -> int:
        with self._lock.lock:
            count = len(self._entries)
            self._entries.clear()
            return count

    def __len__(self) -> int:
        return len(self._entries)
