"""The shape of the one tar that a pack is: blocks, and the header that a member of a name and a size has."""

from __future__ import annotations

import functools
import tarfile

BLOCK = tarfile.BLOCKSIZE
# Where a header holds the size and its checksum, whose field counts as spaces.
_SIZE, _SUM = slice(124, 136), slice(148, 156)
_LONGEST_NAME = 100


def header(name: str, size: int) -> bytes:
    """The one header that a member of this name and size has: a regular file of nobody, at time 0. Raises ValueError
    for what it has no place for."""
    text = name.encode("ascii")
    if len(text) > _LONGEST_NAME or not 0 <= size < 1 << 33:
        raise ValueError(f"a pack can have no member {name!r} of {size} bytes")
    # What tarfile makes, field by field, of a name and a size; it takes ten times as long, and a start compares two
    # headers for each kernel.
    block = bytearray(_blank())
    block[: len(text)] = text
    block[_SIZE] = b"%011o\0" % size
    block[_SUM] = b"%06o\0 " % sum(block)
    return bytes(block)


@functools.lru_cache(maxsize=1)
def _blank() -> bytes:
    info = tarfile.TarInfo()
    info.mode = 0o644
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[_SUM] = b" " * 8
    return bytes(block)


def padded(size: int) -> int:
    """`size` in bytes, rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def ended(size: int) -> int:
    """The size of an archive whose members take `size` bytes: two empty blocks, and whole records."""
    return -(-(size + 2 * BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
