"""`cache verify` and `cache prune`: which entries they report, which they remove, and which they leave alone."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jit_fakes import DESCRIBED

from deep_gemm.cli.cache import command
from deep_gemm.jit.cache import maintenance
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import Address
from deep_gemm.jit.cache.maintenance import Selectable, delete_bad, prune, verify

DAY = 86400.0
HERE = Selectable(frozenset({"12.9"}), frozenset({"13.0", "any"}))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "root"))
    return DiskCache(tmp_path / "root")


def add(disk: DiskCache, digit: int, days: float = 0.0, cuda: str = "12.9", driver: str = "any") -> Path:
    """An entry of a little over 1000 bytes, last used `days` ago."""
    address = Address("sm_90a", cuda, driver, "k", str(digit) * 40)
    disk.reserve(address, "source")
    disk.put(address, b"source", bytes([digit]) * 1000, DESCRIBED)
    return age(disk.directory(address), days * DAY)


def age(path: Path, seconds: float) -> Path:
    for file in [*path.iterdir(), path] if path.is_dir() else [path]:
        os.utime(file, (time.time() - seconds,) * 2)
    return path


def states(disk: DiskCache, **options: Any) -> dict[str, str]:
    return {Path(item.path).name[-5:]: item.state for item in verify(disk, **options)}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_verify_names_each_state(disk: DiskCache) -> None:
    add(disk, 1)
    (add(disk, 2) / "kernel.cubin").write_bytes(b"other")
    (add(disk, 3) / "kernel.cubin").unlink()
    meta = add(disk, 4) / "kernel.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    add(disk, 5, cuda="11.8")
    add(disk, 6, driver="12.0")
    (add(disk, 7) / "kernel.json").unlink()
    half = add(disk, 8)
    (half / "kernel.json").unlink()
    age(half, 7200)
    (half.parent / "no key!").mkdir()
    (half.parent / "no key!" / "kernel.json").write_text("{}")
    expected = {
        "11111": "sound",
        "22222": "corrupted",
        "33333": "corrupted",
        "44444": "foreign",
        "55555": "foreign",
        "66666": "foreign",
        "77777": "in use",
        "88888": "leftover",
        " key!": "foreign",
    }
    assert states(disk, here=HERE) == expected
    assert states(disk) == {**expected, "55555": "sound", "66666": "sound"}


def test_a_corrupted_entry_of_other_versions_is_corrupted(disk: DiskCache) -> None:
    (add(disk, 1, cuda="11.8") / "kernel.json").write_text("{")
    assert states(disk, here=HERE) == {"11111": "corrupted"}


def test_verify_changes_nothing(disk: DiskCache) -> None:
    add(disk, 1, days=3)
    (add(disk, 2, days=5) / "kernel.cubin").write_bytes(b"other")

    def seen() -> dict[Path, tuple[int, float, float]]:
        found = {path: path.stat() for path in disk.root.rglob("*") if path.suffix == ".json" or path.is_dir()}
        return {path: (s.st_ino, s.st_mtime, s.st_atime if path.is_file() else 0) for path, s in found.items()}

    before = seen()
    verify(disk, HERE)
    assert seen() == before


def test_delete_removes_the_bad_and_nothing_else(disk: DiskCache) -> None:
    good, bad = add(disk, 1, days=100), add(disk, 2)
    (bad / "kernel.cubin").write_bytes(b"other")
    stale, young = disk.root / "tmp" / "stale", disk.root / "tmp" / "young"
    old, link = disk.root / "tmp" / "old-1-ab", disk.root / "tmp" / "link"
    old.mkdir()
    (old / "kernel.cu").write_text("left by a killed eviction")
    link.symlink_to(good)
    os.utime(link, (0, 0), follow_symlinks=False)
    for path in (stale, young):
        path.write_text("x")
    for path in (stale, old):
        age(path, 7200)
    removed = delete_bad(disk, verify(disk))
    assert all(item.done for item in removed)
    assert len(removed) == 4
    assert not bad.exists()
    assert sorted(path.name for path in (disk.root / "tmp").iterdir()) == ["young"]
    assert len(list(good.iterdir())) == 3


def test_delete_looks_again(disk: DiskCache) -> None:
    bad = add(disk, 2)
    (bad / "kernel.cubin").write_bytes(b"other")
    found = verify(disk)
    add(disk, 2)
    assert [item.done for item in delete_bad(disk, found)] == [False]
    assert states(disk) == {"22222": "sound"}


@pytest.mark.parametrize("before", ["verify looks at it", "delete begins", "delete takes its lock"])
def test_an_entry_that_another_process_deletes_meanwhile(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The other process deletes it, and counts it."""
    bad = add(disk, 2)
    (bad / "kernel.cubin").write_bytes(b"other")

    def gone_before(name: str) -> None:
        real = getattr(maintenance, name)
        monkeypatch.setattr(maintenance, name, lambda *rest: (shutil.rmtree(bad, ignore_errors=True), real(*rest))[1])

    if before == "verify looks at it":
        gone_before("_glance")
    found = verify(disk)
    assert [item.state for item in found] == ["in use" if before == "verify looks at it" else "corrupted"]
    if before == "delete begins":
        shutil.rmtree(bad)
    if before == "delete takes its lock":
        gone_before("_delete_entry")
    assert not any(item.done for item in delete_bad(disk, found))
    assert not bad.exists()


def test_a_locked_entry_is_left_to_its_owner(disk: DiskCache) -> None:
    bad = add(disk, 2, days=9)
    (bad / "kernel.cubin").write_bytes(b"other")
    address = Address("sm_90a", "12.9", "any", "k", "2" * 40)
    with disk.lock(address, 1.0) as held:
        assert held
        assert [item.done for item in delete_bad(disk, verify(disk))] == [False]
        assert [item.done for item in prune(disk, max_bytes=0)] == [False]
    assert bad.exists()
    assert [item.done for item in prune(disk, max_bytes=0)] == [True]
    assert not bad.exists()


def test_stale_locks_go_unless_held(disk: DiskCache) -> None:
    add(disk, 1)
    folder = disk.root / "locks"
    stale, held, young = (folder / f"sm_90a-{name}.lock" for name in ("stale", "held", "young"))
    with disk.take(held.name, 0.0):
        for path in (stale, held, young):
            path.touch(mode=0o600)
        for path in (stale, held, folder / "keys"):
            age(path, 7200)
        done = {Path(item.path).name: item.done for item in delete_bad(disk, verify(disk))}
        assert done == {stale.name: True, held.name: False}
        assert sorted(path.name for path in folder.iterdir()) == ["keys", held.name, young.name]


def test_prune_by_size_takes_the_least_recently_used(disk: DiskCache) -> None:
    paths = {days: add(disk, days, days=days) for days in (3, 1, 4, 2)}
    sizes = {days: sum(file.stat().st_size for file in path.iterdir()) for days, path in paths.items()}
    bound = sizes[1] + sizes[2]
    planned = prune(disk, max_bytes=bound, dry_run=True)
    assert [Path(item.path).name for item in planned] == [paths[4].name, paths[3].name]
    assert all(path.exists() for path in paths.values())
    removed = prune(disk, max_bytes=bound)
    assert [item.path for item in removed] == [item.path for item in planned]
    assert {days for days, path in paths.items() if path.exists()} == {1, 2}
    assert prune(disk, max_bytes=bound) == []


def test_reading_counts_as_use(disk: DiskCache) -> None:
    path = add(disk, 1, days=30)
    os.utime(path / "kernel.json", (time.time(), time.time() - 30 * DAY))
    assert prune(disk, older_than=7 * DAY) == []
    age(path, 30 * DAY)
    assert len(prune(disk, older_than=7 * DAY)) == 1


def test_prune_by_versions(disk: DiskCache) -> None:
    kept = [add(disk, 1), add(disk, 2, driver="13.0")]
    gone = [add(disk, 3, cuda="13.0"), add(disk, 4, driver="12.8")]
    assert len(prune(disk, unused_versions=HERE)) == 2
    assert [path.exists() for path in kept + gone] == [True, True, False, False]
    # Without a driver, entries are not judged by their driver's version.
    assert prune(disk, unused_versions=Selectable(HERE.cuda, None)) == []


def test_prune_leaves_what_is_being_compiled(disk: DiskCache) -> None:
    path = add(disk, 1)
    (path / "kernel.json").unlink()
    assert prune(disk, max_bytes=0, older_than=-1e6) == []
    age(path, 7200)
    assert len(prune(disk, max_bytes=0)) == 1


def test_an_entry_used_meanwhile_stays(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add(disk, 1, days=30)
    real = maintenance._delete_entry

    def late(*arguments: Any) -> bool:
        age(path, 0)
        return real(*arguments)

    monkeypatch.setattr(maintenance, "_delete_entry", late)
    assert [item.done for item in prune(disk, older_than=DAY)] == [False]
    assert path.exists()


def test_readers_and_writers_during_prune_and_verify(disk: DiskCache) -> None:
    address = Address("sm_90a", "12.9", "any", "k", "1" * 40)
    add(disk, 1)
    stop = threading.Event()
    problems: list[str] = []

    def use() -> None:
        try:
            while not stop.is_set():
                entry = DiskCache(disk.root).get(address)
                if entry is None:
                    # Without the lock, a write may meet two removals and give up (None): that is a miss, not a fault.
                    DiskCache(disk.root).reserve(address, "source")
                    DiskCache(disk.root).put(address, b"source", bytes([1]) * 1000, DESCRIBED)
                elif entry.cubin != bytes([1]) * 1000:
                    problems.append("wrong bytes")
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    removed = 0
    try:
        for _ in range(40):
            removed += sum(item.done for item in prune(disk, max_bytes=0))
            delete_bad(disk, verify(disk))
    finally:  # threads that go on would show in other tests of this process
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert removed > 0


def test_the_commands(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "selectable", lambda: HERE)
    assert "0 sound" in run("verify").output
    add(disk, 1, days=10)
    assert run("verify").exit_code == 0
    bad = add(disk, 2)
    (bad / "kernel.cubin").write_bytes(b"other")
    result = run("verify")
    assert result.exit_code == 1
    assert "1 sound, 1 corrupted" in result.output
    assert "checksum" in result.output
    report = json.loads(run("verify", "--json").stdout)
    assert {item["state"] for item in report["found"]} == {"sound", "corrupted"}
    assert report["removed"] == []
    # The status depends on what was found, even if it was deleted.
    result = run("verify", "--delete")
    assert result.exit_code == 1
    assert "1 removed" in result.output
    assert run("verify").exit_code == 0

    assert run("prune").exit_code == 2
    assert "1 would be removed" in run("prune", "--older-than", "7", "--dry-run").output
    assert "1 removed" in run("prune", "--older-than", "7").output
    add(disk, 3, cuda="11.8")
    assert "no compiler of CUDA 11.8" in run("prune", "--unused-versions").output
    assert "0 removed" in run("prune", "--max-bytes", "0").output
    monkeypatch.setattr(maintenance, "selectable", lambda: None)
    assert run("prune", "--unused-versions").exit_code == 1


def test_an_untrusted_root_is_refused(disk: DiskCache) -> None:
    add(disk, 1)
    disk.root.chmod(0o777)
    for arguments in (["verify"], ["prune", "--max-bytes", "0"]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "chmod go-w" in result.output
