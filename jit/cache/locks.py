"""Locks between processes. The system drops the lock of a process that dies, though a forked child inherits its
descriptor.

A lock is an open file, and nothing else in this process knows of it. A signal handler may raise between any two steps
of Python code, and would leave a library that counts its locks in Python believing that one is held for ever. Here an
exception before the `with` statement closes the file, and the `with` statement closes it in C, where no handler runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time

from deep_gemm.jit.cache.files import Folder, Owned, owned
from deep_gemm.jit.forking import forget

# A link or a directory in place of the file is an error; a FIFO does not block.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_POLL = 0.01  # seconds
# The directories in which this process has opened locks, as the system names them.
_folders: set[str] = set()


def take(folder: Folder, name: str, limit: float) -> Owned:
    """The lock file `name`, open and locked until it is closed: `with take(...):`.

    Raises TimeoutError if another holds it for `limit` seconds, and OSError where there are no locks.
    """
    end = time.monotonic() + limit
    _remember(folder)
    while True:
        file = owned(name, _FLAGS, directory=folder.fd)
        try:
            while not _locked(file):
                if time.monotonic() >= end:
                    raise TimeoutError(f"{folder.path}/{name} is held")
                time.sleep(_POLL)
            # Its last holder may have deleted it, and others then lock a new one.
            if os.fstat(file.fileno()).st_nlink > 0:
                return file
            if time.monotonic() >= end:
                raise TimeoutError(f"{folder.path}/{name} was held")
        except BaseException as error:
            file.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                folder.unlink(name)  # without locks, it is of no use
            raise
        file.close()


def _locked(file: Owned) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(folder: Folder) -> None:
    """Delete the lock files that nobody holds: those of killed processes."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder.fd):
            with contextlib.suppress(OSError), take(folder, name, 0.0):
                folder.unlink(name)


def _remember(folder: Folder) -> None:
    """A forked child is to close its copies of locks in this directory.

    The system drops a lock when its last descriptor is closed: if this process were killed, a child that lives on would
    keep the lock. Directories are noted, not locks, so that there is nothing to undo when a lock ends.
    """
    _register()
    with contextlib.suppress(OSError):
        _folders.add(os.readlink(f"/proc/self/fd/{folder.fd}"))


@functools.lru_cache(maxsize=1)
def _register() -> None:
    os.register_at_fork(after_in_child=_drop)


def _drop() -> None:
    with contextlib.suppress(OSError):
        forget(number for number in map(int, os.listdir("/proc/self/fd")) if _is_lock(number))


def _is_lock(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.dirname(os.readlink(f"/proc/self/fd/{number}")) in _folders
    return False
