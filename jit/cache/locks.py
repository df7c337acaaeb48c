"""Locks between processes. The system drops the lock of a process that dies, though a forked child inherits its
descriptor.

A lock is an open file, and nothing else in this process knows of it. A signal handler may raise between any two steps
of Python code, and would leave a library that counts its locks in Python believing that one is held for ever. Here an
exception before the `with` statement closes the file, and the `with` statement closes it in C, where no handler runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import struct
import time
from collections.abc import Callable

from deep_gemm.jit.cache.files import Folder, Owned, owned
from deep_gemm.jit.forking import forget

# A link or a directory in place of the file is an error; a FIFO does not block.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_POLL = 0.01  # seconds
KEYS = "keys"
"""The file that has a byte for each name. Nothing is ever written to it, and it is never deleted."""
_SET = getattr(fcntl, "F_OFD_SETLK", 37)
_FLOCK = struct.Struct("@hhqqi4x")
# The directories in which this process has opened locks, as the system names them.
_folders: set[str] = set()


def take(folder: Folder, name: str, limit: float) -> Owned:
    """The lock called `name`, which is held until it is closed: `with take(...):`.

    Raises TimeoutError if another holds it for `limit` seconds, and OSError where there are no locks. A process that is
    killed leaves no file: names are bytes of one. Where the system locks whole files alone, as in gVisor, each name is
    a file, which its holder deletes.
    """
    end, what = time.monotonic() + limit, f"{folder.path}/{name}"
    _remember(folder)
    try:
        try:
            return _waited_for(lambda: _of_byte(folder, name), what, end)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return _waited_for(lambda: _of_file(folder, name), what, end)
    except TimeoutError:
        raise
    except OSError:
        folder.unlink(name)  # without locks, it is of no use
        raise


def _waited_for(attempt: Callable[[], Owned | None], what: str, end: float) -> Owned:
    while (file := attempt()) is None:
        if time.monotonic() >= end:
            raise TimeoutError(f"{what} is held")
        time.sleep(_POLL)
    return file


def _of_byte(folder: Folder, name: str) -> Owned | None:
    """The lock of a byte, or None if another has it."""
    file = owned(KEYS, _FLAGS, directory=folder.fd)
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    try:
        fcntl.fcntl(file.fileno(), _SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except (BlockingIOError, PermissionError):
        return None
    return file


def _of_file(folder: Folder, name: str) -> Owned | None:
    """The lock of a file of its own, or None if another has it."""
    file = owned(name, _FLAGS, directory=folder.fd)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    # Its last holder may have deleted it, and others then lock a new one.
    return file if os.fstat(file.fileno()).st_nlink > 0 else None


def sweep(folder: Folder) -> None:
    """Delete the lock files that nobody holds: those of killed processes."""
    with contextlib.suppress(OSError):
        for name in set(os.listdir(folder.fd)) - {KEYS}:
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
