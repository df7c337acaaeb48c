"""Files and directories of the cache: private, opened once, never through a link, published by one rename.

Where others can write to a directory on the way, a path can lead elsewhere at the next call. So a directory is opened
once and checked, and everything in it is reached through its descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_STALE_SECONDS = 3600.0
_CHUNK = 1 << 20


Owned: TypeAlias = "select.epoll"
"""An open file or directory, owned since it is open: `fileno()`, `close()`, and a `with` block that closes it.

A signal handler may raise between any two steps of Python code: between `os.open` and whatever was to close its number.
So the number is wrapped in C, where no handler runs, in the call that opens it, and C closes it when nothing refers to
the wrapper any more. Of Python's types only `select.epoll` wraps a descriptor of any kind; it never polls anything.
"""


def owned(name: str | os.PathLike[str], flags: int, mode: int = 0o600, directory: int | None = None) -> Owned:
    """`os.open` of a path, or of a name in an open `directory`; a program that is executed does not inherit it."""
    return _wrapped(functools.partial(os.open, flags=flags | os.O_CLOEXEC, mode=mode, dir_fd=directory), name)


def duplicate(descriptor: int) -> Owned:
    """`os.dup`."""
    return _wrapped(os.dup, descriptor)


def _wrapped(opens: Callable[..., int], argument: object) -> Owned:
    return next(map(select.epoll.fromfd, map(opens, (argument,))))


class UnsafeError(OSError):
    """Somebody else could have put code there. The text is a sentence: why, and what to do."""


class LinkError(UnsafeError):
    """A link, or a file, is where a directory should be."""


class Content(NamedTuple):
    """What a file held, and its status from just before it was read."""

    data: bytes
    status: os.stat_result


def danger(status: os.stat_result, path: str | Path) -> str | None:
    """Why somebody else could have written the file or directory of this status: a sentence that says what to do. None
    if only its owner can write to it, and the owner is this user or root."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}, not to you (user {os.geteuid()}) or root; use another"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        return f"other users can write to {path} (mode {mode:04o}); run `chmod go-w` on it"
    return None


def absolute(path: Path) -> Path:
    """`path` made absolute, or unchanged if the working directory was deleted: then nothing is found there, as it
    should be."""
    try:
        return path.absolute()
    except OSError:
        return path


def resolved(path: Path) -> str:
    """`path` with links resolved, to compare it with others; unchanged if it cannot be resolved."""
    try:
        return os.path.realpath(path)
    except OSError:
        return str(path)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, all of mode 0700, whatever the umask. Existing ones keep theirs."""
    try:
        _make_directory(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directories(path.parent)
        with contextlib.suppress(FileExistsError):  # made by another process meanwhile
            _make_directory(path)


def _make_directory(path: str | Path, directory: int | None = None) -> None:
    os.mkdir(path, 0o700, dir_fd=directory)
    made = os.stat(path, dir_fd=directory, follow_symlinks=False).st_mode
    if made & 0o777 != 0o700 and stat.S_ISDIR(made):
        # The set-group-ID bit comes from the parent and is kept. On a filesystem with fixed modes this fails, and the
        # mode decides later whether the directory is used.
        with contextlib.suppress(OSError):
            os.chmod(path, (made & 0o7000) | 0o700, dir_fd=directory)


def read(name: str | Path, limit: int, directory: int | None = None) -> Content:
    """A regular file: a path, or a name in the open `directory`. Raises OSError, and ValueError if it is no regular
    file or is larger than `limit` bytes."""
    # O_NONBLOCK: a FIFO in place of the file must not block us.
    with owned(name, _FILE | os.O_NOFOLLOW, directory=directory) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{name} has {status.st_size} bytes, more than {limit}")
        # One byte more than the size: one call then reads all and sees the end. Not `limit` bytes, which read() would
        # allocate.
        try:
            data = os.read(descriptor, status.st_size + 1)
        except MemoryError as error:
            raise ValueError(f"{name} has {status.st_size} bytes, for which there is no memory") from error
        while len(data) != status.st_size and len(data) <= limit and (more := os.read(descriptor, _CHUNK)):
            data += more
        return Content(data, status)


def open_file(path: Path) -> Owned:
    """A regular file for reading, links followed. Raises OSError, and ValueError if it is no regular file."""
    file = owned(path, _FILE)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise ValueError("it is not a regular file")
    return file


def _open_directory(
    name: str | Path, above: int | None, path: str | Path, trust: bool, flags: int = _DIRECTORY
) -> Owned:
    if above is not None and (name in ("", ".", "..") or "/" in str(name)):
        raise UnsafeError(f"{str(name)!r} is no name of a directory in {path}")
    try:
        directory = owned(name, flags, directory=above)
    except NotADirectoryError as error:  # Linux says so of a link, too
        raise LinkError(f"{path} is a link or a file, where a directory of the cache belongs") from error
    if not trust and (problem := danger(os.fstat(directory.fileno()), path)) is not None:
        raise UnsafeError(problem)
    return directory


class Folder:
    """An open directory, to be used in a `with` block. Names are of what lies directly in it.

    Unless `trust`, it and the files read from it must belong to this user or root, and nobody else may be able to write
    to them; otherwise UnsafeError is raised. `path` is for messages.
    """

    __slots__ = ("_owned", "fd", "path", "trust")

    def __init__(self, directory: Owned, path: str, trust: bool) -> None:
        """Takes over a directory that was checked."""
        self._owned, self.fd, self.path, self.trust = directory, directory.fileno(), path, trust

    @classmethod
    def open(cls, path: str | Path, trust: bool) -> Folder:
        """The directory at `path`. Trust includes a link in its place. Raises OSError."""
        flags = _DIRECTORY & ~os.O_NOFOLLOW if trust else _DIRECTORY
        return cls(_open_directory(path, None, path, trust, flags), str(path), trust)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def child(self, name: str) -> Folder:
        """A directory in this one. Raises FileNotFoundError, LinkError, UnsafeError or another OSError."""
        path = f"{self.path}/{name}"
        return Folder(_open_directory(name, self.fd, path, self.trust), path, self.trust)

    def made(self, name: str) -> Folder:
        """A directory in this one, created if need be. A link or a file in its place is replaced."""
        try:
            return self.child(name)
        except FileNotFoundError:
            pass
        except LinkError:
            os.unlink(name, dir_fd=self.fd)
        with contextlib.suppress(FileExistsError):  # made by another process meanwhile
            _make_directory(name, self.fd)
        return self.child(name)

    def below(self, parts: Iterable[str]) -> Folder:
        """The directory that `parts` lead to; each level is opened and checked as `child` does."""
        directory, path = duplicate(self.fd), self.path
        for part in parts:
            path = f"{path}/{part}"
            with directory as above:
                directory = _open_directory(part, above.fileno(), path, self.trust)
        return Folder(directory, path, self.trust)

    def made_below(self, parts: Iterable[str]) -> Folder:
        """As `below`, and each level as `made` does."""
        folder = self.below(())
        for part in parts:
            with folder:
                folder = folder.made(part)
        return folder

    def read(self, name: str, limit: int) -> Content:
        """A regular file. Raises OSError, UnsafeError included, and ValueError."""
        found = read(name, limit, self.fd)
        if not self.trust and (problem := danger(found.status, f"{self.path}/{name}")) is not None:
            raise UnsafeError(problem)
        return found

    def publish(self, name: str, content: bytes, temporary: Folder) -> None:
        """Write `content` to a private file in `temporary`, sync it, and rename it to `name`, whole or not at all."""
        scratch = f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            with owned(scratch, _NEW, directory=temporary.fd) as file:
                _write(file.fileno(), (content,))
            os.rename(scratch, name, src_dir_fd=temporary.fd, dst_dir_fd=self.fd)
        except BaseException:
            temporary.unlink(scratch)
            raise

    def sync(self) -> None:
        """Make renames into this directory durable, where the filesystem can."""
        with contextlib.suppress(OSError):
            os.fsync(self.fd)

    def unlink(self, name: str) -> bool:
        """Delete a file or a link, if possible. Returns whether the name is free now."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)
        return not self.has(name)

    def has(self, name: str) -> bool:
        """Whether the name exists; a link that leads nowhere counts."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, name: str) -> bool:
        """Delete a file, or a directory with its contents, as far as possible; links are not followed. Returns whether
        the name is free now."""
        with contextlib.suppress(OSError, RecursionError):
            try:
                os.unlink(name, dir_fd=self.fd)
            except IsADirectoryError:
                with Folder(_open_directory(name, self.fd, name, True), name, True) as inner:
                    for item in os.listdir(inner.fd):
                        inner.remove(item)
                os.rmdir(name, dir_fd=self.fd)
        return not self.has(name)

    def note_use(self, name: str, status: os.stat_result) -> None:
        """Set the access time of a file, if it is older than an hour in `status`. Reading alone sets it once a day on a
        filesystem mounted with relatime, and never with noatime: entries in daily use would look unused."""
        now = time.time_ns()
        if now - status.st_atime_ns > _STALE_SECONDS * 1e9:
            with contextlib.suppress(OSError):
                os.utime(name, ns=(now, status.st_mtime_ns), dir_fd=self.fd, follow_symlinks=False)

    def sweep(self, older_than: float = _STALE_SECONDS, prefix: str = "") -> int:
        """Delete what killed processes of this user left here: files, and directories with their contents. Those with a
        time in the future (the clock went back) are left alone."""
        removed, now = 0, time.time()
        with contextlib.suppress(OSError), os.scandir(self.fd) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    stale = now - status.st_mtime > older_than and status.st_uid == os.geteuid()
                    if stale and entry.name.startswith(prefix):
                        removed += self.remove(entry.name)
        return removed


def sweep(folder: Path, older_than: float = _STALE_SECONDS, prefix: str = "") -> int:
    """`Folder.sweep` of the directory at this path, such as TMPDIR."""
    with contextlib.suppress(OSError), Folder.open(folder, trust=True) as opened:
        return opened.sweep(older_than, prefix)
    return 0


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that others may read, whole or not at all. Raises OSError."""
    scratch = path.with_name(f".{path.name[:50]}-{os.urandom(8).hex()}")
    try:
        with owned(scratch, _NEW) as file:
            os.fchmod(file.fileno(), 0o644)
            _write(file.fileno(), parts)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
    sync_directory(path.parent)


def _write(descriptor: int, parts: Iterable[bytes]) -> None:
    """Write all parts, through to the disk."""
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable, where the filesystem can."""
    with contextlib.suppress(OSError), Folder.open(path, trust=True) as opened:
        opened.sync()
