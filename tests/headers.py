"""Edited copies of the device headers."""

import shutil
from pathlib import Path

from deep_gemm.jit.generator import include_dir


def edited_headers(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """A copy of the device headers in `folder`, which must not exist, with each edit (old, new) applied to `file`."""
    shutil.copytree(include_dir(), folder)
    edit(folder / file, *edits)
    return folder


def edit(path: Path, *edits: tuple[str, str]) -> None:
    """Apply edits (old, new) to a file; each `old` must be there exactly once."""
    text = path.read_text()
    for old, new in edits:
        if text.count(old) != 1:
            found = f"{old!r} is {text.count(old)} times in {path.name}"
            raise LookupError(f"{found}, and must be there once: adapt the edit")
        text = text.replace(old, new)
    path.write_text(text)
