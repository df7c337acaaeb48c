"""The layer that outlives the process: one directory an entry, under arch, CUDA version and driver version."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache import files
from deep_gemm.jit.cache.entry import Address, Entry
from deep_gemm.jit.cache.locks import not_inherited
from deep_gemm.jit.cache.root import root_problem
from deep_gemm.log import log, warn_once

# A network filesystem may answer these once, for a file that another machine has just replaced.
_TRANSIENT = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_TEMPORARY, _LOCKS = "tmp", "locks"
_RENDERED = "rendered"  # see `sources`
# Its first line is the number of entries when `limit` last looked; each publication since then has added a dot.
_TALLY = "limit.tally"


class DiskCache:
    """Entries under `root`. No method raises for a problem of the filesystem: it warns once and goes on without.

    `trust` accepts a root that is a symbolic link, or that others own or can write to.
    """

    def __init__(self, root: Path, trust: bool = False) -> None:
        self.root = root
        self.trust = trust
        self._text = str(root)
        self._swept = False

    def usable(self) -> bool:
        """Whether the root may be used; if not, says why, once."""
        problem = root_problem(self._text, self.trust)
        if problem is not None:
            warn_once(f"cache-root:{self.root}", f"Kernels are kept in memory only: {problem}.")
        return problem is None

    def directory(self, address: Address) -> Path:
        return self.root.joinpath(*address.parts())

    def path(self, *parts: str) -> str:
        """Of what lies under the root, as text: joining a Path takes ten times as long, which a start has to pay for
        each kernel."""
        return "/".join((self._text, *parts))

    def get(self, address: Address) -> Entry | None:
        """The entry, verified, or None. One that is there but bad is warned of, once."""
        if not self.usable():
            return None
        path = self.path(*address.parts())
        for attempt in (1, 2):
            try:
                found = self._read(address, path)
                files.note_use(f"{path}/{entries.META}", found.described)
                return found
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                # Seen between two renames of a writer, an entry can look wrong once; a bad one stays wrong.
                if attempt == 2:
                    message = f"The cached kernel {path} is not valid ({error}); it will be compiled again."
                    warn_once(f"cache-entry:{path}", message)
        return None

    def _read(self, address: Address, path: str) -> Entry:
        directory = files.open_directory(path)
        try:
            return entries.read(address, directory, path)
        finally:
            os.close(directory)

    def reserve(self, address: Address, source: str) -> Path | None:
        """Store the source and return its path, before there is an entry: compilers and their messages refer to it."""
        return self._write(address, {entries.SOURCE: source.encode()})

    def put(
        self, address: Address, cubin: bytes, meta: Mapping[str, Any], extras: Mapping[str, bytes] | None = None
    ) -> Path | None:
        """Publish an entry whose source is stored already; returns its directory, or None if that failed.

        `meta` must be plain JSON (TypeError, ValueError). `extras` are further files, PTX for one.
        """
        # The description goes last: it is what makes the files an entry.
        contents = {**(extras or {}), entries.CUBIN: cubin, entries.META: entries.encode(address, cubin, meta)}
        stored = self._write(address, contents)
        return stored.parent if stored else None

    def _write(self, address: Address, contents: Mapping[str, bytes]) -> Path | None:
        if not self.usable():
            return None
        try:
            return self._retry(lambda: self._write_files(address, contents), address)
        except OSError as error:
            message = (
                f"Kernels cannot be stored in {self.root} ({error}) and are kept in memory only. Set DG_JIT_CACHE_DIR "
                "to a directory that you can write to."
            )
            warn_once(f"cache-write:{self.root}", message)
            return None

    def _retry(self, action: Callable[[], Path], address: Address) -> Path:
        try:
            return action()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            # A file where a directory belongs, the reverse, or an eviction meanwhile: make room and try once more.
            self._discard(address)
            return action()

    def _write_files(self, address: Address, contents: Mapping[str, bytes]) -> Path:
        temporary = self._prepare(_TEMPORARY)
        if not self._swept:
            self._swept = True
            files.sweep(temporary)
        path = self.root
        for part in address.parts():
            path = path / part
            files.make_directory(path)
        if entries.CUBIN in contents:
            # Never an old description beside a new cubin.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / entries.META)
        for name, content in contents.items():
            files.publish(temporary, path / name, content)
        files.sync_directory(path)
        return path / next(iter(contents))

    def _prepare(self, name: str) -> Path:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.isdir(self.root):
            files.make_directory(self.root)
        folder = self.root / name
        files.make_directory(folder)
        return folder

    def _discard(self, address: Address) -> None:
        path = self.directory(address)
        aside = self.root / _TEMPORARY / f"old-{os.getpid()}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            os.rename(path, aside)
            _remove(aside)

    @contextlib.contextmanager
    def lock(self, address: Address, limit: float) -> Iterator[bool]:
        """Hold the lock of one key between processes. Yields whether it is held: after `limit` seconds, or where the
        filesystem has no locks, the caller goes on without, which costs a second compilation and nothing else.

        The operating system drops the lock of a process that dies.
        """
        import filelock

        held, closing = None, contextlib.ExitStack()
        if self.usable():
            try:
                path = self._prepare(_LOCKS) / f"{address.arch}-{address.key}.lock"
                closing.enter_context(not_inherited(path))
                held = filelock.FileLock(path, timeout=limit, mode=0o600).acquire(poll_interval=0.01)
            except filelock.Timeout:
                message = f"Another process has been compiling {address.name} for {limit:g} s; compiling it here too."
                warn_once(f"cache-lock:{address.key}", message)
            except (OSError, NotImplementedError, RuntimeError) as error:
                log.debug("no lock in %s: %s", self.root, error)
        try:
            yield held is not None
        finally:
            if held is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    held.lock.release()
            closing.close()

    def walk(self) -> Iterator[tuple[Path, tuple[str, str, str]]]:
        """(directory, (arch, cuda, driver)) of whatever has the shape of an entry."""
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
            groups[where] = [count + os.path.isfile(path / entries.META), size + _size(path)]
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
        """Delete all entries, and only what is ours; returns how many entries and bytes went, and what failed."""
        counts = {"entries": 0, "bytes": 0, "failed": 0}
        if not self.usable():
            return counts
        for path, _ in list(self.walk()):
            complete, size = os.path.isfile(path / entries.META), _size(path)
            _remove(path)
            if os.path.lexists(path):
                counts["failed"] += 1
            else:
                counts["entries"] += complete
                counts["bytes"] += size
        for level in (3, 2, 1):
            for folder in self.root.glob("sm_*" + "/*" * (level - 1)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        with contextlib.suppress(OSError):
            os.unlink(self.root / _TALLY)
        _remove(self.root / _RENDERED)
        files.sweep(self.root / _TEMPORARY)
        return counts


def _directories(folder: Path, prefix: str) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(
                Path(item.path) for item in found if item.name.startswith(prefix) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _size(path: Path) -> int:
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
