"""Writes solid packs. A process that only reads them does not import this."""

from __future__ import annotations

import bisect
import hashlib
import json
import lzma
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deep_gemm.jit.cache import files, likeness, solid
from deep_gemm.jit.cache.packable import Packable, PackedKernel, summary

_AHEAD = bytes(4096)
"""After each kernel. LZMA's encoder looks so far ahead: what it writes before them does not depend on what follows."""


def write(path: Path, families: Iterable[Sequence[Packable]]) -> list[PackedKernel]:
    """Write a solid pack, whole or not at all, and return what it holds. Only kernels of one of the `families` are
    compressed after each other. The same families give the same bytes: how long kernels took to compile is left out.
    Raises OSError, and ValueError for kernels with one key."""
    items: list[Packable] = []
    before: list[int | None] = []
    for family in families:
        first = len(items)
        items += family
        nearest = likeness.parents([item.cubin for item in family], solid.LONGEST)
        before += [None if parent is None else parent + first for parent in nearest]
    listed = [item.kernel for item in items]
    if len({kernel.source_key for kernel in listed}) != len(listed):
        raise ValueError("two of its kernels have one source key")
    contents = [_content(item) for item in items]
    with ThreadPoolExecutor() as pool:
        streams = list(pool.map(lambda chain: _compressed(b"".join(contents[at] for at in chain)), _chains(before)))
    table = solid.key_table(listed)
    totals = {
        "keys": len(table) // solid.KEY.size,
        "count": len(listed),
        "cubin_bytes": sum(kernel.cubin_bytes for kernel in listed),
    }
    head = json.dumps(summary(listed) | totals, sort_keys=True).encode() + b"\n"
    parts: list[bytes] = []
    offset = solid.START + len(head) + len(table) + len(listed) * solid.PLACE.size
    for number, (stream, parent) in enumerate(zip(streams, before, strict=True)):
        shared = 0 if parent is None else _shared(stream, streams[parent])
        part = stream[shared:]
        place = (offset, len(part), len(contents[number]), number if parent is None else parent, shared)
        table += solid.PLACE.pack(*place, hashlib.sha256(stream).digest())
        parts.append(part)
        offset += len(part)
    digest = hashlib.sha256(head + table).digest()
    files.write_whole(path, [solid.MAGIC + solid.SIZES.pack(len(head), len(table), digest), head, table, *parts])
    return listed


def _chains(before: Sequence[int | None]) -> list[list[int]]:
    """For each kernel the numbers of those that are compressed before it, and its own."""
    found = []
    for number in range(len(before)):
        chain = [number]
        while (parent := before[chain[0]]) is not None:
            chain.insert(0, parent)
        found.append(chain)
    return found


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    shortest = min(len(one), len(other))
    return bisect.bisect_left(range(shortest), True, key=lambda last: one[: last + 1] != other[: last + 1])


def _content(item: Packable) -> bytes:
    described = item.kernel.to_json() | {"seconds": {}}
    text = json.dumps(
        {name: described[name] for name in described if name not in solid.COUNTED}, sort_keys=True
    ).encode()
    sizes = solid.CONTENT.pack(len(item.cubin), len(item.source), len(text), 0)
    content = b"".join((sizes, item.cubin, item.source, text))
    return content.ljust(-(-len(content) // solid.CONTENT.size) * solid.CONTENT.size, b"\0") + _AHEAD


def _compressed(content: bytes) -> bytes:
    return lzma.compress(content, lzma.FORMAT_RAW, filters=solid.filters(lzma, preset=9 | lzma.PRESET_EXTREME))
