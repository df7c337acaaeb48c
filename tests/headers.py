"""Device headers with something changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from deep_gemm.jit.generator import include_dir


def edited_headers(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """A copy of the device headers in `folder`, which must not exist; of each edit the one `old` in `file` is `new`."""
    shutil.copytree(include_dir(), folder)
    text = (folder / file).read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise LookupError(f"{old!r} is {text.count(old)} times in {file}, and must be there once: adapt the edit")
        text = text.replace(old, new)
    (folder / file).write_text(text)
    return folder
