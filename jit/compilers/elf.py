"""The build id of a shared library: its exact identity, without loading or hashing 100 MB."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from typing import BinaryIO

_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


def identity(path: str) -> str:
    """A hex string that changes whenever the library does. Raises OSError or ValueError if it is no ELF library."""
    status = os.stat(path)
    return _identity(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _identity(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        found = _build_id(file)
        if found:
            return found
        # A library without a build id costs a fraction of a second once: slow, but never a wrong key.
        digest = hashlib.sha256()
        file.seek(0)
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
        return digest.hexdigest()[:40]


def _build_id(file: BinaryIO) -> str | None:
    header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_size, count = struct.unpack_from("<HH", header, 54)
    file.seek(table)
    entries = file.read(entry_size * count)
    for index in range(count):
        base = index * entry_size
        if base + 56 > len(entries):
            raise ValueError("its program headers are cut off")
        (kind,) = struct.unpack_from("<I", entries, base)
        if kind != _PT_NOTE:
            continue
        offset, size = struct.unpack_from("<Q", entries, base + 8)[0], struct.unpack_from("<Q", entries, base + 32)[0]
        file.seek(offset)
        note = _find_note(file.read(min(size, 1 << 16)))
        if note:
            return note
    return None


def _find_note(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, value_size, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        value_at = name_at + (name_size + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[value_at : value_at + value_size].hex()
        at = value_at + (value_size + 3 & ~3)
    return None
