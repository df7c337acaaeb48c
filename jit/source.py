"""The path by which a compiler's messages name a source."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deep_gemm.errors import CompileError
from deep_gemm.jit.cache.files import sweep
from deep_gemm.log import log

_PREFIX = "deep_gemm-source-"
_KEPT = 86400.0


@contextlib.contextmanager
def source_file(stored: Path | None, name: str, source: str) -> Iterator[str]:
    """The stored source's path, else one in the directory for temporary files. A file is written there only after a
    CompileError, for the reader of its message, and removed after a day."""
    if stored is not None:
        yield str(stored)
        return
    try:
        path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.urandom(8).hex()}", f"{name}.cu")
    except OSError as error:
        log.debug("no temporary file for %s: %s", name, error)
        yield f"{name}.cu"
        return
    try:
        yield str(path)
    except CompileError:
        with contextlib.suppress(OSError):
            sweep(path.parents[1], _KEPT, _PREFIX)
            os.mkdir(path.parent, 0o700)
            path.write_bytes(source.encode("utf-8", "surrogatepass"))
        raise
