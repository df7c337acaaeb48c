"""Fork safety: locks that a forked child finds free, and forks that wait until no thread is inside a library."""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """A `threading.Lock` that a forked child finds free: `with fork_lock.lock:`.

    The thread of the parent that held it does not exist in the child, so nobody would ever release it: the child gets a
    new one. The `with` statement names the lock itself, which is taken in C, where no signal handler runs. In a method
    written in Python, a handler could raise after the lock was taken and before the block began.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _all.add(self)

    def _reset(self) -> None:
        self.lock = threading.Lock()


class ForkWaits:
    """A context manager around calls into a library with locks of its own: a fork waits until no thread is inside.

    Otherwise a child could find such a lock held by a thread that does not exist there, and wait for ever. Any number
    of threads may be inside at once; one that is inside must not fork.
    """

    def __init__(self) -> None:
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._forks = 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _before_fork(self) -> None:
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._inside)

    def _after_fork_in_parent(self) -> None:
        with self._changed:
            # A ForkWaits that another thread created during the fork has counted no fork: it stays at 0.
            self._forks = max(self._forks - 1, 0)
            self._changed.notify_all()


_all: weakref.WeakSet[ForkLock | ForkWaits] = weakref.WeakSet()


def _waiting() -> list[ForkWaits]:
    return [item for item in list(_all) if isinstance(item, ForkWaits)]


def _before_fork() -> None:
    for item in _waiting():
        item._before_fork()


def _after_fork_in_parent() -> None:
    for item in _waiting():
        item._after_fork_in_parent()


def _after_fork() -> None:
    for item in list(_all):
        item._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
