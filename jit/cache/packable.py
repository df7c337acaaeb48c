"""A kernel that a pack can hold: its description, which is checked wherever it is read, and its bytes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from deep_gemm.jit.key import SCHEMA
from deep_gemm.jit.resources import Resources, seconds_from_json, shown
from deep_gemm.records import record

_DISTRIBUTION = "deep-gemm-jit"
_MAX_FILE = 1 << 30
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,159}")
ARCH = re.compile(r"sm_\d{2,3}[af]?")
_KEY = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")


@record(frozen=True)
class PackedKernel:
    """One kernel as a manifest describes it. `cuda` is the toolkit's version such as "12.9", `key` the one with the
    compiler; sizes are in bytes; `meta` is what was stored beside the kernel, plain JSON. `render_key` identifies what
    its source was rendered from; it is empty if that is not known."""

    name: str
    arch: str
    source_key: str
    render_key: str
    key: str
    cuda: str
    compiler: str
    cubin_bytes: int
    cubin_sha256: str
    source_bytes: int
    source_sha256: str
    resources: Resources
    seconds: Mapping[str, float] = field(hash=False)
    meta: Mapping[str, Any] = field(hash=False)

    @property
    def toolkit(self) -> tuple[int, int]:
        """`cuda` as numbers, to compare."""
        major, minor = self.cuda.split(".")
        return int(major), int(minor)

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in (*_TEXTS, *_SIZES)},
            "resources": self.resources.to_json(),
            "seconds": dict(self.seconds),
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PackedKernel:
        """Raises ValueError for what `to_json` did not write."""
        texts: dict[str, Any] = {name: data.get(name) for name in _TEXTS}
        for name, pattern in _TEXTS.items():
            if not isinstance(texts[name], str) or not pattern.fullmatch(texts[name]):
                raise ValueError(f"{name} of a kernel is {shown(texts[name])}")
        sizes: dict[str, Any] = {name: data.get(name) for name in _SIZES}
        for name, value in sizes.items():
            if type(value) is not int or not (name == "cubin_bytes") <= value <= _MAX_FILE:
                raise ValueError(f"{name} of {texts['name']} is {shown(value)}")
        meta = data.get("meta")
        if not isinstance(meta, dict):
            raise ValueError(f"meta of {texts['name']} is no object")
        resources, seconds = Resources.from_json(data.get("resources")), seconds_from_json(data.get("seconds"))
        return cls(**texts, **sizes, resources=resources, seconds=seconds, meta=meta)


def version_of(head: Mapping[str, Any]) -> str:
    """The version that a pack's head says. Raises ValueError if it is none, and KeyError without one."""
    version = head["version"]
    if not isinstance(version, str) or not _LINE.fullmatch(version):
        raise ValueError(f"its version is {shown(version)}")
    return version


_LINE = re.compile(r"[ -~]{1,200}")
_TEXTS = {
    "name": NAME,
    "arch": ARCH,
    "source_key": _KEY,
    "render_key": re.compile(r"([0-9a-f]{40})?"),
    "key": _KEY,
    "cuda": _VERSION,
    "compiler": _LINE,
    "cubin_sha256": _SHA256,
    "source_sha256": _SHA256,
}
_SIZES = ("cubin_bytes", "source_bytes")


@record(frozen=True)
class Packable:
    """A kernel with its bytes: `cubin`, and `source` as it was rendered."""

    kernel: PackedKernel
    cubin: bytes
    source: bytes


def packable(
    *,
    name: str,
    arch: str,
    source_key: str,
    key: str,
    cuda: str,
    compiler: str,
    cubin: bytes,
    source: bytes,
    resources: Resources,
    seconds: Mapping[str, float],
    meta: Mapping[str, Any],
    render_key: str = "",
) -> Packable:
    """A kernel for a pack. Raises ValueError for a field that a manifest cannot have, and for what is not plain
    JSON."""
    kernel = PackedKernel(
        name=name,
        arch=arch,
        source_key=source_key,
        render_key=render_key,
        key=key,
        cuda=cuda,
        compiler=compiler,
        cubin_bytes=len(cubin),
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        source_bytes=len(source),
        source_sha256=hashlib.sha256(source).hexdigest(),
        resources=resources,
        seconds=seconds,
        meta=meta,
    )
    try:
        if not cubin:
            raise ValueError("its cubin is empty")
        kernel = PackedKernel.from_json(json.loads(json.dumps(kernel.to_json(), allow_nan=False)))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be described as JSON: {error!r}") from error
    return Packable(kernel, cubin, source)


def summary(listed: Iterable[PackedKernel]) -> dict[str, Any]:
    """What the head of a pack says of all its kernels: the version of this package, for people to read, the schema of
    their keys, which decide what the pack can serve, and their targets, toolkits and compilers."""
    kernels = list(listed)
    return {
        "version": _version(),
        "schema": SCHEMA,
        "arches": sorted({kernel.arch for kernel in kernels}),
        "toolkits": sorted({kernel.cuda for kernel in kernels}),
        "compilers": sorted({kernel.compiler for kernel in kernels}),
    }


def _version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a copy of the sources that nobody installed
        return "unknown"
