"""Copying kernels between cache directories and packs; each is verified first."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import Address, Entry
from deep_gemm.jit.cache.files import resolved
from deep_gemm.jit.cache.maintenance import _address, _times_kept
from deep_gemm.jit.cache.packable import Packable, PackedKernel, packable
from deep_gemm.jit.cache.root import root_problem

Progress = Callable[[int, int], None]
STATES = ("taken", "same", "older", "conflict", "left", "unsound", "failed")


@dataclass(frozen=True)
class Item:
    """The result for one kernel of a source, or for a whole source. `state` is

    "taken"; "same" (it was there already, bit for bit); "older" (another compiler's is newer and was taken); "conflict"
    (the same key with other bytes: what was there is kept); "left" (sound, but it cannot be packed); "unsound"; or
    "failed" (it could not be written). All but "taken" and a "same" kernel have a `reason`.
    """

    origin: str
    name: str
    state: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Stored:
    """A kernel that was read and verified: an entry with its address, or a kernel of a pack."""

    origin: str
    item: Packable | None
    why_not: str
    address: Address
    entry: Entry | None


def pack_disk(
    disk: DiskCache, out: Path, arch: str = "", name: str = "*", progress: Progress | None = None
) -> list[Item]:
    """Write the sound entries of `disk` to the pack `out`: those for `arch` if that is given, whose name matches the
    glob `name`. Nothing is written if there are none. Raises OSError and ValueError as writing a pack does."""
    found = (
        one
        for one in _entries(disk, progress)
        if isinstance(one, Item) or ((not arch or one.address.arch == arch) and _matches(one, name))
    )
    return _write(found, out)


def join(sources: Sequence[Path], out: Path, trust: bool, progress: Progress | None = None) -> list[Item]:
    """Write the kernels of cache directories and packs to one pack. Otherwise as `pack_disk`."""
    return _write(_all(sources, trust, progress), out)


def merge(sources: Sequence[Path], disk: DiskCache, trust: bool, progress: Progress | None = None) -> list[Item]:
    """Copy the kernels of cache directories and packs into `disk`. Sound entries that it has already are kept."""
    others = [path for path in sources if resolved(path) != resolved(disk.root)]
    report = [one if isinstance(one, Item) else _copy(one, disk) for one in _all(others, trust, progress)]
    return report + [Item(str(disk.root), "", "same", "it is the target itself")] * (len(others) < len(sources))


def _matches(one: _Stored, name: str) -> bool:
    return fnmatch.fnmatchcase(one.address.name, name)


def _all(sources: Sequence[Path], trust: bool, progress: Progress | None) -> Iterator[_Stored | Item]:
    for path in sources:
        if path.is_dir():
            problem = root_problem(path, trust)
            if problem is not None:
                yield Item(str(path), "", "unsound", problem)
            else:
                yield from _entries(DiskCache(path, trust), progress)
        else:
            yield from _packed(path, trust, progress)


def _entries(disk: DiskCache, progress: Progress | None) -> Iterator[_Stored | Item]:
    walked = list(disk.walk())
    for done, (path, where) in enumerate(walked, 1):
        address = _address(path, where)
        if address is not None and os.path.lexists(path / entries.META):
            # Copying must not count as a use of the entry.
            with _times_kept(path / entries.META):
                yield _read(disk, address, path)
        if progress is not None:
            progress(done, len(walked))


def _read(disk: DiskCache, address: Address, path: Path) -> _Stored | Item:
    try:
        entry = disk._read(address)
    except (OSError, ValueError, RecursionError) as error:
        return Item(str(path), address.name, "unsound", str(error))
    try:
        item, why_not = _of_entry(address, entry), ""
    except (OSError, ValueError) as error:
        item, why_not = None, str(error)
    return _Stored(str(path), item, why_not, address, entry)


def _of_entry(address: Address, entry: Entry) -> Packable:
    meta = entry.meta
    if "source_key" not in meta:
        raise ValueError(
            "an earlier version stored it, without a source key; remove it and compile it again to pack it"
        )
    try:
        return packable(
            name=address.name,
            arch=address.arch,
            source_key=meta["source_key"],
            key=address.key,
            cuda=address.cuda,
            compiler=entry.compiler,
            cubin=entry.cubin,
            source=entry.source,
            resources=entry.resources,
            seconds=entry.seconds,
            meta=meta["meta"],
            render_key=meta.get("render_key", ""),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its description lacks a field or has a wrong one ({error!r})") from error


def _packed(path: Path, trust: bool, progress: Progress | None) -> Iterator[_Stored | Item]:
    try:
        pack = packs.read(path, trust)
        kernels = pack.kernels
    except (OSError, ValueError) as error:
        yield Item(str(path), "", "unsound", str(error))
        return
    for done, (source_key, kernel) in enumerate(kernels.items(), 1):
        origin = f"{path}:{source_key}"
        try:
            address = Address(kernel.arch, kernel.cuda, "any", kernel.name, kernel.key)
            yield _Stored(origin, pack.packable(source_key), "", address, None)
        except (OSError, ValueError) as error:
            yield Item(origin, kernel.name, "unsound", str(error))
        if progress is not None:
            progress(done, len(kernels))


def _write(found: Iterator[_Stored | Item], out: Path) -> list[Item]:
    report: list[Item] = []
    chosen: dict[str, tuple[Packable, str]] = {}
    for one in found:
        if isinstance(one, Item):
            report.append(one)
        elif one.item is None:
            report.append(Item(one.origin, one.address.name, "left", one.why_not))
        else:
            source_key = one.item.kernel.source_key
            known = chosen.get(source_key)
            if known is None:
                chosen[source_key] = one.item, one.origin
                continue
            new, old = (one.item, one.origin), known
            if _age(new[0]) > _age(old[0]):
                chosen[source_key] = new
                new, old = old, new
            report.append(_superseded(new, old))
    if chosen:
        packs.write(out, [item for item, _ in chosen.values()])
    return report + [Item(origin, item.kernel.name, "taken") for item, origin in chosen.values()]


def _age(item: Packable) -> tuple[tuple[int, int], str]:
    return item.kernel.toolkit, item.kernel.compiler


def _superseded(other: tuple[Packable, str], taken: tuple[Packable, str]) -> Item:
    """The result for a kernel that was not taken, since another one has its source key."""
    kernel, winner = other[0].kernel, taken[0].kernel
    if kernel.key != winner.key:
        state, reason = "older", f"compiled by {kernel.compiler}; that by {winner.compiler} ({taken[1]}) was taken"
    elif kernel.cubin_sha256 != winner.cubin_sha256:
        state, reason = "conflict", f"other bytes than {taken[1]} has under the same key; that was taken"
    else:
        state, reason = "same", ""
    return Item(other[1], kernel.name, state, reason)


def _copy(one: _Stored, disk: DiskCache) -> Item:
    there = disk.get(one.address)
    if one.entry is not None:
        source, cubin, meta = one.entry.source, one.entry.cubin, one.entry.meta
    else:
        assert one.item is not None
        source, cubin, meta = one.item.source, one.item.cubin, _meta(one.item.kernel)
    if there is not None:
        same = there.cubin == cubin
        reason = "" if same else f"{there.directory} has other bytes under the same key and is kept"
        return Item(one.origin, one.address.name, "same" if same else "conflict", reason)
    try:
        stored = disk.put(one.address, source, cubin, meta)
    except (TypeError, ValueError, RecursionError) as error:  # such as 1e999, which JSON has no way to write
        return Item(one.origin, one.address.name, "unsound", f"its description is not plain JSON ({error})")
    if stored is None:
        return Item(one.origin, one.address.name, "failed", f"it could not be written to {disk.root}")
    return Item(one.origin, one.address.name, "taken")


def _meta(kernel: PackedKernel) -> dict[str, Any]:
    return {
        "compiler": kernel.compiler,
        "source_key": kernel.source_key,
        "render_key": kernel.render_key,
        "flags": [],
        "options": [],
        "resources": kernel.resources.to_json(),
        "seconds": dict(kernel.seconds),
        "created": time.time(),
        "log": "",
        "meta": dict(kernel.meta),
    }
