"""Packs of kernels from the fake compiler, for tests of packs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jit_fakes import FakeCompiler, builder, request

from deep_gemm.jit.binary import BuildRequest, packed
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.packs import Packs


def sources(count: int = 3) -> list[BuildRequest]:
    return [request(name=f"k{i}", source=f"int body{i};\n", meta={"params": {"i": i}}) for i in range(count)]


def make(path: Path, asked: list[BuildRequest] | None = None, compiler: FakeCompiler | None = None) -> Path:
    """A pack of the kernels of `asked`, built by `compiler`; the cache lies beside it."""
    asked = sources() if asked is None else asked
    build = builder(path.parent / f"{path.name}.cache" / "root", compiler, include_dir=path.parent / "no-headers")
    packs.write(path, [packed(replace(build.build(one), seconds={"compile": 0.25}), one) for one in asked])
    return path


def user(
    root: Path, *paths: Path, compiler: FakeCompiler | None = None, **options: Any
) -> tuple[Builder, FakeCompiler]:
    """A builder that uses only these packs, and the compiler that it falls back on."""
    compiler = compiler or FakeCompiler()
    options.setdefault("include_dir", root.parent / "no-headers")
    return Builder(root, compiler, packs=Packs(paths), **options), compiler
