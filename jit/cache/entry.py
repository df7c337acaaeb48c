"""One kernel on disk: kernel.cu, kernel.cubin and kernel.json, and how they prove that they belong together.

kernel.json is written last and holds a checksum over the cubin and over the rest of itself: without it there is no
entry, and with it the entry is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache.files import read_at

SOURCE, CUBIN, META = "kernel.cu", "kernel.cubin", "kernel.json"
FORMAT = 1
_MAX_META = 1 << 24
_MAX_CUBIN = 1 << 30
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
    cubin: bytes
    meta: Mapping[str, Any]
    directory: Path


def encode(address: Address, cubin: bytes, meta: Mapping[str, Any]) -> bytes:
    """The content of kernel.json. Raises TypeError or ValueError if `meta` is not plain JSON."""
    body = {**meta, "format": FORMAT, "name": address.name, "key": address.key, "arch": address.arch}
    body["cubin_bytes"] = len(cubin)
    # Through JSON once, so that the checksum covers what a reader will see (tuples are lists by then).
    body = json.loads(json.dumps(body, allow_nan=False))
    body["checksum"] = _checksum(body, cubin)
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read(address: Address, directory: int, path: Path) -> Entry:
    """The verified entry. Raises FileNotFoundError if there is none, OSError or ValueError if there is a bad one."""
    try:
        return _verified(address, directory, path)
    except RecursionError as error:  # from reading JSON, from writing it again for the checksum, or from a message
        raise ValueError(f"{META} is nested too deeply") from error


def _verified(address: Address, directory: int, path: Path) -> Entry:
    text = read_at(directory, META, _MAX_META)
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
    try:
        cubin = read_at(directory, CUBIN, _MAX_CUBIN)
    except FileNotFoundError as error:
        raise ValueError(f"{CUBIN} is missing") from error
    checksum = body.pop("checksum", None)
    if not cubin or checksum != _checksum(body, cubin):
        raise ValueError("its checksum does not match")
    return Entry(cubin, body, path)


def _checksum(body: Mapping[str, Any], cubin: bytes) -> str:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    digest.update(b"\0")
    digest.update(cubin)
    return digest.hexdigest()
