"""One kernel on disk: kernel.cu, kernel.cubin and kernel.json, and the checksum that ties them together.

kernel.json is written last. It begins with a checksum over the source, the cubin and its own other bytes, which hold
the key. Without kernel.json there is no entry; with it, the entry is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from deep_gemm.jit.cache.files import Folder
from deep_gemm.jit.resources import Resources, seconds_from_json, shown
from deep_gemm.records import record

SOURCE, CUBIN, META = "kernel.cu", "kernel.cubin", "kernel.json"
FORMAT = 3
MAX_META = 1 << 24
_MAX_SOURCE = 1 << 26
_MAX_CUBIN = 1 << 30
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HEAD = re.compile(rb'\{\n "checksum": "([0-9a-f]{64})",\n')


@record(frozen=True)
class Address:
    """Where an entry lies under the root: an entry of another arch, CUDA or driver version is never looked at."""

    arch: str
    cuda: str
    driver: str
    name: str
    key: str

    def __post_init__(self) -> None:
        for part in (self.arch, self.cuda, self.driver, self.name, self.key):
            if not _SAFE.fullmatch(part):
                raise ValueError(f"{part!r} cannot be part of a path in the cache")

    def parts(self) -> tuple[str, str, str, str]:
        return self.arch, f"cuda-{self.cuda}", f"driver-{self.driver}", f"{self.name}-{self.key}"


class Entry(NamedTuple):
    """A kernel whose files match their checksum. `meta` is kernel.json without the checksum; the fields that a build
    uses are checked, and repeated here with their types. `described` is the status of kernel.json from just before it
    was read."""

    source: bytes
    cubin: bytes
    meta: Mapping[str, Any]
    compiler: str
    resources: Resources
    seconds: Mapping[str, float]
    directory: str
    described: os.stat_result


def encode(address: Address, source: bytes, cubin: bytes, meta: Mapping[str, Any]) -> bytes:
    """The content of kernel.json. Raises TypeError or ValueError if `meta` is not plain JSON."""
    body = {**meta, "format": FORMAT, "name": address.name, "key": address.key, "arch": address.arch}
    body["cubin_bytes"] = len(cubin)
    body.pop("checksum", None)
    rest = (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode().removeprefix(b"{\n")
    return b'{\n "checksum": "%b",\n%b' % (_checksum(rest, source, cubin).encode(), rest)


def read(address: Address, folder: Folder) -> Entry:
    """The verified entry. Raises FileNotFoundError if there is none, OSError or ValueError if there is a bad one."""
    try:
        return _verified(address, folder)
    except RecursionError as error:  # from reading JSON, or from a message
        raise ValueError(f"{META} is nested too deeply") from error


def _verified(address: Address, folder: Folder) -> Entry:
    text, described = folder.read(META, MAX_META)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{META} is not JSON") from error
    if not isinstance(body, dict):
        raise ValueError(f"{META} is not an object")
    expected = {"format": FORMAT, "name": address.name, "key": address.key, "arch": address.arch}
    for field, value in expected.items():
        if body.get(field) != value:
            raise ValueError(f"its {field} is {shown(body.get(field))}, not {value!r}")
    # The size is checked before memory is taken for it.
    size = body.get("cubin_bytes")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _MAX_CUBIN:
        raise ValueError(f"its cubin_bytes are {shown(size)}")
    source, cubin = _part(folder, SOURCE, _MAX_SOURCE), _part(folder, CUBIN, size)
    head = _HEAD.match(text)
    if head is None or head[1].decode() != _checksum(text[head.end() :], source, cubin):
        raise ValueError("its checksum does not match")
    del body["checksum"]
    resources, seconds = Resources.from_json(body.get("resources")), seconds_from_json(body.get("seconds"))
    compiler = body.get("compiler")
    if not isinstance(compiler, str):
        raise ValueError(f"compiler must be text, but it is {shown(compiler)}")
    return Entry(source, cubin, body, compiler, resources, seconds, folder.path, described)


def _part(folder: Folder, name: str, limit: int) -> bytes:
    try:
        return folder.read(name, limit).data
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing") from error


def _checksum(rest: bytes, source: bytes, cubin: bytes) -> str:
    # The cubin is hashed last and by itself: it is ten times as long as the others. Each part's length precedes it, so
    # that no byte can move from one part to the next.
    digest = hashlib.sha256(b"%d %d\0" % (len(rest), len(source)) + rest + source)
    digest.update(cubin)
    return digest.hexdigest()
