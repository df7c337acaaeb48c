"""A solid pack: many kernels in one small file, which is made to be shipped inside a package.

Kernels that resemble each other are compressed in chains: each after one that it resembles, and that perhaps after
another (`likeness.py`). Where two streams begin with the same kernels they begin with the same bytes, and these are
stored once. So a kernel takes 1 to 4 KB instead of its 25 to 50, and one is unpacked with one or two others.

    MAGIC                       names the format
    two sizes, SHA-256          of the head and of the table, and of both together
    head                        JSON: the version that wrote it, what it holds in all, and the table's counts
    table                       the kernels' numbers by key; then for each kernel its place, its size, its size when it
                                is unpacked, the number of the kernel before it (its own if it is the first of a chain),
                                how many bytes of that one's stream its own begins with, and its stream's SHA-256
    streams                     LZMA, without what they share with the stream before: sizes, cubin, source, description

Descriptions are those of a manifest (`PackedKernel`) without what can be counted. Both keys of a kernel, that of its
source and that of what the source is rendered from, are in the table. Nothing is taken from a file before its SHA-256
was compared.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import files
from deep_gemm.jit.cache.packable import Packable, PackedKernel, version_of
from deep_gemm.jit.forking import late
from deep_gemm.jit.key import SCHEMA
from deep_gemm.jit.resources import shown

MAGIC = b"deep_gemm solid pack 2\n"
SIZES = struct.Struct("<II32s")
START = len(MAGIC) + SIZES.size
_MOST = 1 << 26
"""Bytes of a head with its table, and of a chain."""
_MOST_KERNELS = 1 << 16
"""The table counts kernels in 16 bits."""

PREFIX = 8
"""Bytes of a key in the table: few enough that it stays small. Descriptions hold whole keys, which are compared."""
KEY = struct.Struct(f">{PREFIX}sH")
PLACE = struct.Struct("<IIIHI32s")
CONTENT = struct.Struct("<4I")
"""The sizes of a cubin, of its source and of its description, and 0: instructions are 16 bytes long, and stay so."""

_UNPACKED_AT_ONCE = 4
"""Kernels that stay in memory: one's source and its cubin are asked for one after the other."""

COUNTED = ("cubin_bytes", "source_bytes", "cubin_sha256", "source_sha256")
"""Fields of a description that are left out, since they are counted from the bytes."""

LONGEST = 3
"""Kernels of a chain: to unpack one takes its whole chain."""


class SolidPack:
    """A solid pack whose head and table were read and checked. Kernels are checked when they are read.

    It has what a `pack.Pack` has. Its methods raise OSError or ValueError, whose text is the reason, for a kernel that
    is damaged, or whose chain is.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], keys: bytes, places: bytes) -> None:
        self.path, self._keys = path, keys
        self.version, self.count, self.cubin_bytes = version_of(head), head["count"], head["cubin_bytes"]
        self._places = places
        self._unpacked = functools.lru_cache(maxsize=_UNPACKED_AT_ONCE)(self._unpack)

    @property
    def kernels(self) -> dict[str, PackedKernel]:
        """Every kernel by its source key. All are unpacked for it."""
        every = [self._unpack(number).kernel for number in range(self.count)]
        return {kernel.source_key: kernel for kernel in every}

    def find(self, source_key: str) -> PackedKernel | None:
        """The kernel with this source key, or None."""
        return next((one.kernel for one in self._at(source_key) if one.kernel.source_key == source_key), None)

    def rendered(self, render_key: str) -> PackedKernel | None:
        """The kernel whose source was rendered from what has this key, or None."""
        return next((one.kernel for one in self._at(render_key) if one.kernel.render_key == render_key), None)

    def cubin(self, source_key: str) -> bytes:
        """The verified cubin; KeyError for a kernel that is not in this pack."""
        return self.packable(source_key).cubin

    def source(self, source_key: str) -> bytes:
        """The verified source. Raises as `cubin` does."""
        return self.packable(source_key).source

    def packable(self, source_key: str) -> Packable:
        """The kernel with its verified bytes. Raises as `cubin` does."""
        for one in self._at(source_key):
            if one.kernel.source_key == source_key:
                return one
        raise KeyError(source_key)

    def problems(self) -> list[str]:
        """What is wrong with its kernels, as sentences."""
        found, kernels = [], []
        for number in range(self.count):
            try:
                kernels.append(self._unpack(number).kernel)
            except (OSError, ValueError) as error:
                found.append(str(error))
        if not found and key_table(kernels) != self._keys:
            found.append("the keys in its table are not those of its kernels")
        if not found and sum(kernel.cubin_bytes for kernel in kernels) != self.cubin_bytes:
            found.append(f"its cubins do not have the {self.cubin_bytes} bytes that its head says")
        return found

    def check(self, start: int) -> int:
        """Where its last stream ends, if the first begins at `start`. Raises ValueError for a number that no pack
        has."""
        if any(number >= self.count for _, number in KEY.iter_unpack(self._keys)):
            raise ValueError(f"a key of its table is of a kernel that it does not have: it has {self.count}")
        places, end = list(PLACE.iter_unpack(self._places)), start
        for number, (offset, size, unpacked, before, shared, _) in enumerate(places):
            if offset != end:
                raise ValueError(f"its kernel {number} is not where the one before ends")
            end += size
            # How long the stream is that its own begins with a part of.
            whole = places[before][1] + places[before][4] if number != before < self.count else 0
            if not (CONTENT.size <= unpacked <= _MOST and before < self.count and shared <= whole and size + shared):
                raise ValueError(f"its kernel {number} has a size or a number that none can have")
        return end

    def _at(self, key: str) -> list[Packable]:
        """The kernels that may have this key."""
        found: list[Packable] = []
        if len(key) < 2 * PREFIX:
            return found
        wanted = bytes.fromhex(key[: 2 * PREFIX])
        place = bisect.bisect_left(range(len(self._keys) // KEY.size), wanted, key=self._prefix)
        while place < len(self._keys) // KEY.size and self._prefix(place) == wanted:
            found.append(self._unpacked(KEY.unpack_from(self._keys, place * KEY.size)[1]))
            place += 1
        return found

    def _prefix(self, place: int) -> bytes:
        return self._keys[place * KEY.size : place * KEY.size + PREFIX]

    def _place(self, number: int) -> tuple[Any, ...]:
        return PLACE.unpack_from(self._places, number * PLACE.size)

    def _unpack(self, number: int) -> Packable:
        first, chain = number, [self._place(number)]
        while (before := chain[0][3]) != first:
            first, chain = before, [self._place(before), *chain]
            if len(chain) > LONGEST:
                raise ValueError(f"its kernel {number} comes after more than {LONGEST - 1} others")
        # Opened each time: in a child that closed all descriptors, a kept one could be another file's. The owner is not
        # checked again: the SHA-256 comes from the table, whose owner was checked.
        stream = b""
        with files.open_file(self.path) as file:
            for offset, size, _, _, shared, _ in chain:
                stream = stream[:shared] + os.pread(file.fileno(), size, offset)
        if hashlib.sha256(stream).digest() != chain[-1][5]:
            raise ValueError(f"the SHA-256 of its kernel {number} does not match")
        return _read_content(_decompressed(stream, sum(place[2] for place in chain))[-chain[-1][2] :])


def key_table(kernels: Iterable[PackedKernel]) -> bytes:
    """The kernels' numbers by key, sorted."""
    found = set()
    for number, kernel in enumerate(kernels):
        for key in filter(None, (kernel.source_key, kernel.render_key)):
            found.add((bytes.fromhex(key)[:PREFIX], number))
    return b"".join(KEY.pack(*each) for each in sorted(found))


def read(descriptor: int, path: Path) -> SolidPack:
    """The solid pack that `descriptor`, of the file at `path`, begins with. Raises OSError or ValueError."""
    head_size, table_size, sha256 = SIZES.unpack(os.pread(descriptor, SIZES.size, len(MAGIC)).ljust(SIZES.size))
    total = os.fstat(descriptor).st_size
    if head_size + table_size > min(_MOST, total):
        raise ValueError(f"its head and table claim {head_size + table_size} bytes, but the file has {total}")
    content = os.pread(descriptor, head_size + table_size, START)
    if len(content) != head_size + table_size or hashlib.sha256(content).digest() != sha256:
        raise ValueError("the SHA-256 of its head and table does not match")
    try:
        head = json.loads(content[:head_size])
        if head["schema"] != SCHEMA:
            raise ValueError(f"its keys are of schema {shown(head['schema'])}, and those here are of {SCHEMA}")
        for name in ("keys", "count", "cubin_bytes"):
            if type(head[name]) is not int or not 0 <= head[name] <= _MOST_KERNELS * _MOST:
                raise ValueError(f"the {name} of its head are {shown(head[name])}")
        keys, places = head["keys"] * KEY.size, head["count"] * PLACE.size
        pack = SolidPack(path, head, content[head_size:][:keys], content[head_size + keys :])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its head lacks a field or has a wrong one ({error!r})") from error
    if keys + places != table_size or pack.check(START + len(content)) != total:
        raise ValueError(f"it has {total} bytes, which are not those that its table describes")
    return pack


def _read_content(content: bytes) -> Packable:
    *sizes, zero = CONTENT.unpack_from(content)
    if zero or CONTENT.size + sum(sizes) > len(content):
        raise ValueError(f"a kernel claims {sum(sizes)} bytes, but {len(content) - CONTENT.size} were stored")
    parts, start = [], CONTENT.size
    for size in sizes:
        parts.append(content[start : start + size])
        start += size
    cubin, source, text = parts
    counted = (len(cubin), len(source), hashlib.sha256(cubin).hexdigest(), hashlib.sha256(source).hexdigest())
    try:
        return Packable(
            PackedKernel.from_json(json.loads(text) | dict(zip(COUNTED, counted, strict=True))), cubin, source
        )
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"the description of a kernel is none ({error!r})") from error


def filters(lzma: Any, **options: int) -> list[dict[str, int]]:
    # What decides an instruction is in the same place of each of its 16 bytes. No chain has more than the dictionary.
    return [{"id": lzma.FILTER_LZMA1, "lc": 0, "lp": 3, "pb": 4, "dict_size": 1 << 20, **options}]


def _decompressed(content: bytes, size: int) -> bytes:
    """Raises ValueError for content that is not `size` bytes when it is unpacked, and where Python has no lzma."""
    try:
        lzma = late("lzma")
    except ImportError as error:
        raise ValueError(f"this Python was built without lzma, which unpacks it ({error})") from error
    if size > _MOST:
        raise ValueError(f"a kernel claims {size} bytes, more than {_MOST}")
    try:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters(lzma))
        found = unpacking.decompress(content, size + 1)
    except (lzma.LZMAError, MemoryError) as error:
        raise ValueError(f"a kernel cannot be unpacked: {error}") from error
    if len(found) != size:
        raise ValueError(f"a kernel does not have the {size} bytes that the table says")
    return found
