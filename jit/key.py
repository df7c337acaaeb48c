"""What makes two binaries the same.

The key covers the rendered source, the content of every header that it reaches, the compiler's full build identity,
the flags and the architecture. It holds no path and no time, so two install prefixes agree on it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

# Raise it when the meaning of an entry changes, so that two versions of the package can share a root.
SCHEMA = 1

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


def build_key(
    *, name: str, source: str, arch: str, compiler: str, flags: Sequence[str], include_dir: Path | None
) -> str:
    """A hex digest of everything that decides the bytes of a cubin.

    `name` is the kernel's symbol, `compiler` an identity without a path, `flags` the options without paths.
    """
    parts = ["deep_gemm", SCHEMA, name, arch, compiler, list(flags), source, headers(source, include_dir)]
    text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def headers(source: str, include_dir: Path | None) -> list[tuple[str, str]]:
    """(name, SHA-256 of the content) of each header that `source` reaches, sorted by name.

    Conditional compilation is not evaluated: a header that might be included counts. One that is not in `include_dir`
    belongs to the toolkit, whose identity is in the key already, or does not exist, which the compiler will say.
    """
    if include_dir is None:
        return []
    found: dict[str, str] = {}
    pending = _includes(source, "")
    while pending:
        folder, name = pending.pop()
        for candidate in dict.fromkeys((f"{folder}{name}", name)):
            if candidate in found:
                break
            try:
                content = (include_dir / candidate).read_bytes()
            except OSError:
                continue
            found[candidate] = hashlib.sha256(content).hexdigest()
            # A quoted name is looked for beside the file that includes it, before the include path.
            parent = candidate.rpartition("/")[0]
            pending += _includes(content.decode("utf-8", "replace"), f"{parent}/" if parent else "")
            break
    return sorted(found.items())


def _includes(text: str, folder: str) -> list[tuple[str, str]]:
    return [(folder if quoted else "", quoted or angled) for quoted, angled in _INCLUDE.findall(text)]
