"""Files as the disk cache needs them: private, never through a symbolic link, published by one rename."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STALE_SECONDS = 3600.0
_CHUNK = 1 << 20


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Create one directory level; something else of that name, a symbolic link included, is replaced."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            os.mkdir(path, mode)


def open_directory(path: str | Path) -> int:
    """A descriptor that later reads go through, so that they all see one directory, whatever is renamed meanwhile."""
    return os.open(path, _DIRECTORY | os.O_NOFOLLOW)


class Content(NamedTuple):
    """What a file held, and its status from just before it was read."""

    data: bytes
    status: os.stat_result


def read(name: str | Path, limit: int, directory: int | None = None) -> Content:
    """A regular file: a path, or a name in the open `directory`. Raises OSError, and ValueError if it is no regular
    file or is larger than `limit` bytes."""
    # O_NONBLOCK: a FIFO in place of the file must not block us.
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{name} has {status.st_size} bytes, more than {limit}")
        # One byte more than there should be, so that one call both reads all and sees the end. Not `limit`: memory is
        # taken for as much as is asked for.
        data = os.read(descriptor, status.st_size + 1)
        while len(data) != status.st_size and len(data) <= limit and (more := os.read(descriptor, _CHUNK)):
            data += more
        return Content(data, status)
    finally:
        os.close(descriptor)


def publish(temporary: Path, target: Path, content: bytes) -> None:
    """Write `content` to a private file in `temporary`, sync it, and rename it to `target`, whole or not at all."""
    scratch = temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(scratch, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.rename(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable, where the filesystem can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, _DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def note_use(path: str, status: os.stat_result) -> None:
    """Set the access time of the file `path`, if it is older than an hour in `status`. Reading alone sets it once a day
    where the filesystem is mounted with relatime, and never with noatime: what is used daily would look unused."""
    now = time.time_ns()
    if now - status.st_atime_ns > _STALE_SECONDS * 1e9:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, status.st_mtime_ns), follow_symlinks=False)


def sweep(temporary: Path, older_than: float = _STALE_SECONDS, prefix: str = "") -> int:
    """Delete what killed processes of this user left in `temporary`: files, and directories with all that is in them.
    What is of the future (the clock went back) is left alone."""
    removed = 0
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                stale = now - status.st_mtime > older_than and status.st_uid == os.geteuid()
                if stale and entry.name.startswith(prefix):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
                    removed += 1
    return removed
