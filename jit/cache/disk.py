"""The layer on disk: a directory for each entry, under arch, CUDA version and driver version."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache import locks
from deep_gemm.jit.cache.entry import Address, Entry
from deep_gemm.jit.cache.files import Folder, Owned, UnsafeError, make_directories
from deep_gemm.jit.cache.root import open_root, root_problem
from deep_gemm.log import log, warn_once

T = TypeVar("T")

# A network filesystem may answer these once, for a file that another machine has just replaced.
_TRANSIENT = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
TEMPORARY, LOCKS = "tmp", "locks"
RENDERED = "rendered"  # see `notes`
TUNED = "tuned"  # times of kernels, by GPU model; see `deep_gemm.select.tuner`
# Its first line is the number of entries when `limit` last looked; each publication since then has added a dot.
TALLY = "limit.tally"


class DiskCache:
    """Entries under `root`. No method raises for a problem of the filesystem: it warns once and goes on without.

    Every directory, the root first, is opened and checked at each use; what is in it is reached through its descriptor.
    `trust` accepts a root that is a symbolic link, and directories and files that others own or can write to.
    """

    def __init__(self, root: Path, trust: bool = False) -> None:
        self.root = root
        self.trust = trust
        self._text = str(root)
        self._swept = self._locks_swept = False
        # Render keys whose sources are stored, so that a process looks at each once.
        self.rendered: set[str] = set()

    def usable(self) -> bool:
        """Whether the root may be used. If not, one warning says why."""
        problem = root_problem(self._text, self.trust)
        if problem is not None:
            self._refuse(problem)
        return problem is None

    def _refuse(self, problem: object) -> None:
        warn_once(f"cache-root:{self.root}", f"Kernels are kept in memory only: {problem}.")

    def open(self, create: bool = False) -> Folder:
        """The root. Raises FileNotFoundError if there is none, and UnsafeError, after a warning, if it must not be
        used."""
        try:
            return open_root(self._text, self.trust)
        except UnsafeError as error:
            self._refuse(error)
            raise
        except FileNotFoundError:
            if not create:
                raise
        make_directories(self.root)
        return open_root(self._text, self.trust)

    def directory(self, address: Address) -> Path:
        return self.root.joinpath(*address.parts())

    def path(self, *parts: str) -> str:
        """A path under the root, as text: joining Path objects takes ten times as long, for each kernel that a process
        loads."""
        return "/".join((self._text, *parts))

    def get(self, address: Address) -> Entry | None:
        """The verified entry, or None. A damaged one causes one warning."""
        for attempt in (1, 2):
            try:
                return self._read(address, used=True)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                # Between two renames of a writer, a good entry can look wrong once. A bad one stays wrong.
                if attempt == 2:
                    self._warn(address, error)
        return None

    def _warn(self, address: Address, error: Exception) -> None:
        if isinstance(error, UnsafeError):
            # An unsafe directory often holds many entries, so it is named once. Of the root, a warning was given
            # already.
            if root_problem(self._text, self.trust) is None:
                warn_once(f"cache-unsafe:{error}", f"Cached kernels are not used: {error}.")
            return
        path = self.path(*address.parts())
        warn_once(f"cache-entry:{path}", f"The cached kernel {path} is not valid ({error}); it will be compiled again.")

    def _read(self, address: Address, used: bool = False) -> Entry:
        """The verified entry; `used` notes that it was. Raises OSError, FileNotFoundError and UnsafeError included, and
        ValueError."""
        with self.open() as root, root.below(address.parts()) as folder:
            found = entries.read(address, folder)
            if used:
                folder.note_use(entries.META, found.described)
            return found

    def reserve(self, address: Address, source: str) -> Path | None:
        """Store the source before there is an entry, and return its path: compilers read it, and their messages name
        it."""
        stored = self._write(address, {entries.SOURCE: source.encode()})
        return stored / entries.SOURCE if stored else None

    def put(
        self,
        address: Address,
        source: bytes,
        cubin: bytes,
        meta: Mapping[str, Any],
        extras: Mapping[str, bytes] | None = None,
    ) -> Path | None:
        """Publish an entry; returns its directory, or None if that failed.

        `meta` must be plain JSON (TypeError, ValueError). `extras` are further files, PTX for one.
        """
        # The description is written last: with it, the files become an entry.
        meta_bytes = entries.encode(address, source, cubin, meta)
        contents = {entries.SOURCE: source, **(extras or {}), entries.CUBIN: cubin, entries.META: meta_bytes}
        return self._write(address, contents)

    def _write(self, address: Address, contents: Mapping[str, bytes]) -> Path | None:
        if not self.usable():
            return None
        try:
            return self._retry(lambda: self._write_files(address, contents), address)
        except UnsafeError as error:
            self._warn(address, error)
            return None
        except OSError as error:
            message = (
                f"Kernels cannot be stored in {self.root} ({error}) and are kept in memory only. Set DG_JIT_CACHE_DIR "
                "to a directory that you can write to."
            )
            warn_once(f"cache-write:{self.root}", message)
            return None

    def _retry(self, action: Callable[[], T], address: Address) -> T:
        try:
            return action()
        except OSError as error:
            if error.errno not in _TRANSIENT and not isinstance(error, UnsafeError):
                raise
            # A file where a directory belongs, the reverse, an entry's directory that others can write to, or an
            # eviction meanwhile: make room and try once more.
            self._discard(address)
            return action()

    def _write_files(self, address: Address, contents: Mapping[str, bytes]) -> Path:
        with self.open(create=True) as root, root.made(TEMPORARY) as temporary:
            if not self._swept:
                self._swept = True
                temporary.sweep()
            with root.made_below(address.parts()) as folder:
                if entries.CUBIN in contents:
                    # An old description must never stand beside a new cubin.
                    folder.unlink(entries.META)
                for name, content in contents.items():
                    # The source is usually there already: a compiler had to read it.
                    if name != entries.SOURCE or not _holds(folder, name, content):
                        folder.publish(name, content, temporary)
                folder.sync()
        return self.directory(address)

    def _discard(self, address: Address) -> None:
        *above, name = address.parts()
        with contextlib.suppress(OSError), self.open() as root, root.below(above) as folder:
            move_aside(root, folder, name)

    def lock(self, address: Address, limit: float) -> contextlib.AbstractContextManager[Owned | None]:
        """The lock of one key between processes, which ends with the `with` block. None after `limit` seconds, or where
        the filesystem has no locks: the caller goes on without it; at worst a kernel is compiled twice.

        The operating system drops the lock of a process that dies.
        """
        if self.usable():
            try:
                return self.take(lock_name(address.arch, address.key), limit)
            except TimeoutError:
                message = f"Another process has been compiling {address.name} for {limit:g} s"
                warn_once(f"cache-lock:{address.key}", f"{message}; compiling it here too.")
            except OSError as error:
                log.debug("no lock in %s: %s", self.root, error)
        return contextlib.nullcontext()

    def take(self, name: str, limit: float) -> Owned:
        """As `locks.take`. Whoever has it calls `forget_lock` inside the `with` block, as the last step."""
        with self.open(create=True) as root, root.made(LOCKS) as folder:
            if not self._locks_swept:  # those of processes that were killed
                self._locks_swept = True
                locks.sweep(folder)
            return locks.take(folder, name, limit)

    def forget_lock(self, name: str) -> None:
        """Delete the file of a lock that this process holds: without its holder it is of no use."""
        with contextlib.suppress(OSError), self.open() as root, root.child(LOCKS) as folder:
            folder.unlink(name)

    def walk(self) -> Iterator[tuple[Path, tuple[str, str, str]]]:
        """(directory, (arch, cuda, driver)) of every directory that lies where an entry would."""
        for arch in _directories(self.root, "sm_"):
            for cuda in _directories(arch, "cuda-"):
                for driver in _directories(cuda, "driver-"):
                    for path in _directories(driver, ""):
                        yield path, (arch.name, cuda.name.partition("-")[2], driver.name.partition("-")[2])

    def info(self) -> dict[str, Any]:
        """What is stored: root, problem (or None), exists, writable, entries, bytes, groups by arch, CUDA, driver."""
        problem = root_problem(self.root, self.trust)
        groups: dict[tuple[str, str, str], list[int]] = {}
        for path, where in self.walk() if problem is None else ():
            count, size = groups.setdefault(where, [0, 0])
            groups[where] = [count + os.path.isfile(path / entries.META), size + size_of(path)]
        return {
            "root": str(self.root),
            "problem": problem,
            "exists": os.path.isdir(self.root),
            "writable": problem is None and _writable(self.root),
            "entries": sum(count for count, _ in groups.values()),
            "bytes": sum(size for _, size in groups.values()),
            "groups": [
                {"arch": arch, "cuda": cuda, "driver": driver, "entries": count, "bytes": size}
                for (arch, cuda, driver), (count, size) in sorted(groups.items())
            ],
        }

    def clear(self) -> dict[str, int]:
        """Delete all entries, rendered sources, measured times, and locks that nobody holds; returns how many entries
        and bytes were deleted, and how many failed."""
        counts = {"entries": 0, "bytes": 0, "failed": 0}
        try:
            with self.open() as root:
                self._clear(root, counts)
        except OSError as error:
            log.debug("%s is not cleared: %s", self.root, error)
        return counts

    def _clear(self, root: Folder, counts: dict[str, int]) -> None:
        for path, _ in list(self.walk()):
            complete, size = os.path.isfile(path / entries.META), size_of(path)
            *above, name = path.relative_to(self.root).parts
            gone = False
            with contextlib.suppress(OSError), root.below(above) as folder:
                gone = folder.remove(name)
            counts["failed"] += not gone
            counts["entries"] += gone and complete
            counts["bytes"] += size if gone else 0
        for level in (3, 2, 1):
            for empty in self.root.glob("sm_*" + "/*" * (level - 1)):
                *above, name = empty.relative_to(self.root).parts
                with contextlib.suppress(OSError), root.below(above) as folder:
                    os.rmdir(name, dir_fd=folder.fd)
        root.unlink(TALLY)
        root.remove(TUNED)
        self.forget_rendered(root)
        with contextlib.suppress(OSError), root.child(TEMPORARY) as temporary:
            temporary.sweep()
        with contextlib.suppress(OSError), root.child(LOCKS) as folder:
            locks.sweep(folder)

    def forget_rendered(self, root: Folder) -> None:
        """Delete the rendered sources. They are stored again with the next kernel that is loaded from disk."""
        root.remove(RENDERED)
        self.rendered.clear()


def lock_name(arch: str, key: str) -> str:
    return f"{arch}-{key}.lock"


def move_aside(root: Folder, folder: Folder, name: str) -> None:
    """Delete the directory `name` of `folder`. One rename moves it away first, so that readers see all of it or
    nothing. Raises OSError if it cannot be moved."""
    aside = f"old-{os.getpid()}-{os.urandom(8).hex()}"
    with root.made(TEMPORARY) as temporary:
        os.rename(name, aside, src_dir_fd=folder.fd, dst_dir_fd=temporary.fd)
        temporary.remove(aside)


def _holds(folder: Folder, name: str, content: bytes) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return folder.read(name, len(content)).data == content
    return False


def _directories(folder: Path, prefix: str) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(
                Path(item.path) for item in found if item.name.startswith(prefix) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def size_of(path: Path) -> int:
    """The bytes of the files in a directory."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as found:
        for item in found:
            with contextlib.suppress(OSError):
                total += item.stat(follow_symlinks=False).st_size
    return total


def _writable(root: Path) -> bool:
    folder = root
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
