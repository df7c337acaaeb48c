"""Cache keys: which inputs decide the bytes of a binary.

The source key covers the rendered source, the content of every header that it includes, the architecture, the flags
that all compilers get, and the post-pass: what the kernel does, whichever compiler built it. Packs are looked up by it.

The key covers the source key, the compiler's full build identity and all its flags. Neither holds a path or a time, so
two install prefixes agree on both.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.cache.files import owned
from deep_gemm.records import record

# Raise it when the meaning of an entry changes: two versions of the package can then share a root.
SCHEMA = 5

# The pattern begins with a fixed character, "#", which is fast to search for. What precedes it on its line is checked
# afterwards.
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)')
# A file that is younger may change again and keep its size and time, since the clocks of filesystems are coarse.
YOUNG_NS = 3_000_000_000
_MAX_MEMO = 256
_LARGEST = 1 << 26
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)

Signature = tuple[int, int, int, int, int]


@record(frozen=True)
class _Reached:
    """The headers that some includes reach, and the signature of every file that was looked at (None if it is absent).
    `digest` covers the headers."""

    headers: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, Signature | None], ...]
    digest: str


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_memo: dict[tuple[str, tuple[tuple[str, str], ...]], _Reached] = {}
_headers: dict[tuple[str, str], tuple[Signature | None, str, list[tuple[str, str]]]] = {}
"""Of each header that was read, by its path and its name: its signature, its SHA-256 and its includes. Families reach
most headers in common."""


def build_key(source_key: str, compiler: str, flags: Sequence[str]) -> str:
    """A hex digest of everything that decides the bytes of a cubin.

    `compiler` is an identity without a path, `flags` all its options without paths.
    """
    return digest(["deep_gemm", SCHEMA, source_key, compiler, list(flags)])


def source_key(
    *, name: str, source: str, arch: str, flags: Sequence[str], include_dir: Path | None, post_pass: str = ""
) -> str:
    """A hex digest of everything that decides what a kernel does: `build_key` without the compiler.

    `name` is the kernel's symbol, `flags` are those that every compiler gets, `post_pass` is the identity of the pass
    over the cubin. Raises InvalidInputError for a header that is no regular file, or too large.
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
    belongs to the toolkit, whose identity is in the key already, or does not exist, and then the compiler fails.

    The result is remembered until a file that was looked at changes.
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
    """The headers that the includes `first` reach, and whether the result may be remembered."""
    found: dict[str, str] = {}
    looked_at: dict[str, Signature | None] = {}
    pending = list(first)
    now, unread = time.time_ns(), False
    while pending:
        folder, name = pending.pop()
        for above in _above(name):
            _check_end(above, _status(above))
        for candidate in dict.fromkeys((f"{folder}{name}", name)):
            if candidate in found:
                break
            path = os.path.join(include_dir, candidate)
            # Taken before the file is read: if it changes in between, the signature differs next time.
            status = _status(path)
            looked_at[path] = seen = _signature(status)
            _check_end(path, status)
            known = _headers.get((path, candidate))
            if known is None or known[0] != seen:
                content = _content(path, status.st_size if status is not None else 0)
                if content is None:
                    continue
                if isinstance(content, OSError):
                    # The compiler may be able to read it: then nobody shall find the binary under this key.
                    found[candidate], unread = f"{content} {os.urandom(16).hex()}", True
                    break
                # A quoted name is looked for beside the file that includes it, before the include path.
                parent = candidate.rpartition("/")[0]
                includes = _includes(content.decode("utf-8", "replace"), f"{parent}/" if parent else "")
                known = (seen, hashlib.sha256(content).hexdigest(), includes)
                if _is_settled(seen, now):
                    if len(_headers) >= _MAX_MEMO:
                        _headers.clear()
                    _headers[path, candidate] = known
            found[candidate] = known[1]
            pending += known[2]
            break
    settled = not unread and all(seen is None or _is_settled(seen, now) for seen in looked_at.values())
    by_name = tuple(sorted(found.items()))
    return _Reached(by_name, tuple(looked_at.items()), digest(by_name)), settled


def _is_settled(seen: Signature | None, now: int) -> bool:
    """Whether a file would have another signature if it had changed. A time in the future comes from another machine's
    clock and does not tell the file's age."""
    return seen is not None and max(seen[3:]) < now - YOUNG_NS


def _above(name: str) -> list[str]:
    """Where a name with ".." may lead from the temporary folder in which a source is compiled."""
    rest = os.path.normpath(name) if ".." in name else ""
    if not rest.startswith("../"):
        return []
    while rest.startswith("../"):
        rest = rest[3:]
    folder = Path(tempfile.gettempdir()).absolute()
    return [str(each / rest) for each in (folder, *folder.parents)]


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _check_end(path: str, status: os.stat_result | None) -> None:
    """Raises InvalidInputError for a header that might have no end: reading /dev/zero filled the memory."""
    if status is None:
        return
    regular = stat.S_ISREG(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) and (not regular or status.st_size > _LARGEST):
        what = f"has {status.st_size} bytes, more than {_LARGEST}" if regular else "is no regular file"
        raise InvalidInputError(f"The source includes {path}, which {what}. Include a file of text.")


def _content(path: str, size: int) -> bytes | OSError | None:
    """What a header holds, None if there is none, or why it cannot be read, though it was tried twice."""
    problem: OSError | None = None
    for _ in range(2):
        try:
            return content_of(path, size)
        except ValueError:  # a name that no file can have
            return None
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            problem = error
    return problem


def content_of(path: str, size: int) -> bytes:
    """The bytes of a file, which has ``size`` of them as far as is known. `Path.read_bytes` takes several times as
    long, and a process reads some forty."""
    with owned(path, os.O_RDONLY) as file:
        content = os.read(file.fileno(), size + 1)
        if len(content) != size:  # else this was the end
            while part := os.read(file.fileno(), 1 << 16):
                content += part
    return content


def signature(path: str) -> Signature | None:
    """A value that changes whenever the file does, provided that the file was older than YOUNG_NS. None if it is
    absent."""
    return _signature(_status(path))


def _signature(status: os.stat_result | None) -> Signature | None:
    if status is None:
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
