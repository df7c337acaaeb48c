"""Locks between processes. The system drops the lock of a process that dies, though a forked child inherits its
descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from deep_gemm.jit.cache.files import Folder

_taken: list[str] = []


def locking_works(folder: Folder) -> bool:
    """Whether the filesystem has locks that die with their process. Raises OSError where no file can be created.

    This is tried before filelock is used: where flock fails, some versions of filelock wait as if the lock were held,
    and others create a file that a killed process leaves behind.
    """
    name = f"probe-{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, 0o600, dir_fd=folder.fd)
    try:
        folder.unlink(name)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(path: Path, limit: float) -> Iterator[bool]:
    """Hold the lock file `path` while the block runs. Raises TimeoutError if another process holds it for `limit`
    seconds, and OSError where there are no locks."""
    import filelock

    lock = filelock.FileLock(path, timeout=limit, mode=0o600)
    with not_inherited(path):
        try:
            lock.acquire(poll_interval=0.01)
        except filelock.Timeout as error:
            raise TimeoutError(f"{path} is held") from error
        except (NotImplementedError, RuntimeError) as error:
            raise OSError(str(error)) from error
        try:
            yield True
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                lock.release()


@contextlib.contextmanager
def not_inherited(path: Path) -> Iterator[None]:
    """While the block runs, a forked child closes its copies of descriptors of the lock file `path`.

    The system drops a lock when its last descriptor is closed: if this process were killed, a child that lives on would
    keep the lock. filelock does the same from 3.32 on, but many installations have an older one.
    """
    _register()
    name = os.path.realpath(path)
    # Before the lock is taken, so that no fork comes in between. Both steps are atomic.
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
