"""One kernel on disk: kernel.cu, kernel.cubin and kernel.json, and how they prove that they belong together.

kernel.json is written last and begins with a checksum over the rest of its bytes and over the cubin: without it there
is no entry, and with it the entry is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deep_gemm.jit.cache import files

SOURCE, CUBIN, META = "kernel.cu", "kernel.cubin", "kernel.json"
FORMAT = 2
_MAX_META = 1 << 24
_MAX_CUBIN = 1 << 30
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HEAD = re.compile(rb'\{\n "checksum": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Entry:
    """`described` is the status of kernel.json from just before it was read."""

    cubin: bytes
    meta: Mapping[str, Any]
    directory: str
    described: os.stat_result


def encode(address: Address, cubin: bytes, meta: Mapping[str, Any]) -> bytes:
    """The content of kernel.json. Raises TypeError or ValueError if `meta` is not plain JSON."""
    body = {**meta, "format": FORMAT, "name": address.name, "key": address.key, "arch": address.arch}
    body["cubin_bytes"] = len(cubin)
    body.pop("checksum", None)
    rest = (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode().removeprefix(b"{\n")
    return b'{\n "checksum": "%b",\n%b' % (_checksum(rest, cubin).encode(), rest)


def read(address: Address, directory: int, path: str) -> Entry:
    """The verified entry. Raises FileNotFoundError if there is none, OSError or ValueError if there is a bad one."""
    try:
        return _verified(address, directory, path)
    except RecursionError as error:  # from reading JSON, or from a message
        raise ValueError(f"{META} is nested too deeply") from error


def _verified(address: Address, directory: int, path: str) -> Entry:
    text, described = files.read(META, _MAX_META, directory)
    try:
        cubin = files.read(CUBIN, _MAX_CUBIN, directory).data
    except FileNotFoundError as error:
        raise ValueError(f"{CUBIN} is missing") from error
    head = _HEAD.match(text)
    sound = head is not None and cubin and head[1].decode() == _checksum(text[head.end() :], cubin)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{META} is not JSON") from error
    if not isinstance(body, dict):
        raise ValueError(f"{META} is not an object")
    expected = {"format": FORMAT, "name": address.name, "key": address.key, "arch": address.arch}
    for field, value in expected.items():
        if body.get(field) != value:
            raise ValueError(f"its {field} is {body.get(field)!r}, not {value!r}")
    # Last, since what is of another key or format is better said so than as a checksum.
    if not sound:
        raise ValueError("its checksum does not match")
    del body["checksum"]
    return Entry(cubin, body, path, described)


def _checksum(rest: bytes, cubin: bytes) -> str:
    digest = hashlib.sha256(rest)
    digest.update(b"\0")
    digest.update(cubin)
    return digest.hexdigest()
