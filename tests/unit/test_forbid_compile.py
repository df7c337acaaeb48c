"""DG_JIT_FORBID_COMPILE: what is stored still serves, and anything else is an error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, request

from deep_gemm.errors import CompileError


def test_a_missing_kernel_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler()
    build = builder(tmp_path / "root", compiler)
    # Set after the builder was made: it is read when it is needed.
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    with pytest.raises(CompileError) as caught:
        build.build(request())
    message = str(caught.value)
    for part in (
        "forbids compiling k for sm_90a",
        build.key(request()),
        str(tmp_path / "root"),
        "deep-gemm precompile",
    ):
        assert part in message
    assert compiler.calls == []
    assert list(tmp_path.iterdir()) == []
    assert (build.stats["forbidden"], build.stats["misses"], build.stats["failed"]) == (1, 1, 0)

    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "0")
    assert build.build(request()).layer == "compiled"


def test_memory_and_disk_still_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builder(tmp_path / "root")
    first.build(request())
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    assert first.build(request()).layer == "memory"
    assert builder(tmp_path / "root").build(request()).layer == "disk"


def test_a_corrupted_entry_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builder(tmp_path / "root").build(request())
    (Path(built.source_path or "").parent / "kernel.cubin").write_bytes(b"")
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    build = builder(tmp_path / "root")
    with pytest.raises(CompileError, match="DG_JIT_FORBID_COMPILE"):
        build.build(request())
    assert (build.stats["forbidden"], build.stats["corrupted"]) == (1, 1)
