"""Functions from source text, as dataclasses make ``__init__``."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

_made = itertools.count()


def function(source: str, name: str, what: str, namespace: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function ``name`` of ``source``. Tracebacks and debuggers show its lines, in a file named after ``what``."""
    file = f"<deep_gemm {what} {next(_made)}>"  # numbered: kernels that are declared again have the same name
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # None: no file on disk to compare with
    found: dict[str, Any] = {} if namespace is None else namespace
    exec(compile(source, file, "exec"), found)
    made: Callable[..., Any] = found[name]
    return made
