"""The file that a compiler and its messages refer to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deep_gemm.log import log


@contextlib.contextmanager
def source_file(stored: Path | None, name: str, source: str) -> Iterator[str]:
    """The path to give the compiler: the stored source, else a private temporary that stays only after a failure."""
    if stored is not None:
        yield str(stored)
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="deep_gemm-"))
        path = folder / f"{name}.cu"
        path.write_text(source)
    except OSError as error:
        # NVRTC reads no file, so this is no reason to give up; NVCC will say what it misses.
        log.debug("no temporary file for %s: %s", name, error)
        yield f"{name}.cu"
        return
    yield str(path)
    with contextlib.suppress(OSError):
        path.unlink()
        folder.rmdir()
