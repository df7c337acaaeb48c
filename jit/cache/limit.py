"""Keeping a disk cache within its limit (DG_JIT_CACHE_LIMIT) while many processes write to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from deep_gemm.jit.cache.disk import TALLY, TEMPORARY, DiskCache
from deep_gemm.jit.cache.files import Folder, Owned, UnsafeError, owned
from deep_gemm.jit.cache.maintenance import prune
from deep_gemm.log import log, warn_once

# A scan takes some 40 us for each entry, so there is one scan in (entries / 50) publications of all processes: 2 ms a
# publication, where compiling takes hundreds. Between two scans the cache grows by a fiftieth. A scan evicts down to
# 19/20 of the limit, so the limit holds at any time.
_SCANS = 50
_MOST_BETWEEN = 1000
_TARGET = 0.95
_DOT = b"."


def keep(disk: DiskCache, limit: int, written: Path) -> int:
    """Evict entries, least recently used first, until a little less than `limit` bytes are stored.

    To be called after each publication. `written`, the directory of the entry just published, stays, and so do entries
    that are locked or being written. Returns how many entries were evicted. A problem of the filesystem raises nothing;
    one warning says so.
    """
    try:
        with disk.open() as root:
            if not _due(root):
                return 0
            removed = prune(disk, max_bytes=int(limit * _TARGET), spare=written)
            _start_again(root, sum(1 for _ in disk.walk()))
    except (FileNotFoundError, UnsafeError):  # there is no cache, or a warning said why it is not used
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
    """Whether a scan is due. Counts this publication."""
    entries = 0
    # Without a tally a scan is due: a full disk, which needs it most, has no room for the tally.
    with contextlib.suppress(OSError), _tally(root) as tally:
        first, newline, dots = os.read(tally.fileno(), 2 * _MOST_BETWEEN).partition(b"\n")
        entries = int(first) if newline and first.isdigit() else 0
        if len(dots) + 1 < min(entries // _SCANS, _MOST_BETWEEN):
            os.write(tally.fileno(), _DOT)
            return False
    # Before the scan, so that others that publish now do not scan as well. If this process is killed, they count on.
    if entries:
        _start_again(root, entries)
    return True


def _tally(root: Folder) -> Owned:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return owned(TALLY, flags, directory=root.fd)


def _start_again(root: Folder, entries: int) -> None:
    with contextlib.suppress(OSError), root.made(TEMPORARY) as temporary:
        root.publish(TALLY, b"%d\n" % entries, temporary)
