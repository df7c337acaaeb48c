"""Maintenance of a disk cache while others use it: checking its entries, and removing those that are not needed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache.disk import LOCKS, TEMPORARY, DiskCache, lock_name, move_aside, size_of
from deep_gemm.jit.cache.entry import Address
from deep_gemm.jit.cache.files import owned
from deep_gemm.jit.cache.locks import KEYS

# Anything younger may still be in use by a compiler, so it is no leftover. Writers sweep after the same time.
LEFTOVER_SECONDS = 3600.0
_GONE = "it was replaced or removed meanwhile"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Selectable:
    """The versions that this machine can use, as text such as "12.9". `drivers` is None where there is no driver:
    then entries are judged by the version of CUDA alone."""

    cuda: frozenset[str]
    drivers: frozenset[str] | None

    def problem(self, cuda: str, driver: str) -> str | None:
        """Why this machine cannot use an entry of these versions, or None if it can."""
        if cuda not in self.cuda:
            return f"no compiler of CUDA {cuda} is here"
        if self.drivers is not None and driver not in self.drivers:
            return f"the driver here is not of CUDA {driver}"
        return None


@dataclass(frozen=True)
class Checked:
    """`state` is "sound", "corrupted", "foreign", "leftover" or "in use" (being written, or too young to tell). `path`
    is relative to the root, `size` in bytes, `last_use` in seconds since 1970."""

    path: str
    state: str
    reason: str
    size: int
    last_use: float
    cuda: str = ""
    driver: str = ""


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or would be, and why. `done` is False for a dry run and for what was in use."""

    path: str
    reason: str
    size: int
    done: bool


def selectable() -> Selectable | None:
    """What the compilers and the driver of this machine can use, or None where no usable compiler is found."""
    from deep_gemm.jit.compilers.find import find_all
    from deep_gemm.jit.driver.version import driver_release

    cuda = frozenset(".".join(found.version.split(".")[:2]) for found in find_all() if found.usable)
    release = driver_release()
    drivers = frozenset({f"{release[0]}.{release[1]}", "any"}) if release else None
    return Selectable(cuda, drivers) if cuda else None


def verify(disk: DiskCache, here: Selectable | None = None, progress: Progress | None = None) -> list[Checked]:
    """Check every entry as loading does, and find leftovers. Writes nothing, and keeps the times of last use.

    A sound entry that `here` cannot use counts as foreign. Nothing in the cache makes it raise.
    """
    found = [_check(disk, path, where, here) for path, where in _counted(list(disk.walk()), progress)]
    return found + list(_leftovers(disk.root))


def delete_bad(disk: DiskCache, checked: list[Checked]) -> list[Removal]:
    """Delete what `verify` found corrupted or left over, after checking each again under its lock."""
    removed = []
    walked = {str(path.relative_to(disk.root)): (path, where) for path, where in disk.walk()}
    for item in checked:
        if item.state not in ("corrupted", "leftover"):
            continue
        if item.path in walked:
            path, where = walked[item.path]
            done = _delete_entry(disk, path, where, lambda again: again.state in ("corrupted", "leftover"))
        else:  # a file in a folder of the root, or an entry that another process has deleted meanwhile
            folder, _, name = item.path.partition("/")
            done = "/" not in name and _delete_leftover(disk, folder, name)
        removed.append(Removal(item.path, item.reason, item.size, done))
    return removed


def prune(
    disk: DiskCache,
    max_bytes: int | None = None,
    older_than: float | None = None,
    unused_versions: Selectable | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    spare: Path | None = None,
) -> list[Removal]:
    """Remove entries, least recently used first, and return them.

    `older_than` is in seconds since the last use. `unused_versions` removes what it cannot use. `max_bytes` limits what
    remains after the other two. Entries that are locked or being written stay, and so does `spare`, the directory of
    one entry.
    """
    now = time.time()
    found = [(path, where, _glance(disk, path, where)) for path, where in disk.walk()]
    found.sort(key=lambda item: (item[2].last_use, item[2].path))
    total = sum(item.size for _, _, item in found)
    reasons: dict[str, str] = {}
    for path, (_, cuda, driver), item in found:
        if item.state == "in use" or path == spare:
            continue
        problem = unused_versions.problem(cuda, driver) if unused_versions is not None else None
        if problem is not None:
            reasons[item.path] = problem
        elif older_than is not None and now - item.last_use > older_than:
            reasons[item.path] = f"last used {(now - item.last_use) / 86400:.1f} days ago"
    total -= sum(item.size for _, _, item in found if item.path in reasons)
    for path, _, item in found:
        if max_bytes is None or total <= max_bytes:
            break
        if item.path not in reasons and item.state != "in use" and path != spare:
            reasons[item.path] = f"the cache is larger than {max_bytes} bytes"
            total -= item.size
    chosen = [(path, where, item) for path, where, item in found if item.path in reasons]
    removed = []
    for path, where, item in _counted(chosen, progress):
        # An entry that was used or rewritten since it was chosen stays.
        done = not dry_run and _delete_entry(disk, path, where, _unused_since(item.last_use), _glance)
        removed.append(Removal(item.path, reasons[item.path], item.size, done))
    if any(removal.done for removal in removed):
        with contextlib.suppress(OSError), disk.open() as root:
            disk.forget_rendered(root)
    return removed


def _unused_since(last_use: float) -> Callable[[Checked], bool]:
    return lambda again: again.last_use <= last_use


def to_json(items: list[Checked] | list[Removal]) -> list[dict[str, Any]]:
    """As plain JSON."""
    return [asdict(item) for item in items]


def _counted(items: list[Any], progress: Progress | None) -> Iterator[Any]:
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))


def _glance(disk: DiskCache, path: Path, where: tuple[str, str, str], here: Selectable | None = None) -> Checked:
    """The state without reading the files: "in use", "leftover", or "sound" if there is a description."""
    size, used = size_of(path), _last_use(path)
    state, reason = "sound", ""
    if not os.path.lexists(path / entries.META):
        state, reason = "in use", "it is being compiled, or was within the hour"
        if not os.path.lexists(path):
            reason = _GONE
        elif time.time() - used > LEFTOVER_SECONDS:
            state, reason = "leftover", f"no {entries.META}: never completed"
    return Checked(str(path.relative_to(disk.root)), state, reason, size, used, where[1], where[2])


def _check(disk: DiskCache, path: Path, where: tuple[str, str, str], here: Selectable | None) -> Checked:
    """`_glance`, and reading the entry as a build would."""
    first = _glance(disk, path, where)
    if first.state != "sound":
        return first
    with _times_kept(path / entries.META):
        state, reason = _judge(disk, path, where, here)
    return Checked(first.path, state, reason, first.size, first.last_use, first.cuda, first.driver)


def _judge(disk: DiskCache, path: Path, where: tuple[str, str, str], here: Selectable | None) -> tuple[str, str]:
    address = _address(path, where)
    if address is None:
        return "foreign", "this version gives no entry such a name"
    for attempt in (1, 2):
        try:
            disk._read(address)
            break
        except FileNotFoundError:
            return "in use", _GONE
        except (OSError, ValueError, RecursionError) as error:
            # As in loading: between two renames of a writer, a good entry can look wrong once.
            if attempt == 2:
                other = _other_format(disk, path)
                if other is not None:
                    return "foreign", f"its format is {other}, not {entries.FORMAT}"
                return "corrupted", str(error)
    problem = here.problem(where[1], where[2]) if here is not None else None
    return ("sound", "") if problem is None else ("foreign", problem)


def _other_format(disk: DiskCache, path: Path) -> int | None:
    """The format of another version of this package, whose entries are not ours to judge."""
    with contextlib.suppress(OSError, ValueError, RecursionError), disk.open() as root:
        with root.below(path.relative_to(disk.root).parts) as folder:
            body = json.loads(folder.read(entries.META, entries.MAX_META).data)
        found = body.get("format") if isinstance(body, dict) else None
        if type(found) is int and found != entries.FORMAT:
            return found
    return None


def _address(path: Path, where: tuple[str, str, str]) -> Address | None:
    name, _, key = path.name.rpartition("-")
    try:
        return Address(*where, name, key)
    except ValueError:
        return None


def _last_use(path: Path) -> float:
    """Seconds since 1970. Loading an entry sets the access time of its kernel.json, at most once an hour."""
    times = [0.0]
    names = [path / entries.META] if os.path.lexists(path / entries.META) else [path, *_children(path)]
    for name in names:
        with contextlib.suppress(OSError):
            status = name.lstat()
            # The access time of a directory changes whenever somebody lists it.
            times.append(status.st_mtime if name == path else max(status.st_mtime, status.st_atime))
    return max(times)


@contextlib.contextmanager
def _times_kept(path: Path) -> Iterator[None]:
    """Restore the access time: checking must not count as a use, or verifying would make all entries equally recent."""
    try:
        file = owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield
        return
    with file:
        before = os.fstat(file.fileno())
        yield
        with contextlib.suppress(OSError):
            if os.fstat(file.fileno()).st_atime_ns != before.st_atime_ns:
                os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


def _leftovers(root: Path) -> Iterator[Checked]:
    """Temporary files of killed writers, and locks that nobody has taken for long."""
    for folder, reason in (
        (TEMPORARY, "a temporary file of a killed writer"),
        (LOCKS, "a lock that nobody has taken for an hour"),
    ):
        for path in _children(root / folder):
            if path.name == KEYS:  # no lock, but the file that has them all
                continue
            with contextlib.suppress(OSError):
                status = path.lstat()
                # A time in the future (the clock went back) counts as young, not old.
                if time.time() - status.st_mtime > LEFTOVER_SECONDS:
                    size = size_of(path) if path.is_dir() and not path.is_symlink() else status.st_size
                    yield Checked(f"{folder}/{path.name}", "leftover", reason, size, status.st_mtime)


def _children(folder: Path) -> list[Path]:
    try:
        # A link in place of the folder is not followed: its target does not belong to the cache.
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _delete_leftover(disk: DiskCache, folder: str, name: str) -> bool:
    with contextlib.suppress(OSError), disk.open() as root, root.child(folder) as opened:
        return _locked(disk, name, lambda: opened.remove(name)) if folder == LOCKS else opened.remove(name)
    return False


def _delete_entry(
    disk: DiskCache,
    path: Path,
    where: tuple[str, str, str],
    still: Callable[[Checked], bool],
    look: Callable[[DiskCache, Path, tuple[str, str, str], Selectable | None], Checked] = _check,
) -> bool:
    """Delete an entry under its lock, if `still` agrees. One rename moves it away first, so that readers see all or
    nothing."""
    *above, name = path.relative_to(disk.root).parts
    lock = lock_name(where[0], name.rpartition("-")[2])

    def delete() -> bool:
        try:
            if not still(look(disk, path, where, None)):
                return False
            with disk.open() as root, root.below(above) as folder:
                move_aside(root, folder, name)
        except OSError:
            return False  # if it is gone, another process removed it, and counts it
        finally:
            disk.forget_lock(lock)
        return True

    return _locked(disk, lock, delete)


def _locked(disk: DiskCache, name: str, work: Callable[[], bool]) -> bool:
    """`work()` under the lock that compiling takes, or False at once if another holds it. Where the filesystem has no
    locks, nothing is held: a removal by one rename does no harm to readers and compilers."""
    lock: contextlib.AbstractContextManager[object]
    try:
        lock = disk.take(name, 0.0)
    except TimeoutError:
        return False
    except OSError:
        lock = contextlib.nullcontext()
    with lock:
        return work()
