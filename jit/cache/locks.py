"""A lock between processes that dies with who took it, though a forked child inherits its descriptor."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

_taken: list[str] = []


@contextlib.contextmanager
def not_inherited(path: Path) -> Iterator[None]:
    """While the block runs, a forked child closes its copies of descriptors of the lock file `path`.

    The system drops a lock when its last descriptor is closed: if we are killed, a child that lives on would keep it.
    filelock does so itself from 3.32 on; older ones come with many an installation.
    """
    _register()
    name = os.path.realpath(path)
    # Before the lock is taken, so that no fork falls in between. Both are atomic.
    _taken.append(name)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # in a child that was forked inside the block
            _taken.remove(name)


@functools.lru_cache(maxsize=1)
def _register() -> None:
    # Hooks run in the order in which they were registered: what filelock closes is closed by then.
    import filelock  # noqa: F401

    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd") if _taken else ():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)") in _taken:
                    os.close(int(number))
    _taken.clear()
