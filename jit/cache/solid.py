"""A solid pack: many kernels in one small file, which is made to be shipped inside a package.

Kernels that resemble each other are compressed together, in blocks of a few, so that each takes 1 to 5 KB instead of
its 25 to 50. A kernel is found by a search in a table of keys: no list of kernels is read, and one block is unpacked.

    MAGIC                       names the format
    two sizes, SHA-256          of the head and of the table, and of both together
    head                        JSON: the version that wrote it, what it holds in all, and the table's counts
    table                       the places of keys, then of blocks, each with its size and its SHA-256
    blocks                      XZ streams: descriptions as JSON in one line, then all cubins, then all sources

Descriptions are those of a manifest (`pack.Kernel`). Both keys of a kernel, that of its source and that of what the
source is rendered from, are in the table. Nothing is taken from a file before its SHA-256 was compared.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import files
from deep_gemm.jit.cache.packable import Kernel, Packable, summary
from deep_gemm.jit.key import SCHEMA
from deep_gemm.jit.resources import shown

MAGIC = b"deep_gemm solid pack 1\n"
_SIZES = struct.Struct("<II32s")
_START = len(MAGIC) + _SIZES.size
_MOST = 1 << 26
"""Bytes of a head with its table, and of a block."""

_PREFIX = 8
"""Bytes of a key in the table: few enough that it stays small. Blocks hold whole keys, which are compared."""
_KEY = struct.Struct(f">{_PREFIX}sH")
_BLOCK = struct.Struct("<III32s")
"""The place of a block, its size, its size when it is unpacked, and its SHA-256."""

_UNPACKED_AT_ONCE = 4
"""Blocks that stay in memory: a kernel's source and its cubin are asked for one after the other."""


class SolidPack:
    """A solid pack whose head and table were read and checked. Blocks are checked when they are read.

    It has what a `pack.Pack` has. Its methods raise OSError or ValueError, whose text is the reason, for a block that
    is damaged.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], keys: bytes, blocks: bytes) -> None:
        self.path, self._keys = path, keys
        self.version, self.count, self.cubin_bytes = str(head["version"]), int(head["count"]), int(head["cubin_bytes"])
        self._blocks = list(_BLOCK.iter_unpack(blocks))
        self._unpacked = functools.lru_cache(maxsize=_UNPACKED_AT_ONCE)(self._unpack)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """Every kernel by its source key. All blocks are unpacked for it."""
        every = [self._unpack(index) for index in range(len(self._blocks))]
        return {source_key: item.kernel for block in every for source_key, item in block.items()}

    def find(self, source_key: str) -> Kernel | None:
        """The kernel with this source key, or None."""
        return next((one.kernel for one in self._at(source_key) if one.kernel.source_key == source_key), None)

    def rendered(self, render_key: str) -> Kernel | None:
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
        """What is wrong with its blocks, as sentences."""
        found = []
        for index in range(len(self._blocks)):
            try:
                self._unpack(index)
            except (OSError, ValueError) as error:
                found.append(str(error))
        return found

    def _at(self, key: str) -> list[Packable]:
        """The kernels of the blocks in which one may have this key."""
        found: list[Packable] = []
        if len(key) < 2 * _PREFIX:
            return found
        wanted = bytes.fromhex(key[: 2 * _PREFIX])
        place = bisect.bisect_left(range(len(self._keys) // _KEY.size), wanted, key=self._prefix)
        while place < len(self._keys) // _KEY.size and self._prefix(place) == wanted:
            found += self._unpacked(_KEY.unpack_from(self._keys, place * _KEY.size)[1]).values()
            place += 1
        return found

    def _prefix(self, place: int) -> bytes:
        return self._keys[place * _KEY.size : place * _KEY.size + _PREFIX]

    def _unpack(self, index: int) -> dict[str, Packable]:
        """The kernels of a block by source key."""
        offset, size, whole, sha256 = self._blocks[index]
        # Opened each time: in a child that closed all descriptors, a kept one could be another file's. The owner is not
        # checked again: the SHA-256 comes from the table, whose owner was checked.
        descriptor = files.open_file(self.path)
        try:
            content = os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)
        if len(content) != size or hashlib.sha256(content).digest() != sha256:
            raise ValueError(f"the SHA-256 of its block {index} does not match")
        return _read_block(_decompressed(content, whole))


def read(descriptor: int, path: Path) -> SolidPack:
    """The solid pack that `descriptor`, of the file at `path`, begins with. Raises OSError or ValueError."""
    head_size, table_size, sha256 = _SIZES.unpack(os.pread(descriptor, _SIZES.size, len(MAGIC)).ljust(_SIZES.size))
    total = os.fstat(descriptor).st_size
    if head_size + table_size > min(_MOST, total):
        raise ValueError(f"its head and table claim {head_size + table_size} bytes, but the file has {total}")
    content = os.pread(descriptor, head_size + table_size, _START)
    if len(content) != head_size + table_size or hashlib.sha256(content).digest() != sha256:
        raise ValueError("the SHA-256 of its head and table does not match")
    try:
        head = json.loads(content[:head_size])
        if head["schema"] != SCHEMA:
            raise ValueError(f"its keys are of schema {shown(head['schema'])}, and those here are of {SCHEMA}")
        keys, blocks = head["keys"] * _KEY.size, head["blocks"] * _BLOCK.size
        pack = SolidPack(path, head, content[head_size:][:keys], content[head_size + keys :])
    except (KeyError, TypeError, RecursionError, struct.error) as error:
        raise ValueError(f"its head lacks a field or has a wrong one ({error!r})") from error
    ends = [offset + size for offset, size, _, _ in pack._blocks]
    if keys + blocks != table_size or max([_START + len(content), *ends]) != total:
        raise ValueError(f"it has {total} bytes, which are not those that its table describes")
    return pack


def write(path: Path, blocks: Iterable[Sequence[Packable]]) -> list[Kernel]:
    """Write a solid pack, whole or not at all, and return what it holds. The kernels of each of `blocks`, which should
    resemble each other, are compressed together. The same blocks give the same bytes: how long kernels took to compile
    is left out. Raises OSError, and ValueError for kernels with one key."""
    listed: list[Kernel] = []
    keys: list[tuple[bytes, int]] = []
    contents, places = [], []
    for index, block in enumerate(blocks):
        kernels = [item.kernel for item in block]
        listed += kernels
        for kernel in kernels:
            for key in filter(None, (kernel.source_key, kernel.render_key)):
                keys.append((bytes.fromhex(key)[:_PREFIX], index))
        text = json.dumps([one.to_json() | {"seconds": {}} for one in kernels], sort_keys=True, allow_nan=False)
        whole = b"".join((text.encode(), b"\n", *(x.cubin for x in block), *(x.source for x in block)))
        contents.append(_compressed(whole))
        places.append((len(whole), hashlib.sha256(contents[-1]).digest()))
    if len({kernel.source_key for kernel in listed}) != len(listed):
        raise ValueError("two of its kernels have one source key")
    table = b"".join(_KEY.pack(*each) for each in sorted(set(keys)))
    counts = {"keys": len(set(keys)), "blocks": len(contents), "count": len(listed)}
    sizes = {"cubin_bytes": sum(kernel.cubin_bytes for kernel in listed)}
    head = json.dumps(summary(listed) | counts | sizes, sort_keys=True).encode() + b"\n"
    offset = _START + len(head) + len(table) + len(contents) * _BLOCK.size
    for content, (whole_size, sha256) in zip(contents, places, strict=True):
        table += _BLOCK.pack(offset, len(content), whole_size, sha256)
        offset += len(content)
    digest = hashlib.sha256(head + table).digest()
    start = MAGIC + _SIZES.pack(len(head), len(table), digest)
    files.write_whole(path, [start, head, table, *contents])
    return listed


def _read_block(whole: bytes) -> dict[str, Packable]:
    text, _, rest = whole.partition(b"\n")
    try:
        kernels = [Kernel.from_json(item) for item in json.loads(text)]
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"the descriptions of a block are no list of kernels ({error!r})") from error
    sizes = [kernel.cubin_bytes for kernel in kernels] + [kernel.source_bytes for kernel in kernels]
    if sum(sizes) != len(rest):
        raise ValueError(f"a block holds {len(rest)} bytes, and its descriptions say {sum(sizes)}")
    parts, place = [], 0
    for size in sizes:
        parts.append(rest[place : place + size])
        place += size
    cubins, sources = parts[: len(kernels)], parts[len(kernels) :]
    return {one.source_key: Packable(one, *both) for one, *both in zip(kernels, cubins, sources, strict=True)}


def _compressed(content: bytes) -> bytes:
    import lzma

    # Instructions are 16 bytes long, and what decides them is in the same place of each.
    options = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 3, "pb": 4}
    options["dict_size"] = 1 << max(16, (len(content) - 1).bit_length())
    return lzma.compress(content, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=[options])


def _decompressed(content: bytes, size: int) -> bytes:
    """Raises ValueError for content that is not `size` bytes when it is unpacked, and where Python has no lzma."""
    try:
        import lzma
    except ImportError as error:
        raise ValueError(f"this Python was built without lzma, which unpacks it ({error})") from error
    if size > _MOST:
        raise ValueError(f"a block claims {size} bytes, more than {_MOST}")
    try:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=4 * _MOST)
        found = unpacking.decompress(content, size + 1)
    except (lzma.LZMAError, MemoryError) as error:
        raise ValueError(f"a block cannot be unpacked: {error}") from error
    if len(found) != size:
        raise ValueError(f"a block does not have the {size} bytes that the table says")
    return found
