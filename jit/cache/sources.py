"""Rendered sources on disk, by render key: a process that finds one needs neither Jinja nor the templates.

Nothing depends on them: if one is damaged, the source is rendered and stored again. A file holds a line with the
SHA-256 over its key and its source, then the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import re

from deep_gemm.jit.cache.disk import RENDERED, TEMPORARY, DiskCache
from deep_gemm.jit.cache.files import Folder

_KEY = re.compile(r"[0-9a-f]{40}")
_LARGEST = 1 << 24


def get(disk: DiskCache, render_key: str) -> str | None:
    """The verified source of this render key, or None."""
    if not _KEY.fullmatch(render_key):
        return None
    with contextlib.suppress(OSError, ValueError), disk.open() as root, root.child(RENDERED) as folder:
        content = _read(folder, render_key)
        if content is not None:
            disk.rendered.add(render_key)
            return content.decode()
    return None


def put(disk: DiskCache, render_key: str, source: str) -> None:
    """Keep a source. A sound one stays; anything else of its name is replaced."""
    if render_key in disk.rendered or not _KEY.fullmatch(render_key):
        return
    # Once in a process, even if it fails: rendering a source costs less than trying again and again.
    disk.rendered.add(render_key)
    with contextlib.suppress(OSError, ValueError), disk.open(create=True) as root, root.made(RENDERED) as folder:
        with contextlib.suppress(OSError, ValueError):
            if _read(folder, render_key) is not None:
                return
        content = source.encode()
        with root.made(TEMPORARY) as temporary:
            line = _digest(render_key, content) + b"\n"
            with contextlib.suppress(IsADirectoryError):
                folder.publish(render_key, line + content, temporary)
                return
            folder.remove(render_key)
            folder.publish(render_key, line + content, temporary)


def _read(folder: Folder, render_key: str) -> bytes | None:
    digest, _, content = folder.read(render_key, _LARGEST).data.partition(b"\n")
    return content if digest == _digest(render_key, content) else None


def _digest(render_key: str, content: bytes) -> bytes:
    # The key is part of it, so that a file that was copied over another does not match.
    return hashlib.sha256(f"{render_key}\n".encode() + content).hexdigest().encode()
