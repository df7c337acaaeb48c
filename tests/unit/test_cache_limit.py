"""DG_JIT_CACHE_LIMIT: kept after each publication by removing the least recently used entries, without failing a
build."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_fakes import DESCRIBED, FakeCompiler, builder, cubin_of, request

from deep_gemm import cache_info
from deep_gemm.errors import CompileError, SettingError
from deep_gemm.jit.cache import limit
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import Address
from deep_gemm.settings import settings

HOUR = 3600.0


def bodies(root: Path) -> set[str]:
    """The sources of the entries that are stored."""
    return {(path / "kernel.cu").read_text() for path, _ in DiskCache(root).walk()}


def folder(root: Path, source: str) -> Path:
    build = builder(root)
    return DiskCache(root).directory(build._resolved(request(source=source)).addresses[0])


def age(path: Path, hours: float) -> None:
    os.utime(path / "kernel.json", (time.time() - hours * HOUR,) * 2)


def entry_size(root: Path) -> int:
    builder(root.parent / "other").build(request())
    return int(DiskCache(root.parent / "other").info()["bytes"])


def test_the_least_recently_used_go_and_the_newest_stays(root: Path) -> None:
    one = entry_size(root)
    build = builder(root)
    for i in range(4):
        build.build(request(source=f"int body{i};"))
        age(folder(root, f"int body{i};"), hours=[3, 9, 5, 7][i])
    assert build.stats["evictions"] == 0
    assert not (root / "limit.tally").exists()
    assert cache_info(build)["limits"]["bytes"] is None
    with settings.override(cache_limit=3 * one + one // 2):
        build.build(request(source="int body4;"))
    assert bodies(root) == {"int body0;", "int body2;", "int body4;"}
    assert build.stats["evictions"] == 2
    assert DiskCache(root).info()["bytes"] <= 3 * one + one // 2


def test_the_entry_just_written_stays_though_the_clock_went_back(root: Path) -> None:
    build = builder(root)
    build.build(request(source="int body0;"))
    # Their last use seems to be in the future.
    age(folder(root, "int body0;"), hours=-100)
    with settings.override(cache_limit=10):
        build.build(request(source="int body1;"))
    assert bodies(root) == {"int body1;"}


def test_what_is_read_daily_stays_on_any_filesystem(root: Path) -> None:
    one = entry_size(root)
    for i in range(3):
        builder(root).build(request(source=f"int body{i};"))
        age(folder(root, f"int body{i};"), hours=30 - i)
    # Reading alone may leave the access time as it is: the cache sets it.
    before = os.stat(folder(root, "int body0;") / "kernel.json")
    assert builder(root).build(request(source="int body0;")).layer == "disk"
    after = os.stat(folder(root, "int body0;") / "kernel.json")
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    with settings.override(cache_limit=3 * one):
        builder(root).build(request(source="int body3;"))
    assert bodies(root) == {"int body0;", "int body3;"}


def test_use_is_noted_once_an_hour_without_the_filesystem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder(root).build(request())
    noted = []
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda path, *a, **k: noted.append(path) or real(path, *a, **k))
    read = os.fstat

    def noatime(descriptor: int) -> os.stat_result:
        found = read(descriptor)
        values = list(found)
        extra = {"st_atime_ns": found.st_mtime_ns, "st_mtime_ns": found.st_mtime_ns}
        return os.stat_result(values, extra)

    monkeypatch.setattr(os, "fstat", noatime)
    builder(root).build(request())
    assert noted == []
    age(folder(root, "int body;\n"), hours=2)
    noted.clear()
    builder(root).build(request())
    assert noted == ["kernel.json"]


def test_what_is_locked_or_being_written_stays(root: Path) -> None:
    build = builder(root)
    build.build(request(source="int locked;"))
    DiskCache(root).reserve(build._resolved(request(source="int young;")).addresses[0], "int young;")
    with (
        DiskCache(root).lock(build._resolved(request(source="int locked;")).addresses[0], 1.0) as held,
        settings.override(cache_limit=10),
    ):
        assert held
        build.build(request(source="int body1;"))
        assert bodies(root) == {"int locked;", "int young;", "int body1;"}
        assert build.stats["evictions"] == 0
    with settings.override(cache_limit=10):
        build.build(request(source="int body2;"))
    assert bodies(root) == {"int young;", "int body2;"}


def test_a_build_that_publishes_nothing_evicts_nothing(root: Path) -> None:
    for i in range(3):
        builder(root).build(request(source=f"int body{i};"))
    build = builder(root)
    with settings.override(cache_limit=10):
        assert build.build(request(source="int body1;")).layer == "disk"
        with pytest.raises(CompileError):
            build.build(request(source="#error"))
    assert len(bodies(root)) == 4
    assert build.stats["evictions"] == 0


def test_an_untrusted_root_is_not_touched(root: Path) -> None:
    for i in range(3):
        builder(root).build(request(source=f"int body{i};"))
    root.chmod(0o777)
    with settings.override(cache_limit=10):
        assert builder(root).build(request(source="int other;")).layer == "compiled"
    assert limit.keep(DiskCache(root), 10, root / "none") == 0
    assert len(bodies(root)) == 3


@pytest.mark.parametrize("error", [PermissionError("no"), RuntimeError("a lock"), ValueError("a path")])
def test_a_failing_eviction_is_a_warning_and_no_more(
    root: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(limit, "prune", fail)
    build = builder(root)
    with settings.override(cache_limit=10):
        for i in range(3):
            assert build.build(request(source=f"int body{i};")).cubin == cubin_of(f"int body{i};")
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(part in record.message for part in (str(root), "limit of 10 bytes", str(error)))
    assert build.stats["evictions"] == 0


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EEXIST, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", ["rename", "unlink", "open", "lstat", "scandir", "rmdir"])
def test_injected_errors_of_an_eviction_never_fail_a_build(
    root: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some call on, one call in three fails, so that every step of an eviction meets an error."""
    for i in range(6):
        builder(root).build(request(source=f"int old{i};"))
    real, count = getattr(os, call), 0

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise OSError(code, os.strerror(code), *arguments[:1])
        return real(*arguments, **options)

    with monkeypatch.context() as patch, settings.override(cache_limit=10):
        patch.setattr(os, call, flaky)
        for i in range(4):
            assert builder(root).build(request(source=f"int body{i};")).cubin == cubin_of(f"int body{i};")
    assert count > 3
    with settings.override(cache_limit=10):
        builder(root).build(request(source="int last;"))
        builder(root).build(request(source="int last, again;"))
    # A source that was reserved without an entry is young, and stays.
    whole = {path for path, _ in DiskCache(root).walk() if (path / "kernel.json").exists()}
    assert whole == {folder(root, "int last, again;")}


def directory(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.with_name("aim").write_text("900\n")
    path.symlink_to(path.with_name("aim"))


SPOILT: dict[str, Callable[[Path], object]] = {
    "nonsense": lambda path: path.write_bytes(b"\xff" * 5000),
    "no number": lambda path: path.write_text("many\n..."), "negative": lambda path: path.write_text("-9\n"),
    "no newline": lambda path: path.write_text("900000"), "empty": lambda path: path.write_text(""),
    "directory": directory, "link": link, "fifo": os.mkfifo,
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_spoilt_tally_means_a_scan(root: Path, spoil: Callable[[Path], object]) -> None:
    build = builder(root)
    for i in range(3):
        build.build(request(source=f"int body{i};"))
    spoil(root / "limit.tally")
    with settings.override(cache_limit=10):
        build.build(request(source="int other;"))
    assert bodies(root) == {"int other;"}
    assert not (root / "aim").exists() or (root / "aim").read_text() == "900\n"
    assert list((root / "tmp").iterdir()) == []


def test_a_tally_that_claims_too_much_delays_a_thousand_at_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o700)
    (root / "limit.tally").write_text(f"{10**18}\n" + "." * 998)
    scans: list[int] = []
    monkeypatch.setattr(limit, "prune", lambda *a, **k: scans.append(1) or [])
    for expected in (0, 1):
        limit.keep(DiskCache(root), 10, root)
        assert len(scans) == expected


def put(disk: DiskCache, number: int) -> Path:
    address = Address("sm_90a", "12.9", "any", "k", f"{number:040d}")
    disk.reserve(address, "source")
    disk.put(address, b"source", b"x" * 1000, DESCRIBED)
    return disk.directory(address)


def test_the_limit_holds_all_the_time_with_a_scan_in_fifty_entries(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand fsyncs are slow on some disks
    scans = 0
    real = limit.prune

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal scans
        scans += 1
        return real(*arguments, **options)

    monkeypatch.setattr(limit, "prune", counted)
    disk = DiskCache(root)
    put(disk, 0)
    one = disk.info()["bytes"]
    allowed, stored = 130 * one, 110
    for number in range(1, stored):
        put(disk, number)
    evicted = limit.keep(disk, allowed, root)
    for number in range(stored, 170):
        path = put(disk, number)
        gone = limit.keep(disk, allowed, path)
        evicted += gone
        stored += 1 - gone
        assert stored * one <= allowed
        assert path.exists()
    info = disk.info()
    assert (info["entries"], evicted) == (stored, 170 - stored)
    assert stored > 0.9 * 130
    # One scan a publication below 100 entries, one in two up to 150, and so on.
    assert scans < 60 * 0.75, scans


def test_others_that_publish_during_a_scan_leave_it_to_us(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "tmp").mkdir(mode=0o700, parents=True)
    root.chmod(0o700)
    (root / "limit.tally").write_text("500\n" + "." * 9)
    scans: list[int] = []

    def scan(*_: object, **__: object) -> list[object]:
        scans.append(1)
        assert limit.keep(DiskCache(root), 10, root) == 0
        return []

    monkeypatch.setattr(limit, "prune", scan)
    limit.keep(DiskCache(root), 10, root)
    assert len(scans) == 1


def test_clearing_forgets_the_tally(root: Path) -> None:
    with settings.override(cache_limit=10):
        builder(root).build(request())
    assert (root / "limit.tally").exists()
    DiskCache(root).clear()
    assert not (root / "limit.tally").exists()


SIZES = {"2GiB": 2 << 30, "500M": 500_000_000, "500 mb": 500_000_000, "1048576": 1 << 20, "1.5KiB": 1536, "7B": 7}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.cache_limit is None
    monkeypatch.setenv("DG_JIT_CACHE_LIMIT", text)
    assert settings.cache_limit == SIZES[text]


@pytest.mark.parametrize("text", ["0", "-1", "2XiB", "lots", "1e9", "0.1", "1,5G", "٣M", "2 Gi B", "GiB"])
def test_other_sizes_are_refused(text: str, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_LIMIT", text)
    with pytest.raises(SettingError, match=r'DG_JIT_CACHE_LIMIT must be a size above zero such as "2GiB".*but it is'):
        _ = settings.cache_limit
    compiler = FakeCompiler()
    with pytest.raises(SettingError, match="DG_JIT_CACHE_LIMIT"):
        builder(root, compiler).build(request())
    # The error comes before a compilation, not after it.
    assert compiler.calls == []


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,5} ?[KMGT]?i?B?", fullmatch=True))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        with settings.override(cache_limit=text):
            assert isinstance(settings.cache_limit, int)
            assert settings.cache_limit > 0
    except SettingError:
        pass
