"""Publishing an entry: synced before it is renamed, private, its description last; and which versions may use it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.jit.cache.disk import DiskCache

CUBIN = cubin_of("int body;\n")


def test_each_file_is_whole_and_synced_before_it_has_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    named = []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        fsync(descriptor)

    def note_rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        status = os.stat(source, dir_fd=src_dir_fd)
        assert os.path.samestat(os.fstat(src_dir_fd), os.stat(root / "tmp"))
        assert synced[status.st_ino] == status.st_size > 0
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        named.append(target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    built = builder(root).build(request())
    # First the source for the compiler; last the description, which completes the entry.
    assert named == ["kernel.cu", "kernel.cubin", "kernel.json"]
    # Then the directory is synced.
    assert os.stat(Path(built.source_path or "").parent).st_ino in synced


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_everything_is_private_whatever_the_umask(root: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        builder(root).build(request())
    finally:
        os.umask(before)
    found = [root, *root.rglob("*")]
    assert {path.name for path in found} >= {"kernel.cubin", "kernel.json", "kernel.cu", "tmp", "locks"}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_loser_of_a_race_uses_its_own_bytes(root: Path) -> None:
    """Another process publishes the entry while this one compiles. On a network filesystem it may not even be
    visible."""
    other = FakeCompiler(tag="theirs")

    def overtake(source: str) -> None:
        assert builder(root, other, lock_limit=0.01).build(request()).layer == "compiled"

    assert builder(root, FakeCompiler(on_compile=overtake)).build(request()).cubin == CUBIN


def test_nobody_waits_to_see_what_a_winner_published(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the lock has published, but the filesystem does not show the entry yet."""
    builder(root).build(request())

    def lagging(self: DiskCache, address: object, used: bool = False) -> None:
        raise FileNotFoundError(address)

    monkeypatch.setattr(DiskCache, "_read", lagging)
    ours, looked = builder(root), []
    disk = ours.disk()
    assert disk is not None
    real = disk.get
    monkeypatch.setattr(disk, "get", lambda address: looked.append(address) or real(address))
    built = ours.build(request())
    assert (built.layer, built.cubin) == ("compiled", CUBIN)
    # Looked up before the lock and once inside it, for each driver's directory; not in a loop.
    assert len(looked) <= 4


@pytest.mark.parametrize("level", ["arch", "cuda", "driver"])
def test_an_entry_in_another_versions_place_is_never_used(root: Path, level: str) -> None:
    entry = Path(builder(root).build(request()).source_path or "").parent
    arch, cuda, driver = entry.parent.parent.parent.name, entry.parent.parent.name, entry.parent.name
    elsewhere = {"arch": "sm_100a", "cuda": "cuda-12.8", "driver": "driver-11.0"}
    parts = {"arch": arch, "cuda": cuda, "driver": driver, level: elsewhere[level]}
    aim = root / parts["arch"] / parts["cuda"] / parts["driver"] / entry.name
    aim.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(entry, aim)
    assert builder(root).lookup(request()) is None
    assert builder(root).build(request()).layer == "compiled"
    assert aim.exists()


def test_a_killed_evictions_directory_is_swept(root: Path) -> None:
    """An eviction moves an entry away by one rename, and may be killed before it has deleted it."""
    entry = Path(builder(root).build(request()).source_path or "").parent
    for name in ("old-1-stale", "old-1-young"):
        shutil.copytree(entry, root / "tmp" / name)
    os.utime(root / "tmp" / "old-1-stale", (0, 0))
    builder(root).build(request(source="int other;\n"))
    assert [path.name for path in (root / "tmp").iterdir()] == ["old-1-young"]


def test_a_sweep_follows_no_link(root: Path, tmp_path: Path) -> None:
    builder(root).build(request())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (root / "tmp" / "link").symlink_to(tmp_path / "mine")
    os.utime(root / "tmp" / "link", (0, 0), follow_symlinks=False)
    (root / "tmp" / "old").mkdir()
    (root / "tmp" / "old" / "inner").symlink_to(tmp_path / "mine")
    os.utime(root / "tmp" / "old", (0, 0))
    builder(root).build(request(source="int other;\n"))
    assert list((root / "tmp").iterdir()) == []
    assert (tmp_path / "mine" / "file").read_text() == "x"
