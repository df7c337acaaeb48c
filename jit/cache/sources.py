"""Rendered sources on disk, by what they are rendered from: they save a process Jinja and its templates.

Nothing depends on them: whatever is wrong with one, the source is rendered. Each file is a line with the SHA-256 of the
rest, and the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re

from deep_gemm.jit.cache import files
from deep_gemm.jit.cache.disk import _RENDERED, _TEMPORARY, DiskCache

_KEY = re.compile(r"[0-9a-f]{40}")
_LARGEST = 1 << 24


def get(disk: DiskCache, render_key: str) -> str | None:
    """The source that is rendered from what `render_key` stands for, verified, or None."""
    if not _KEY.fullmatch(render_key) or not disk.usable():
        return None
    with contextlib.suppress(OSError, ValueError):
        digest, _, content = files.read(disk.path(_RENDERED, render_key), _LARGEST).data.partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() == digest:
            return content.decode()
    return None


def put(disk: DiskCache, render_key: str, source: str) -> None:
    """Keep a source. One that is known stays."""
    if not _KEY.fullmatch(render_key) or os.path.lexists(disk.path(_RENDERED, render_key)) or not disk.usable():
        return
    content = source.encode()
    with contextlib.suppress(OSError):
        for folder in (_TEMPORARY, _RENDERED):
            files.make_directory(disk.root / folder)
        line = hashlib.sha256(content).hexdigest().encode() + b"\n"
        files.publish(disk.root / _TEMPORARY, disk.root / _RENDERED / render_key, line + content)
