"""Keeping a disk cache within its limit (DG_JIT_CACHE_LIMIT) while many processes write to it."""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path

from deep_gemm.jit.cache.disk import TALLY, TEMPORARY, DiskCache
from deep_gemm.jit.cache.files import Folder, UnsafeError
from deep_gemm.jit.cache.maintenance import prune
from deep_gemm.log import log, warn_once

# A scan looks at every entry, some 40 us each, so it is made once in (entries / 50) publications, whoever makes them:
# 2 ms for each, where compiling takes hundreds. Until the next scan the cache then grows by a fiftieth, and since a
# scan evicts down to 19/20 of the limit, the limit holds all the time.
_SCANS = 50
_MOST_BETWEEN = 1000
_TARGET = 0.95
_DOT = b"."


def keep(disk: DiskCache, limit: int, written: Path) -> int:
    """Evict entries, least recently used first, until a little less than `limit` bytes are stored.

    To be called after each publication. `written`, the directory of the entry just published, stays, and so does
    whatever is locked or being written. Returns how many entries were evicted. Raises nothing for a problem of the
    filesystem: it warns once.
    """
    try:
        with disk.open() as root:
            if not _due(root):
                return 0
            removed = prune(disk, max_bytes=int(limit * _TARGET), spare=written)
            _start_again(root, sum(1 for _ in disk.walk()))
    except (FileNotFoundError, UnsafeError):  # there is nothing, or it was said why it is not used
        return 0
    except (OSError, RuntimeError, ValueError) as error:
        message = f"The cache {disk.root} cannot be kept within its limit of {limit} bytes: {error}."
        warn_once(f"cache-limit:{disk.root}", message)
        return 0
    evicted = sum(item.done for item in removed)
    if evicted:
        log.debug("evicted %d kernels from %s, whose limit is %d bytes", evicted, disk.root, limit)
    return evicted


def _due(root: Folder) -> bool:
    """Whether enough was published for another scan. Counts this publication."""
    entries = 0
    # Without a tally it is due: a full disk has no place for one, and needs the scan most.
    with contextlib.suppress(OSError), _tally(root) as tally:
        first, newline, dots = (tally.read(2 * _MOST_BETWEEN) or b"").partition(b"\n")
        entries = int(first) if newline and first.isdigit() else 0
        if len(dots) + 1 < min(entries // _SCANS, _MOST_BETWEEN):
            tally.write(_DOT)
            return False
    # Before the scan, so that others that publish now leave it to us; if we are killed, they count on.
    if entries:
        _start_again(root, entries)
    return True


def _tally(root: Folder) -> FileIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return FileIO(os.open(TALLY, flags, 0o600, dir_fd=root.fd), "r+")


def _start_again(root: Folder, entries: int) -> None:
    with contextlib.suppress(OSError), root.made(TEMPORARY) as temporary:
        root.publish(TALLY, b"%d\n" % entries, temporary)
