"""`deep_gemm.cache_info`, the statistics of a builder, and DG_JIT_FORBID_COMPILE."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, request

from deep_gemm import cache_info
from deep_gemm.errors import CompileError
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.settings import settings


def test_hits_by_layer_misses_and_seconds(tmp_path: Path) -> None:
    first = builder(tmp_path / "root", FakeCompiler(seconds=0.01))
    first.build(request())
    first.build(request())
    found = cache_info(first)["statistics"]
    assert found["hits"] == {"memory": 1, "pack": 0, "disk": 0}
    assert (found["misses"], found["compilations"], found["compile_seconds"]) == (1, 1, 0.01)
    assert not any(found["errors"].values())

    second = builder(tmp_path / "root")
    second.build(request())
    found = cache_info(second)["statistics"]
    assert (found["hits"], found["misses"]) == ({"memory": 0, "pack": 0, "disk": 1}, 0)


def test_errors_by_kind(tmp_path: Path) -> None:
    built = builder(tmp_path / "root").build(request())
    (Path(built.source_path or "").parent / "kernel.cubin").write_bytes(b"")
    build = builder(tmp_path / "root")
    build.build(request())
    with pytest.raises(CompileError):
        build.build(request(source="#error\n"))
    assert (build.stats["corrupted"], build.stats["failed"], build.stats["misses"]) == (1, 1, 2)

    (tmp_path / "file").write_text("")
    build = builder(tmp_path / "file")
    build.build(request())
    assert (build.stats["unusable"], build.stats["unstored"], build.stats["corrupted"]) == (1, 1, 0)


def test_a_lock_that_never_comes_is_counted(tmp_path: Path) -> None:
    build = builder(tmp_path / "root", lock_limit=0.05)
    asked = build._resolved(request())
    with DiskCache(tmp_path / "root").lock(asked.addresses[0], 1.0) as held:
        assert held
        build.build(request())
    assert (build.stats["lock_timeout"], build.stats["compiled"]) == (1, 1)


def test_threads_lose_no_count(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: build.build(request()), range(200)))
    assert (build.stats["misses"], build.stats["memory"]) == (1, 199)


def test_a_forked_child_starts_from_zero(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    build.build(request())
    child = os.fork()
    if child == 0:
        fresh = not any(build.stats.values())
        build.build(request())
        os._exit(0 if fresh and build.stats["memory"] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert build.stats["compiled"] == 1


def test_it_is_json_and_creates_nothing(tmp_path: Path) -> None:
    with settings.override(cache_dir=tmp_path / "absent"):
        found = cache_info()
    assert json.loads(json.dumps(found)) == found
    assert (found["root"], found["exists"], found["writable"]) == (str(tmp_path / "absent"), False, True)
    assert (found["entries"], found["bytes"], found["problem"]) == (0, 0, None)
    assert found["limits"]["bytes"] is None
    assert list(tmp_path.iterdir()) == []


def test_it_says_why_the_cache_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=tmp_path / "file"):
        assert "is not a directory" in cache_info()["problem"]
    # Faked, since root, which may run the tests, can write anywhere.
    monkeypatch.setattr("deep_gemm.jit.cache.disk._writable", lambda root: False)
    with settings.override(cache_dir=tmp_path):
        assert "cannot write to" in cache_info()["problem"]
    monkeypatch.setattr("deep_gemm.jit.builder.default_root", lambda: None)
    found = cache_info()
    assert (found["root"], found["writable"]) == (None, False)
    assert "DG_JIT_CACHE_DIR" in found["problem"]


def test_entries_are_counted(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    build.build(request())
    build.build(request(name="other"))
    found = cache_info(build)
    assert found["entries"] == 2
    assert found["bytes"] > 4096


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
