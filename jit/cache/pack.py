"""A pack: many compiled kernels in one file to ship, an uncompressed tar of a fixed layout.

    manifest.json           the list of kernels, with the SHA-256 of their files
    manifest.json.sha256    as `sha256sum` writes it
    <source key>.cubin, <source key>.cu       for each kernel, in the manifest's order

The manifest and the layout give the place of each byte, so that no member has to be walked over. Every header must be
the one that this module writes: a file with a link, a path or a further member is refused. Nothing is unpacked: a cubin
is read, checked, and used from memory.

`read` and `problems` also take a solid pack; see `solid.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from deep_gemm.jit.cache import files, solid
from deep_gemm.jit.cache.archive import BLOCK, archive_size, header, padded
from deep_gemm.jit.cache.packable import Packable, PackedKernel, summary, version_of
from deep_gemm.jit.cache.solid import SolidPack
from deep_gemm.jit.key import SCHEMA
from deep_gemm.jit.resources import shown
from deep_gemm.records import record

SUFFIX = ".dgpack"
FORMAT = 1
MANIFEST = "manifest.json"
_SUMS = f"{MANIFEST}.sha256"
_MAX_MANIFEST = 1 << 25


@record(frozen=True)
class Pack:
    """A pack whose manifest was read and checked. Its cubins are checked when they are read.

    `version` is of the package that wrote it; `kernels` are by source key.
    """

    path: Path
    version: str
    kernels: Mapping[str, PackedKernel]
    offsets: Mapping[str, int]

    @property
    def count(self) -> int:
        """The number of kernels."""
        return len(self.kernels)

    @property
    def cubin_bytes(self) -> int:
        """The size of all cubins together."""
        return sum(kernel.cubin_bytes for kernel in self.kernels.values())

    def find(self, source_key: str) -> PackedKernel | None:
        """The kernel with this source key, or None."""
        return self.kernels.get(source_key)

    def rendered(self, render_key: str) -> PackedKernel | None:
        """The first kernel whose source was rendered from what has this key, or None."""
        return self._rendered.get(render_key)

    @cached_property
    def _rendered(self) -> dict[str, PackedKernel]:
        return {kernel.render_key: kernel for kernel in reversed(list(self.kernels.values())) if kernel.render_key}

    def cubin(self, source_key: str) -> bytes:
        """The verified cubin. Raises OSError or ValueError; KeyError for a kernel that is not in this pack."""
        kernel = self.kernels[source_key]
        return self._member(f"{source_key}.cubin", self.offsets[source_key], kernel.cubin_bytes, kernel.cubin_sha256)

    def source(self, source_key: str) -> bytes:
        """The verified source. Raises as `cubin` does."""
        kernel = self.kernels[source_key]
        offset = self.offsets[source_key] + BLOCK + padded(kernel.cubin_bytes)
        return self._member(f"{source_key}.cu", offset, kernel.source_bytes, kernel.source_sha256)

    def packable(self, source_key: str) -> Packable:
        """The kernel with its verified bytes. Raises as `cubin` does."""
        return Packable(self.kernels[source_key], self.cubin(source_key), self.source(source_key))

    def _member(self, name: str, offset: int, size: int, sha256: str) -> bytes:
        # Opened each time: in a child that closed all descriptors, a kept one could be another file's. The owner is not
        # checked again: the SHA-256 comes from the manifest, whose owner was checked.
        with files.open_file(self.path) as file:
            first = os.pread(file.fileno(), BLOCK, offset)
            content = os.pread(file.fileno(), size, offset + BLOCK)
        if first != header(name, size):
            raise ValueError(f"{name} is not where the manifest says")
        if len(content) != size or hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"the SHA-256 of {name} does not match")
        return content


def read(path: Path, trust: bool = False) -> Pack | SolidPack:
    """The pack at `path`. Raises OSError or ValueError, whose text is the reason, if there is none or it is damaged;
    and, unless `trust`, if somebody other than this user or root could have written it, since a cubin is code.

    Only the manifest is read. It gives the place of each kernel, and the file's size tells that none is missing; a
    kernel's bytes are read when it is used.
    """
    with files.open_file(path) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        problem = None if trust else _danger(status, path)
        if problem is not None:
            raise files.UnsafeError(problem)
        if os.pread(descriptor, len(solid.MAGIC), 0) == solid.MAGIC:
            return solid.read(descriptor, path)
        total = status.st_size
        text, start = _manifest(descriptor, total)
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else None
            raise ValueError(f"its format is {shown(found)}, and this version reads {FORMAT}")
        if body.get("schema") != SCHEMA:
            raise ValueError(f"its keys are of schema {shown(body.get('schema'))}, and those here are of {SCHEMA}")
        version = version_of(body)
        listed = [PackedKernel.from_json(item) for item in body["kernels"]]
    except RecursionError as error:
        raise ValueError(f"{MANIFEST} is nested too deeply") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} lacks a field or has a wrong one ({error!r})") from error
    kernels = {kernel.source_key: kernel for kernel in listed}
    if len(kernels) != len(listed):
        raise ValueError(f"{MANIFEST} lists a kernel twice")
    offsets = {}
    for kernel in listed:
        offsets[kernel.source_key] = start
        start += 2 * BLOCK + padded(kernel.cubin_bytes) + padded(kernel.source_bytes)
    if archive_size(start) != total:
        raise ValueError(f"it has {total} bytes, and {MANIFEST} describes {archive_size(start)}")
    return Pack(path, version, kernels, offsets)


def problems(path: Path) -> list[str]:
    """What is wrong with the pack at `path`, every byte checked, as sentences; empty if it is sound."""
    try:
        pack = read(path, trust=True)
        if isinstance(pack, SolidPack):
            return pack.problems()
        opened = files.open_file(path)
    except (OSError, ValueError) as error:
        return [str(error)]
    found = []
    for source_key, kernel in pack.kernels.items():
        try:
            pack.packable(source_key)
        except (OSError, ValueError) as error:
            found.append(f"{kernel.name}: {error}")
    # The padding is zero. A bit that is set there is a sign of more damage.
    end = BLOCK
    with opened, open(opened.fileno(), "rb", closefd=False) as file:
        try:
            for size in _sizes(pack, file.fileno()):
                file.seek(end + size)
                gap = file.read(padded(size) - size)
                end += padded(size) + BLOCK
                if any(gap):
                    found.append(f"the padding after byte {end - BLOCK - len(gap)} is not zero")
            file.seek(end - BLOCK)
            if any(file.read()):
                found.append("the end after its last member is not zero")
        except OSError as error:
            found.append(str(error))
    return found


def write(path: Path, contents: Iterable[Packable]) -> list[PackedKernel]:
    """Write a pack, whole or not at all, and return what it holds. The same kernels give the same bytes.

    Of two with one source key the first is kept. Raises OSError, and ValueError if there are too many kernels for one
    manifest.
    """
    chosen: dict[str, Packable] = {}
    for item in contents:
        chosen.setdefault(item.kernel.source_key, item)
    order = sorted(chosen.values(), key=lambda item: (item.kernel.arch, item.kernel.name, item.kernel.source_key))
    listed = [item.kernel for item in order]
    text = _encode(listed)
    if len(text) > _MAX_MANIFEST:
        raise ValueError(f"{len(listed)} kernels are too many for one pack: write several")
    digest = hashlib.sha256(text).hexdigest()
    members = [(MANIFEST, text), (_SUMS, _sums(digest))]
    for item in order:
        members += [(f"{item.kernel.source_key}.cubin", item.cubin), (f"{item.kernel.source_key}.cu", item.source)]
    parts = [part for name, content in members for part in (header(name, len(content)), _whole_blocks(content))]
    size = sum(map(len, parts))
    files.write_whole(path, [*parts, bytes(archive_size(size) - size)])
    return listed


def _encode(listed: list[PackedKernel]) -> bytes:
    kernels = [kernel.to_json() for kernel in listed]
    body = {"format": FORMAT, "kernels": kernels, **summary(listed)}
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _manifest(descriptor: int, total: int) -> tuple[bytes, int]:
    """The manifest's bytes, checked, and where the first kernel begins."""
    size = _size(os.pread(descriptor, BLOCK, 0))
    if size > min(_MAX_MANIFEST, total):
        raise ValueError(f"{MANIFEST} claims {size} bytes, but the file has {total}, and {_MAX_MANIFEST} is the limit")
    text = os.pread(descriptor, size, BLOCK)
    expected = _sums(hashlib.sha256(text).hexdigest())
    at = BLOCK + padded(size)
    if len(text) != size or os.pread(descriptor, BLOCK + len(expected), at) != header(_SUMS, len(expected)) + expected:
        raise ValueError(f"the SHA-256 of {MANIFEST} does not match")
    return text, at + BLOCK + padded(len(expected))


def _size(block: bytes) -> int:
    """The manifest's size, from the first header of a file. Raises ValueError if it is not that of a pack."""
    try:
        size = tarfile.TarInfo.frombuf(block, "ascii", "strict").size
        if size >= 0 and block == header(MANIFEST, size):
            return size
    except (tarfile.HeaderError, ValueError, OverflowError):
        pass
    raise ValueError(f"it does not begin with the {MANIFEST} of a pack")


def _sizes(pack: Pack, descriptor: int) -> list[int]:
    """The sizes of all members in their order."""
    manifest = _size(os.pread(descriptor, BLOCK, 0))
    kernels = [size for kernel in pack.kernels.values() for size in (kernel.cubin_bytes, kernel.source_bytes)]
    return [manifest, len(_sums("0" * 64)), *kernels]


def _whole_blocks(content: bytes) -> bytes:
    return content + bytes(padded(len(content)) - len(content))


def _sums(digest: str) -> bytes:
    return f"{digest}  {MANIFEST}\n".encode()


def _danger(status: os.stat_result, path: Path) -> str | None:
    """Why the pack that has this status must not be used, or None."""
    problem = files.danger(status, path)
    # Of a link, both the link and its target could be replaced.
    for folder in dict.fromkeys((os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))):
        above = os.stat(folder)
        # In a directory such as /tmp, only its owner and the file's can replace a file.
        sticky = above.st_mode & stat.S_ISVTX and above.st_uid in (0, os.geteuid())
        if problem is None and not sticky and (theirs := files.danger(above, folder)) is not None:
            problem = f"others can replace it, since {theirs}"
    advice = "or set DG_JIT_TRUST_CACHE_DIR=1 if you trust everybody on this machine"
    return None if problem is None else f"{problem}, {advice}"
