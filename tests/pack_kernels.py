"""Packs of kernels that the fake compiler makes, for tests of packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jit_fakes import FakeCompiler, builder, request

from deep_gemm.jit.binary import Binary, BuildRequest
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.pack import Packable, packable
from deep_gemm.jit.cache.packs import Packs


def sources(count: int = 3) -> list[BuildRequest]:
    return [request(name=f"k{i}", source=f"int body{i};\n", meta={"params": {"i": i}}) for i in range(count)]


def packed(asked: BuildRequest, binary: Binary) -> Packable:
    return packable(
        name=binary.name,
        arch=binary.arch,
        source_key=binary.source_key,
        key=binary.key,
        cuda=binary.cuda,
        compiler=binary.compiler,
        cubin=binary.cubin,
        source=asked.source.encode(),
        resources=binary.resources,
        seconds={"compile": 0.25},
        meta=asked.meta,
        render_key=asked.render_key,
    )


def make(path: Path, asked: list[BuildRequest] | None = None, compiler: FakeCompiler | None = None) -> Path:
    """A pack of what `compiler` makes of `asked`; its cache lies beside it."""
    asked = sources() if asked is None else asked
    build = builder(path.parent / f"{path.name}.cache" / "root", compiler, include_dir=path.parent / "no-headers")
    packs.write(path, [packed(one, build.build(one)) for one in asked])
    return path


def user(
    root: Path, *paths: Path, compiler: FakeCompiler | None = None, **options: Any
) -> tuple[Builder, FakeCompiler]:
    """A builder that uses just these packs, and the compiler that it falls back on."""
    compiler = compiler or FakeCompiler()
    options.setdefault("include_dir", root.parent / "no-headers")
    return Builder(root, compiler, packs=Packs(paths), **options), compiler
