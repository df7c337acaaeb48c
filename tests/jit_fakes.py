"""A fake compiler, for tests of the code around compilers."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deep_gemm.errors import CompileError
from deep_gemm.jit.builder import Builder, BuildRequest
from deep_gemm.jit.compilers.base import Compiled, Compiler
from deep_gemm.jit.resources import Resources


class FakeCompiler(Compiler):
    """Turns a source into bytes that depend on it and on `tag`, and writes a line to `journal` for each compilation."""

    kind = "fake"
    path = "/nowhere/fake"

    def __init__(
        self,
        journal: Path | None = None,
        seconds: float = 0.0,
        identity: str = "fake 1.0 build 7",
        on_compile: Callable[[str], None] | None = None,
        resources: Resources | None = None,
        tag: str = "",
    ) -> None:
        self.identity = identity
        self.version = (12, 9)
        self.journal = journal
        self.seconds = seconds
        self.on_compile = on_compile
        self.resources = resources or Resources(168, 1024, 0, 0, 0, 3)
        self.tag = tag
        self.calls: list[dict[str, Any]] = []

    def arch_flags(self, arch: str) -> tuple[str, ...]:
        return (f"--arch={arch}",)

    def compile(
        self,
        name: str,
        source: str,
        source_path: str,
        flags: Sequence[str],
        include_dir: Path | None,
        want_ptx: bool = False,
    ) -> Compiled:
        self.calls.append({"name": name, "source_path": source_path, "flags": tuple(flags), "include_dir": include_dir})
        if self.journal is not None:
            line = f"{os.getpid()} {name}\n".encode()
            descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line)
            os.close(descriptor)
        if self.on_compile is not None:
            self.on_compile(source)
        time.sleep(self.seconds)
        if "#error" in source:
            raise CompileError("it does not compile", log="#error", source_path=source_path, options=flags)
        ptx = "// ptx\n" if want_ptx else None
        seconds = {"compile": self.seconds, "ptxas": 0.0}
        return Compiled(cubin_of(source + self.tag), ptx, "the log", self.resources, seconds, tuple(flags))


def cubin_of(source: str) -> bytes:
    """The cubin that FakeCompiler makes of `source`: some kilobytes without repetition."""
    seed = source.encode()
    return b"\x7fELF" + b"".join(hashlib.sha256(seed + bytes([i])).digest() for i in range(64))


def request(name: str = "k", source: str = "int body;\n", **fields: Any) -> BuildRequest:
    return BuildRequest(name=name, source=source, arch=fields.pop("arch", "sm_90a"), **fields)


def builder(root: Path, compiler: Compiler | None = None, **options: Any) -> Builder:
    options.setdefault("include_dir", root.parent / "no-headers")
    return Builder(root=root, compiler=compiler or FakeCompiler(), **options)


# The fields that every entry on disk must have, for tests that write one without a builder.
DESCRIBED = {
    "compiler": "fake 1.0 build 7",
    "resources": Resources(168, 1024, 0, 0, 0, 3).to_json(),
    "seconds": {"compile": 0.5},
}


def compilations(journal: Path) -> list[str]:
    return journal.read_text().split("\n")[:-1] if journal.exists() else []
