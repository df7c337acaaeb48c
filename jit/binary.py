"""A request to the builder, the binary that it returns, and how a binary is sent to another process."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.cache.entry import SOURCE, Address, Entry
from deep_gemm.jit.cache.packable import ARCH, NAME, Packable, PackedKernel, packable
from deep_gemm.jit.resources import Resources, seconds_from_json, shown
from deep_gemm.records import record


@record(frozen=True)
class PostPass:
    """A pass over a compiled cubin.

    `identity` is a short name and part of the cubin's key: a pass that gives other bytes needs another name. `apply`
    takes the cubin and the kernel's name and returns the cubin to use; `describe` says in a few words what it did to a
    cubin. Raises InvalidInputError.
    """

    identity: str
    apply: Callable[[bytes, str], bytes]
    describe: Callable[[bytes], str]

    def __post_init__(self) -> None:
        if not _IDENTITY.fullmatch(self.identity):
            raise InvalidInputError(
                "identity of a post-pass must be 1 to 60 lower-case letters, digits, dots and hyphens, but it is "
                f"{self.identity!r}."
            )


_IDENTITY = re.compile(r"[a-z0-9.-]{1,60}")


@record(frozen=True)
class BuildRequest:
    """One kernel to build.

    `name` is its extern "C" symbol and part of a directory's name, `arch` a target such as "sm_90a", `meta` JSON that
    is stored beside the cubin and is no part of its identity. `render_key` identifies what `source` was rendered from,
    where that is known; it is stored too. Raises InvalidInputError.
    """

    name: str
    source: str
    arch: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    render_key: str = ""
    post_pass: PostPass | None = None

    @property
    def stored_meta(self) -> dict[str, Any]:
        """`meta`, and the identity of the post-pass if there is one."""
        return {**self.meta, **({"post_pass": self.post_pass.identity} if self.post_pass else {})}

    def finished(self, cubin: bytes) -> bytes:
        """The compiler's `cubin` after the post-pass, if there is one."""
        return self.post_pass.apply(cubin, self.name) if self.post_pass else cubin

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidInputError(f"name must be a C identifier of at most 160 characters, but it is {self.name!r}.")
        if not ARCH.fullmatch(self.arch):
            raise InvalidInputError(f'arch must be a target such as "sm_90a", but it is {self.arch!r}.')


@record(frozen=True)
class Binary:
    """A compiled kernel. `layer` tells where it came from: "memory", "pack", "disk", "compiled", or
    "adopted" from another process.

    `key` is its identity with the compiler, `source_key` the one without, `cuda` the toolkit's version such as "12.9".
    `seconds` has "lookup" (the time that this call searched) and, from when it was compiled, "compile" and, where
    known, "ptxas". `source_path` is None where the source could not be stored, and for a kernel of a pack, which keeps
    it inside.
    """

    name: str
    key: str
    arch: str
    cubin: bytes = field(repr=False)
    resources: Resources
    source_path: str | None
    layer: str
    compiler: str
    seconds: Mapping[str, float]
    source_key: str
    cuda: str

    def encode(self) -> bytes:
        """The binary as bytes for `decode` in another process: a checksum, JSON and the cubin. `source_path` is left
        out."""
        header = {name: getattr(self, name) for name in (*_TEXTS, "layer")}
        header |= {"resources": self.resources.to_json(), "seconds": dict(self.seconds)}
        content = json.dumps(header, allow_nan=False).encode() + b"\n" + self.cubin
        return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


_TEXTS = ("name", "key", "arch", "compiler", "source_key", "cuda")
_TEXT = re.compile(r"[ -~]{1,200}")
LAYERS = ("memory", "pack", "disk", "compiled", "adopted")


def decode(data: bytes) -> Binary:
    """What `Binary.encode` wrote. Raises ValueError, saying why, for anything else."""
    checksum, _, content = data.partition(b"\n")
    if checksum != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("its checksum does not match")
    head, _, cubin = content.partition(b"\n")
    try:
        header = json.loads(head)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        texts: dict[str, Any] = {name: header.get(name) for name in _TEXTS}
        for name, text in texts.items():
            if not isinstance(text, str) or not _TEXT.fullmatch(text):
                raise ValueError(f"its {name} is {shown(text)}")
        seconds, resources = seconds_from_json(header.get("seconds")), Resources.from_json(header.get("resources"))
        layer = header.get("layer")
        if layer not in LAYERS:
            raise ValueError(f"its layer is {shown(layer)}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its description is not one of this version ({error})") from error
    return Binary(**texts, layer=layer, cubin=cubin, resources=resources, source_path=None, seconds=seconds)


def of_kernel(kernel: PackedKernel, cubin: bytes, start: float) -> Binary:
    """A kernel of a pack; `start` is when the lookup began."""
    seconds = {**kernel.seconds, "lookup": time.perf_counter() - start}
    return Binary(
        kernel.name,
        kernel.key,
        kernel.arch,
        cubin,
        kernel.resources,
        None,
        "pack",
        kernel.compiler,
        seconds,
        kernel.source_key,
        kernel.cuda,
    )


def of_entry(address: Address, source_key: str, entry: Entry, start: float) -> Binary:
    """An entry of the disk cache; `start` as for `of_kernel`."""
    seconds = {**entry.seconds, "lookup": time.perf_counter() - start}
    source = f"{entry.directory}/{SOURCE}"
    return Binary(
        address.name,
        address.key,
        address.arch,
        entry.cubin,
        entry.resources,
        source,
        "disk",
        entry.compiler,
        seconds,
        source_key,
        address.cuda,
    )


def check_same(binary: Binary, request: BuildRequest, identity: Mapping[str, str]) -> None:
    """Raises InvalidInputError unless `binary` has the name and arch of `request`, and the fields of `identity`."""
    for what, wanted in {"name": request.name, "arch": request.arch, **identity}.items():
        if getattr(binary, what) != wanted:
            raise InvalidInputError(
                f"{binary.name} cannot be adopted: its {what} is {getattr(binary, what)}, but {wanted} is wanted here: "
                "both processes need the same version of deep_gemm, the same compiler and the same DG_* settings."
            )
    try:
        Resources.from_json(binary.resources.to_json())
        seconds_from_json(dict(binary.seconds))
    except ValueError as error:
        raise InvalidInputError(f"{binary.name} cannot be adopted: its {error}.") from error
    if not binary.cubin:
        raise InvalidInputError(f"{binary.name} cannot be adopted: its cubin is empty.")


def packed(binary: Binary, request: BuildRequest) -> Packable:
    """`binary`, which was built from `request`, as a pack stores it. Raises ValueError as `packable` does."""
    return packable(
        name=binary.name,
        arch=binary.arch,
        source_key=binary.source_key,
        key=binary.key,
        cuda=binary.cuda,
        compiler=binary.compiler,
        cubin=binary.cubin,
        source=request.source.encode(),
        resources=binary.resources,
        seconds={what: took for what, took in binary.seconds.items() if what != "lookup"},
        meta=request.stored_meta,
        render_key=request.render_key,
    )
