"""Rendered sources on disk, by render key."""

from __future__ import annotations

from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, request

from deep_gemm.jit import BuildRequest
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import maintenance, notes
from deep_gemm.jit.cache.disk import DiskCache

KEY = "0123456789abcdef" * 2 + "01234567"


def asked() -> BuildRequest:
    plain = request()
    return BuildRequest(plain.name, plain.source, plain.arch, plain.meta, render_key=KEY)


@pytest.fixture
def disk(tmp_path: Path) -> DiskCache:
    """A cache with one kernel."""
    made = builder(tmp_path / "root")
    made.build(asked())
    found = made.disk()
    assert found is not None
    return found


def kept(disk: DiskCache) -> Path:
    return disk.root / "rendered" / KEY


def test_a_source_is_found_by_what_it_was_rendered_from(disk: DiskCache) -> None:
    assert notes.source(disk, KEY) == asked().source
    assert Builder(disk.root, FakeCompiler(), packs=[]).source(KEY) == asked().source
    assert kept(disk).stat().st_mode & 0o777 == 0o600
    assert notes.source(disk, KEY[::-1]) is None


@pytest.mark.parametrize("key", ["", "..", "../../etc/passwd", "A" * 40, "0" * 39])
def test_what_is_no_key_finds_nothing(disk: DiskCache, key: str) -> None:
    assert notes.source(disk, key) is None


def test_every_damaged_source_is_passed_by(disk: DiskCache) -> None:
    whole = kept(disk).read_bytes()
    for at in range(len(whole)):
        kept(disk).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert notes.source(disk, KEY) is None, at
        kept(disk).write_bytes(whole[:at])
        assert notes.source(disk, KEY) is None, at


def test_a_link_in_its_place_is_not_followed(disk: DiskCache, tmp_path: Path) -> None:
    elsewhere = tmp_path / "source"
    kept(disk).rename(elsewhere)
    kept(disk).symlink_to(elsewhere)
    assert notes.source(disk, KEY) is None


def test_a_kernel_from_disk_keeps_the_source_that_is_missing(disk: DiskCache) -> None:
    kept(disk).unlink()
    assert builder(disk.root).build(asked()).layer == "disk"
    assert notes.source(disk, KEY) == asked().source


def test_pruning_and_clearing_take_sources_along(disk: DiskCache) -> None:
    assert [item.done for item in maintenance.prune(disk, max_bytes=0)] == [True]
    assert not kept(disk).exists()
    builder(disk.root).build(asked())
    assert kept(disk).exists()
    disk.clear()
    assert not kept(disk).parent.exists()
