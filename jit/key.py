"""What makes two binaries the same.

The source key covers the rendered source, the content of every header that it reaches, the architecture, the flags that
all compilers are given, and what is done to the cubin afterwards: what a kernel is, whoever compiled it. Packs are
looked up by it.

The key covers the source key, the compiler's full build identity and all its flags. Neither holds a path or a time, so
two install prefixes agree on both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Raise it when the meaning of an entry changes, so that two versions of the package can share a root.
SCHEMA = 5

# From the "#" on, which is searched for at memory's speed; what stands before it on its line is looked at afterwards.
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)')
# A file that changed this shortly ago may change again without another size or time: clocks of filesystems are coarse.
YOUNG_NS = 3_000_000_000
_MAX_MEMO = 256

Signature = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _Reached:
    """The headers that some includes lead to, and every file that was looked at for it; None for one that is absent.
    `digest` is of the headers."""

    headers: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, Signature | None], ...]
    digest: str


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_memo: dict[tuple[str, tuple[tuple[str, str], ...]], _Reached] = {}


def build_key(source_key: str, compiler: str, flags: Sequence[str]) -> str:
    """A hex digest of everything that decides the bytes of a cubin.

    `compiler` is an identity without a path, `flags` all its options without paths.
    """
    return digest(["deep_gemm", SCHEMA, source_key, compiler, list(flags)])


def source_key(
    *, name: str, source: str, arch: str, flags: Sequence[str], include_dir: Path | None, post_pass: str = ""
) -> str:
    """A hex digest of everything that decides what a kernel does: of `build_key`, all but the compiler.

    `name` is the kernel's symbol, `flags` are those that every compiler is given, `post_pass` is the identity of what
    is done to the cubin afterwards.
    """
    content = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
    reached = _reached(source, include_dir)
    return digest(["deep_gemm source", SCHEMA, name, arch, list(flags), content, reached and reached.digest, post_pass])


def digest(parts: Sequence[object]) -> str:
    """A key, 40 hex digits, of plain JSON: strings, numbers, lists, and dictionaries in their order."""
    return hashlib.sha256(_encode(parts).encode()).hexdigest()[:40]


def headers(source: str, include_dir: Path | None) -> list[tuple[str, str]]:
    """(name, SHA-256 of the content) of each header that `source` reaches, sorted by name.

    Conditional compilation is not evaluated: a header that might be included counts. One that is not in `include_dir`
    belongs to the toolkit, whose identity is in the key already, or does not exist, which the compiler will say.

    What was found is remembered, and holds as long as no file that was looked at has changed.
    """
    reached = _reached(source, include_dir)
    return list(reached.headers) if reached is not None else []


def _reached(source: str, include_dir: Path | None) -> _Reached | None:
    if include_dir is None:
        return None
    first = (str(include_dir), tuple(_includes(source, "")))
    known = _memo.get(first)
    if known is None or any(signature(path) != seen for path, seen in known.files):
        known, settled = _reach(*first)
        if not settled:
            _memo.pop(first, None)
        else:
            if len(_memo) >= _MAX_MEMO:
                _memo.clear()
            _memo[first] = known
    return known


def _reach(include_dir: str, first: Sequence[tuple[str, str]]) -> tuple[_Reached, bool]:
    """What the includes `first` lead to, and whether that may be remembered."""
    found: dict[str, str] = {}
    looked_at: dict[str, Signature | None] = {}
    pending = list(first)
    now = time.time_ns()
    while pending:
        folder, name = pending.pop()
        for candidate in dict.fromkeys((f"{folder}{name}", name)):
            if candidate in found:
                break
            path = os.path.join(include_dir, candidate)
            # Before it is read: a change between the two then shows as another signature.
            looked_at[path] = signature(path)
            try:
                content = Path(path).read_bytes()
            except (OSError, ValueError):
                continue
            found[candidate] = hashlib.sha256(content).hexdigest()
            # A quoted name is looked for beside the file that includes it, before the include path.
            parent = candidate.rpartition("/")[0]
            pending += _includes(content.decode("utf-8", "replace"), f"{parent}/" if parent else "")
            break
    # A time in the future, by a clock that is not ours, says nothing of how young a file is.
    settled = all(seen is None or max(seen[3:]) < now - YOUNG_NS for seen in looked_at.values())
    by_name = tuple(sorted(found.items()))
    return _Reached(by_name, tuple(looked_at.items()), digest(by_name)), settled


def signature(path: str) -> Signature | None:
    """What tells whether a file has changed since, if it was older than YOUNG_NS then; None for one that is absent."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _includes(text: str, folder: str) -> list[tuple[str, str]]:
    found = []
    for match in _INCLUDE.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not before.strip(" \t"):
            quoted, angled = match.groups()
            found.append((folder if quoted else "", quoted or angled))
    return found
