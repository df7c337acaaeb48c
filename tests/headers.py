"""Device headers with something changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from deep_gemm.jit.generator import include_dir


def edited_headers(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """A copy of the device headers in `folder`, which must not exist; of each edit the one `old` in `file` is `new`."""
    shutil.copytree(include_dir(), folder)
    edit(folder / file, *edits)
    return folder


def edit(path: Path, *edits: tuple[str, str]) -> None:
    """Change a file: of each edit, `old` must be there once."""
    text = path.read_text()
    for old, new in edits:
        if text.count(old) != 1:
            found = f"{old!r} is {text.count(old)} times in {path.name}"
            raise LookupError(f"{found}, and must be there once: adapt the edit")
        text = text.replace(old, new)
    path.write_text(text)
