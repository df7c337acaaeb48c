"""A compiled kernel, and how it travels to another process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from deep_gemm.jit.resources import Resources


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. `layer` tells where it came from: "memory", "disk", "compiled", or "adopted" from another
    process.

    `seconds` has "lookup" (of this build call until the binary was found, or found missing) and, from when it was
    compiled, "compile" and, where known, "ptxas". `source_path` is None where the source could not be stored.
    """

    name: str
    key: str
    arch: str
    cubin: bytes
    resources: Resources
    source_path: str | None
    layer: str
    compiler: str
    seconds: Mapping[str, float]

    def encode(self) -> bytes:
        """A checksum, JSON and the cubin, for `decode` in another process. The source's path stays behind."""
        header = {
            "name": self.name,
            "key": self.key,
            "arch": self.arch,
            "resources": self.resources.to_json(),
            "layer": self.layer,
            "compiler": self.compiler,
            "seconds": dict(self.seconds),
        }
        content = json.dumps(header, allow_nan=False).encode() + b"\n" + self.cubin
        return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def decode(data: bytes) -> Binary:
    """What `Binary.encode` wrote. Raises ValueError, saying why, for anything else."""
    checksum, _, content = data.partition(b"\n")
    if checksum != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("its checksum does not match")
    head, _, cubin = content.partition(b"\n")
    try:
        header = json.loads(head)
        texts = {name: str(header[name]) for name in ("name", "key", "arch", "layer", "compiler")}
        seconds = {str(name): float(value) for name, value in header["seconds"].items()}
        resources = Resources.from_json(header["resources"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"its description is not one of this version ({error!r})") from error
    return Binary(**texts, cubin=cubin, resources=resources, source_path=None, seconds=seconds)
