"""Forks and exit: locks that a forked child finds free, and forks and exits that wait until no thread is inside a
library.

A signal handler may raise between any two steps of Python code, and Python ignores an exception in what it calls around
a fork. So whatever must be undone afterwards is done and undone by functions in C, which no handler interrupts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_POLL = 0.005  # seconds
# One for each fork between the first process and this one.
_forks: list[None] = []

os.register_at_fork(after_in_child=functools.partial(_forks.append, None))


class ForkLock:
    """A `threading.Lock` that a forked child finds free: `with fork_lock.lock:`.

    The thread of the parent that held it does not exist in the child, so nobody would ever release it: the child gets a
    new one. The `with` statement names the lock itself, which is taken in C, where no signal handler runs. In a method
    written in Python, a handler could raise after the lock was taken and before the block began.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    @property
    def lock(self) -> threading.Lock:
        """The lock of this process."""
        here = len(_forks)
        return self._locks.get(here) or self._locks.setdefault(here, threading.Lock())


def forget(descriptors: Iterable[int]) -> None:
    """In a forked child: let copies of the parent's descriptors lead nowhere, so that they hold nothing open if the
    parent ends. They are not closed: code that the child was forked in may close these numbers."""
    with contextlib.suppress(OSError), open(os.devnull, "rb", buffering=0) as nothing:
        for number in descriptors:
            with contextlib.suppress(OSError):
                os.dup2(nothing.fileno(), number, inheritable=False)


def late(module: str) -> Any:
    """A module that is imported where it is needed first. A fork waits meanwhile: its child would find the lock of the
    module held by a thread that does not exist there, and wait for ever when it imports it too."""
    return _imports.run(functools.partial(importlib.import_module, module))


class ForkWaits:
    """Calls into a library with locks of its own: a fork waits until no thread is inside, and so does `close`.

    Otherwise a child could find such a lock held by a thread that does not exist there, and wait for ever. Any number
    of threads may be inside at once; one that is inside must not fork. One that comes during a fork waits for its end,
    but at most `limit` seconds. A fork does not wait for a thread that has been inside for `longest` seconds. Each of
    these objects lives as long as the process.
    """

    def __init__(self, limit: float = 60.0, longest: float = math.inf) -> None:
        self._limit, self._longest = limit, longest
        self._closed = False
        # One for each thread in `run`, locked while it is inside; and until when forks wait for it.
        self._marks: list[tuple[threading.Lock, float]] = []
        # Locked during a fork.
        self._gate = threading.Lock()
        # Before a fork, what was registered last is called first.
        os.register_at_fork(before=self._wait, after_in_child=self._marks.clear)
        gate = self._gate
        os.register_at_fork(before=gate.acquire, after_in_parent=gate.release, after_in_child=gate.release)

    def run(self, work: Callable[[], T], for_main: bool = False) -> T:
        """`work()`, with this thread inside. `for_main`: the main thread waits for it, so that it may also be done at
        exit."""
        now, mark = time.monotonic(), threading.Lock()
        end, entry = now + self._limit, (mark, now + self._longest)
        self._marks.append(entry)
        try:
            while True:
                # The mark first: then either the fork sees it, or it is seen here that the fork has begun.
                with mark:
                    closed = self._closed and not for_main
                    if not closed and (not self._gate.locked() or time.monotonic() >= end):
                        return work()
                time.sleep(_POLL)
        finally:
            self._marks.remove(entry)
            while self._closed and not for_main:
                time.sleep(1)  # the process ends meanwhile; a daemon thread has nothing to report any more

    def close(self, cancel: Callable[[], None], limit: float) -> bool:
        """At exit: nobody enters any more but for the main thread. Then ask those inside to leave by `cancel()`, and
        wait `limit` seconds for them. Returns whether all have left."""
        self._closed = True
        cancel()
        end = time.monotonic() + limit
        while self._occupied() and time.monotonic() < end:
            time.sleep(_POLL)
        return not self._occupied()

    def _wait(self) -> None:
        while self._occupied(time.monotonic()):
            time.sleep(_POLL)

    def _occupied(self, now: float = -math.inf) -> bool:
        return any(mark.locked() and now < until for mark, until in self._marks.copy())


_imports = ForkWaits()
