"""A lock that a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """`threading.Lock` as a context manager, replaced in a child after fork: the thread of the parent that held it
    does not exist there, so nobody would ever release it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> ForkLock:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        # Unlocked only in a child that was forked by the thread inside the `with` block.
        if self._lock.locked():
            self._lock.release()

    def _reset(self) -> None:
        self._lock = threading.Lock()


_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
