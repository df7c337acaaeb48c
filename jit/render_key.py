"""The identity of a rendered source, without rendering it.

Importing Jinja and compiling the templates takes some 20 ms of a process's first call. A pack holds sources beside its
cubins; with this key they are found without either.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from deep_gemm.jit import generator
from deep_gemm.jit.key import SCHEMA, YOUNG_NS, Signature, content_of, digest, signature

_memo: dict[str, tuple[tuple[tuple[str, Signature | None], ...], str]] = {}


def render_key(template: str, fields: Mapping[str, str | int | bool], directory: Path | None = None) -> str:
    """A hex digest of everything that decides what `generator.render` returns: all templates of the directory, the
    fields, and our module that renders them. Jinja's version is left out, so that packs serve whichever is installed:
    templates use what no version has changed."""
    templates = _templates(str(directory or generator.template_dir()))
    return digest(["deep_gemm render", SCHEMA, _renderer(), templates, template, sorted(fields.items())])


@functools.lru_cache(maxsize=1)
def device_code() -> str:
    """A key of all templates and headers: times of kernels hold until one of these changes."""
    include = generator.include_dir()
    headers = sorted(path for path in include.rglob("*") if path.is_file())
    contents = [(str(path.relative_to(include)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in headers]
    return digest(["deep_gemm device code", SCHEMA, _templates(str(generator.template_dir())), contents])


@functools.lru_cache(maxsize=1)
def _renderer() -> str:
    """The digest of our module that renders."""
    return hashlib.sha256(content_of(generator.__file__, os.stat(generator.__file__).st_size)).hexdigest()


def _templates(directory: str) -> str:
    """A digest of all templates, remembered until one of them changes or a file is added or removed."""
    known = _memo.get(directory)
    if known is not None and all(signature(path) == seen for path, seen in known[0]):
        return known[1]
    now = time.time_ns()
    # Taken before the files are read: if one changes in between, its signature differs next time.
    files = [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if name.endswith(".jinja")]
    looked_at = tuple((path, signature(path)) for path in (directory, *files))
    contents = [
        (os.path.basename(path), hashlib.sha256(content_of(path, seen[2] if seen else 0)).hexdigest())
        for path, seen in looked_at[1:]
    ]
    found = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    if all(seen is None or max(seen[3:]) < now - YOUNG_NS for _, seen in looked_at):
        _memo[directory] = looked_at, found
    return found
