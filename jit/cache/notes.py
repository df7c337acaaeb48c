"""Small checked texts on disk, by key: rendered sources, and times that were measured.

No kernel depends on one: if it is damaged, it counts as missing, and is written again. A file holds a line with the
SHA-256 over its key and its text, then the text. Files are private and published by one rename, as entries are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence

from deep_gemm.jit.cache.disk import RENDERED, TEMPORARY, DiskCache
from deep_gemm.jit.cache.files import Folder

_KEY = re.compile(r"[0-9a-f]{40}")
_LARGEST = 1 << 24


def get(disk: DiskCache, folders: Sequence[str], key: str) -> str | None:
    """The verified text of `key` in the folder that `folders` lead to, or None."""
    if _KEY.fullmatch(key):
        with contextlib.suppress(OSError, ValueError), disk.open() as root, root.below(folders) as folder:
            return _read(folder, key)
    return None


def names(disk: DiskCache, folders: Sequence[str]) -> list[str]:
    """What lies directly in the folder."""
    with contextlib.suppress(OSError), disk.open() as root, root.below(folders) as folder:
        return sorted(os.listdir(folder.fd))
    return []


def put(disk: DiskCache, folders: Sequence[str], key: str, text: str, replace: bool = False) -> bool:
    """Keep a text. Unless `replace`, a sound one stays; anything else of its name is replaced. Returns whether there is
    a sound text now."""
    if not _KEY.fullmatch(key) or not disk.usable():
        return False
    with contextlib.suppress(OSError, ValueError), disk.open(create=True) as root, root.made_below(folders) as folder:
        with contextlib.suppress(OSError, ValueError):
            if not replace and _read(folder, key) is not None:
                return True
        content = text.encode()
        with root.made(TEMPORARY) as temporary:
            line = _digest(key, content) + b"\n"
            with contextlib.suppress(IsADirectoryError):
                folder.publish(key, line + content, temporary)
                return True
            folder.remove(key)
            folder.publish(key, line + content, temporary)
            return True
    return False


def _read(folder: Folder, key: str) -> str | None:
    digest, _, content = folder.read(key, _LARGEST).data.partition(b"\n")
    return content.decode() if digest == _digest(key, content) else None


def _digest(key: str, content: bytes) -> bytes:
    # The key is part of it, so that a file that was copied over another does not match.
    return hashlib.sha256(f"{key}\n".encode() + content).hexdigest().encode()


def source(disk: DiskCache, render_key: str) -> str | None:
    """The verified rendered source of this render key, or None. A process that finds one needs neither Jinja nor the
    templates."""
    found = get(disk, (RENDERED,), render_key)
    if found is not None:
        disk.rendered.add(render_key)
    return found


def put_source(disk: DiskCache, render_key: str, text: str) -> None:
    """Keep a rendered source. A sound one stays; anything else of its name is replaced."""
    if render_key in disk.rendered or not render_key:
        return
    # Once in a process, even if it fails: rendering a source costs less than trying again and again.
    disk.rendered.add(render_key)
    put(disk, (RENDERED,), render_key, text)
