"""Rendered sources on disk, by render key: a process that finds one needs neither Jinja nor the templates.

Nothing depends on them: if one is damaged, the source is rendered and stored again.
"""

from __future__ import annotations

from deep_gemm.jit.cache import notes
from deep_gemm.jit.cache.disk import RENDERED, DiskCache


def get(disk: DiskCache, render_key: str) -> str | None:
    """The verified source of this render key, or None."""
    found = notes.get(disk, (RENDERED,), render_key)
    if found is not None:
        disk.rendered.add(render_key)
    return found


def put(disk: DiskCache, render_key: str, source: str) -> None:
    """Keep a source. A sound one stays; anything else of its name is replaced."""
    if render_key in disk.rendered or not render_key:
        return
    # Once in a process, even if it fails: rendering a source costs less than trying again and again.
    disk.rendered.add(render_key)
    notes.put(disk, (RENDERED,), render_key, source)
