"""The cache with many real processes: one compilation per key, and no harm from killed processes."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, compilations, cubin_of, request
from processes import Start, reachable_path, result, wait_for

from deep_gemm.jit.cache.disk import DiskCache

tmp_path = reachable_path


def test_sixteen_processes_compile_one_key_once(tmp_path: Path, start: Start) -> None:
    gate = tmp_path / "gate"
    workers = [start(gate=str(gate), seconds=0.3) for _ in range(16)]
    gate.touch()
    results = [result(worker) for worker in workers]
    assert len(compilations(tmp_path / "journal")) == 1
    layers = sorted(layer for answer in results for layer in answer["layers"])
    assert layers == ["compiled"] + ["disk"] * 15
    assert sum(answer["wrong"] for answer in results) == 0


@pytest.mark.long
def test_64_processes_compile_20_keys_once_each(tmp_path: Path, start: Start) -> None:
    """Like the ranks of a node and their workers at startup. Each has its own order of keys."""
    gate = tmp_path / "gate"
    # Several are started at a time, so that the first does not give up before the last has imported torch.
    with ThreadPoolExecutor(4) as pool:
        workers = list(pool.map(lambda i: start(gate=str(gate), seconds=0.05, keys=20, seed=i), range(64)))
    gate.touch()
    results = [result(worker) for worker in workers]
    assert len(compilations(tmp_path / "journal")) == 20
    layers = sorted(layer for answer in results for layer in answer["layers"])
    assert layers == ["compiled"] * 20 + ["disk"] * (64 * 20 - 20)
    assert sum(answer["wrong"] for answer in results) == 0


@pytest.mark.long
def test_eight_writers_of_25_keys_with_readers(tmp_path: Path, start: Start) -> None:
    gate = tmp_path / "gate"
    workers = [start(gate=str(gate), seconds=0.002, keys=25, seed=i) for i in range(8)]
    gate.touch()
    reader = builder(tmp_path / "root")
    bodies = [f"int body{i};\n" for i in range(25)]
    while any(worker.poll() is None for worker in workers):
        for body in bodies:
            found = reader.lookup(request(source=body))
            assert found is None or found.cubin == cubin_of(body)
    assert sum(result(worker)["wrong"] for worker in workers) == 0
    assert len(compilations(tmp_path / "journal")) == 25
    assert DiskCache(tmp_path / "root").info()["entries"] == 25


@pytest.mark.long
def test_eviction_during_reads(tmp_path: Path, start: Start) -> None:
    workers = [start(keys=5, seed=i, repeat_for=1.5) for i in range(3)]
    cache = DiskCache(tmp_path / "root")
    evicted = 0
    while any(worker.poll() is None for worker in workers):
        evicted += cache.clear()["entries"]
    answers = [result(worker) for worker in workers]
    assert sum(answer["wrong"] for answer in answers) == 0
    assert evicted > 0
    assert {"disk", "compiled"} <= {layer for answer in answers for layer in answer["layers"]}


def test_a_killed_lock_holder_blocks_nobody(tmp_path: Path, start: Start) -> None:
    victim = start(seconds=600)
    wait_for(lambda: len(compilations(tmp_path / "journal")) == 1)
    victim.kill()
    victim.wait()
    begin = time.monotonic()
    assert builder(tmp_path / "root").build(request(source="int body0;\n")).layer == "compiled"
    assert time.monotonic() - begin < 40  # a live holder is waited for up to 60 s


def test_a_slow_holder_is_not_waited_for_beyond_the_limit(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(seconds=600)
    wait_for(lambda: len(compilations(tmp_path / "journal")) == 1)
    built = builder(tmp_path / "root", lock_limit=0.2).build(request(source="int body0;\n"))
    assert built.layer == "compiled"
    assert [record.message for record in caplog.records] == [
        "Another process has been compiling k for 0.2 s; compiling it here too."
    ]
    assert builder(tmp_path / "root").build(request(source="int body0;\n")).layer == "disk"


@pytest.mark.parametrize("file", ["kernel.cu", "kernel.cubin", "kernel.json"])
def test_killed_between_write_and_rename(
    tmp_path: Path, start: Start, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = start(stall=file)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "stalled\n"
    victim.kill()
    victim.wait()
    root = tmp_path / "root"
    (left,) = (root / "tmp").iterdir()
    again = builder(root)
    assert again.lookup(request(source="int body0;\n")) is None
    assert again.build(request(source="int body0;\n")).layer == "compiled"
    assert builder(root).build(request(source="int body0;\n")).layer == "disk"
    assert caplog.records == []
    os.utime(left, (0, 0))
    builder(root).build(request(source="int other;\n"))
    assert not left.exists()


def test_a_forked_child_finds_the_locks_free(start: Start) -> None:
    assert result(start(fork=True, seconds=1.0)) == {"child": 0}


def test_a_read_only_root_is_read(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "root"
    builder(root).build(request(source="int body0;\n"))
    job: dict[str, Any] = {}
    if os.geteuid() == 0:
        # Root may write anywhere, so another user has to try.
        job["uid"] = 65534
        for path in [root, *root.rglob("*")]:
            os.chown(path, 65534, 65534)
        (tmp_path / "journal").touch()
        (tmp_path / "journal").chmod(0o666)
    for path in [*root.rglob("*"), root]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    worker = start(keys=2, **job)
    layers = result(worker)["layers"]
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700)
    assert sorted(layers) == ["compiled", "disk"]
    assert DiskCache(root, trust=True).info()["entries"] == 1


def test_the_memory_of_a_builder_does_not_need_the_disk(tmp_path: Path, start: Start) -> None:
    compiler = FakeCompiler()
    build = builder(tmp_path / "root", compiler)
    build.build(request())
    DiskCache(tmp_path / "root").clear()
    assert build.build(request()).layer == "memory"
    assert len(compiler.calls) == 1
