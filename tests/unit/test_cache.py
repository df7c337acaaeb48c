"""The disk cache: a bad entry is a miss, a bad root means memory only, and neither fails a build."""

import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.jit.builder import Binary, Builder
from deep_gemm.jit.cache import files
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import Address
from deep_gemm.jit.cache.root import default_root
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.settings import settings

BODY, OTHER = "int body;\n", "int other;\n"
CUBIN = cubin_of(BODY)
STRANGER = 54321
Damage = Callable[[Path], object]


@pytest.fixture
def entry(root: Path) -> Path:
    """The directory of one good entry."""
    return Path(builder(root).build(request()).source_path or "").parent


def rebuild(root: Path, source: str = BODY, **options: Any) -> Binary:
    """The binary that a new process would get."""
    return builder(root, **options).build(request(source=source))


# ---- what damages a path


def cut(size: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def put(data: bytes) -> Damage:
    return lambda path: path.write_bytes(data)


def edit(**fields: Any) -> Damage:
    """Other fields of a description; None takes one out."""

    def damage(path: Path) -> None:
        body = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({name: value for name, value in body.items() if value is not None}))

    return damage


def chmod(mode: int) -> Damage:
    return lambda path: path.chmod(mode)


def given_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    os.chown(path, STRANGER, STRANGER)


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def linked(path: Path) -> None:
    """A link to the good file or directory."""
    aside = path.with_name("moved")
    path.rename(aside)
    path.symlink_to(aside)


def directory(path: Path) -> None:
    removed(path)
    path.mkdir()
    (path / "file").write_text("x")


def file(path: Path) -> None:
    removed(path)
    path.write_text("in the way")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swapped(entry: Path) -> None:
    """Source and cubin of another entry, sound in itself."""
    other = Path(rebuild(entry.parents[3], OTHER).source_path or "").parent
    for name in ("kernel.cu", "kernel.cubin"):
        (entry / name).write_bytes((other / name).read_bytes())


def moved_byte(entry: Path) -> None:
    """The last byte of the source at the start of the cubin, which a checksum of both in a row would not see."""
    source, cubin = entry / "kernel.cu", entry / "kernel.cubin"
    data = source.read_bytes()
    source.write_bytes(data[:-1])
    cubin.write_bytes(data[-1:] + cubin.read_bytes())


CU, CUBIN_FILE, META = "kernel.cu", "kernel.cubin", "kernel.json"
# fmt: off
REPLACED: dict[str, tuple[str, Damage]] = {
    "other source": (CU, put(b"int other;\n")), "no source": (CU, removed),
    "empty cubin": (CUBIN_FILE, cut(0)), "cut cubin": (CUBIN_FILE, cut(100)),
    "cut by one": (CUBIN_FILE, cut(len(CUBIN) - 1)), "longer cubin": (CUBIN_FILE, put(CUBIN + b"\0")),
    "other cubin": (CUBIN_FILE, put(cubin_of("other"))), "no cubin": (CUBIN_FILE, removed),
    "empty meta": (META, cut(0)), "cut meta": (META, cut(200)), "meta is a list": (META, put(b"[]")),
    "meta is deep": (META, put(b"[" * 100_000)), "meta is not text": (META, put(b"\xff\xfe\x00")),
    "foreign key": (META, edit(key="0" * 40)), "foreign name": (META, edit(name="k2")),
    "foreign arch": (META, edit(arch="sm_100a")), "future format": (META, edit(format=99)),
    "changed registers": (META, edit(resources={"registers": 1})), "no checksum": (META, edit(checksum=None)),
    "no resources": (META, edit(resources=None)), "two entries": (".", swapped), "a byte moved": (".", moved_byte),
    **{f"{what.__name__} {name}": (name, what) for name in (CU, CUBIN_FILE, META) for what in (linked, given_away)},
    **{f"{what.__name__} {name}": (name, what) for name in (CUBIN_FILE, META) for what in (directory, fifo)},
    **{f"{name} that others can write": (name, chmod(0o666)) for name in (CU, CUBIN_FILE, META)},
    **{f"an entry of mode {mode:o}": (".", chmod(mode)) for mode in (0o777, 0o770, 0o722, 0o1777)},
    "a file for an entry": (".", file), "an entry of another user": (".", given_away),
    **{f"linked {place}": (place, linked) for place in (".", "..", "../..", "../../..")},
}
# fmt: on
QUIET = ("a file for", "linked .", "an entry of another")
"""Beginnings of faults of which nothing is said, or each part of a path says something."""


@pytest.mark.parametrize("fault", REPLACED)
def test_a_damaged_entry_is_a_miss_with_one_warning_and_replaced(
    root: Path, entry: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, damage = REPLACED[fault]
    path = Path(os.path.normpath(entry / place))
    damage(path)
    assert builder(root).lookup(request()) is None
    built = rebuild(root)
    assert (built.layer, built.cubin) == ("compiled", CUBIN)
    if not fault.startswith(QUIET):
        (said,) = [record.message for record in caplog.records]
        assert str(entry) in said
        assert "will be compiled again" in said or "chmod go-w" in said or f"belongs to user {STRANGER}" in said
    caplog.clear()
    again = rebuild(root)
    assert (again.layer, again.cubin, caplog.records) == ("disk", CUBIN, [])
    assert entry.is_dir()
    for inner in (entry, *entry.parents[:3], *entry.iterdir()):
        assert not inner.is_symlink()
        assert stat.S_IMODE(inner.stat().st_mode) == (0o700 if inner.is_dir() else 0o600), inner
    aside = path.with_name("moved")
    if aside.is_dir():  # what a link points to stays as it is
        assert sorted(x.name for x in aside.rglob("*") if x.is_file()) == sorted((CU, CUBIN_FILE, META))


@pytest.mark.parametrize("damage", [*map(chmod, (0o777, 0o770, 0o722, 0o1777)), given_away])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_directory_that_others_can_write_is_not_used(
    root: Path, entry: Path, level: int, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories above entries are shared, and their owner has to repair them."""
    path = entry.parents[level]
    damage(path)
    build = builder(root)
    assert build.lookup(request()) is None
    assert build.build(request()).cubin == CUBIN
    if damage is not given_away:
        (said,) = [record.message for record in caplog.records]
        mode = stat.S_IMODE(path.stat().st_mode)
        assert f"other users can write to {path} (mode {mode:04o}); run `chmod go-w` on it" in said
    assert build.stats["unstored"] == 1
    with settings.override(trust_cache_dir=True):
        assert rebuild(root).layer == "disk"
    os.chown(path, os.geteuid(), os.getegid())
    path.chmod(0o700)
    assert rebuild(root).layer == "disk"


# ---- a root that cannot be used


def memory_only(root: Path, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """Check that two builds are right, that nothing is on disk, and that there is one warning."""
    build = builder(root)
    first, second = build.build(request()), build.build(request(source="int second;\n"))
    assert (first.layer, first.cubin, first.source_path) == ("compiled", CUBIN, None)
    assert (second.layer, second.source_path) == ("compiled", None)
    assert (build.build(request()).layer, build.stats["unstored"]) == ("memory", 2)
    (said,) = [record.message for record in caplog.records]
    assert says in said
    assert "memory only" in said


@pytest.mark.parametrize(("damage", "says"), [(chmod(0o777), "chmod go-w"), (linked, "symbolic link")])
def test_a_root_that_is_not_safe_is_not_used(
    root: Path, entry: Path, damage: Damage, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root)
    memory_only(root, caplog, says)
    with settings.override(trust_cache_dir=True):
        assert rebuild(root).layer == "disk"


def test_a_dangling_root_is_refused_even_if_trusted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.symlink_to(root.with_name("nowhere"))
    with settings.override(trust_cache_dir=True):
        memory_only(root, caplog, "points nowhere")
    assert root.is_symlink()


def test_a_root_that_is_a_file_is_refused(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("not a directory")
    memory_only(root, caplog, "is not a directory")


def test_a_root_of_another_user_is_refused(
    root: Path, entry: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:  # a directory of root would be accepted
        os.chown(root, STRANGER, STRANGER)
    me = os.stat(root).st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: me)
    memory_only(root, caplog, f"belongs to user {me - 1}, not to you (user {me})")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_full_or_broken_filesystem_means_memory_only(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    memory_only(root, caplog, os.strerror(code))
    assert list((root / "tmp").iterdir()) == []


def test_without_a_home_platformdirs_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".deep_gemm"
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "deep_gemm"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "relative")
    assert default_root() == Path.cwd() / "relative"


def test_without_any_place_kernels_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deep_gemm.jit.builder.default_root", lambda: None)
    build = Builder(compiler=FakeCompiler(), include_dir=Path("/nowhere"))
    assert [build.build(request()).layer for _ in range(2)] == ["compiled", "memory"]
    (record,) = caplog.records
    assert re.search(r"memory only.*no home directory.*DG_JIT_CACHE_DIR", record.message)


# ---- calls of the filesystem


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EEXIST])
@pytest.mark.parametrize("call", ["rename", "mkdir", "open", "fsync", "unlink"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_injected_errors_never_fail_a_build(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, nth: int
) -> None:
    real, count = getattr(os, call), 0

    def flaky(path: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        if call == "fsync" or str(path).startswith(str(root)) or any(fd is not None for fd in options.values()):
            count += 1
            if count == nth:
                raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, flaky)
        for _ in range(3):
            assert rebuild(root).cubin == CUBIN
    assert rebuild(root).cubin == CUBIN
    assert rebuild(root).layer == "disk"


@pytest.mark.parametrize("most", [1, 64])
def test_a_filesystem_that_gives_little_at_once(
    root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: real(descriptor, min(size, most)))
    assert rebuild(root).layer == "disk"


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "file", os.fstat
    path.write_bytes(b"short")
    monkeypatch.setattr(os, "fstat", lambda fd: (real(fd), path.write_bytes(b"longer than before"))[0])
    assert files.read(path, 1000).data == b"longer than before"


def test_a_failed_write_leaves_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with files.Folder.open(tmp_path, trust=True) as folder, pytest.raises(OSError, match="directory"):
        folder.publish("target", b"x", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("part", ["..", "a/b", "", "/x", ".hidden", "a\0b"])
def test_no_address_leaves_the_root(part: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a path"):
        Address("sm_90a", "12.9", "any", part, "0" * 40)


def test_what_killed_writers_and_evictions_left_is_swept_and_no_link_is_followed(root: Path, entry: Path) -> None:
    mine, tmp = root.parent / "mine", root / "tmp"
    mine.mkdir()
    (mine / "file").write_text("x")
    for name in ("stale", "young", "future"):
        (tmp / name).write_text("left by a killed writer")
        shutil.copytree(entry, tmp / f"old-1-{name}")
    (tmp / "old-1-stale" / "inner").symlink_to(mine)
    (tmp / "link").symlink_to(mine)
    for name, age in (("stale", 7200), ("young", 60), ("future", -7200), ("link", 1e9)):
        for path in (tmp / name, *tmp.glob(f"old-1-{name}")):
            os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)
    rebuild(root, OTHER)
    assert {path.name for path in tmp.iterdir()} == {"young", "future", "old-1-young", "old-1-future"}
    assert (mine / "file").read_text() == "x"


def test_a_clock_that_goes_back_breaks_nothing(root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert [rebuild(root, source).layer for source in (BODY, OTHER, OTHER)] == ["disk", "compiled", "disk"]


# ---- info, eviction, versions


def test_info_counts_and_clear_removes_only_ours(root: Path) -> None:
    assert DiskCache(root).info()["exists"] is False
    assert DiskCache(root).clear() == {"entries": 0, "bytes": 0, "failed": 0}
    assert not root.exists()
    for source in (BODY, OTHER):
        rebuild(root, source)
    (root / "notes.txt").write_text("somebody's own file")
    cache = DiskCache(root)
    info = cache.info()
    assert (info["entries"], info["exists"], info["writable"], info["problem"]) == (2, True, True, None)
    assert info["bytes"] > 2 * len(CUBIN)
    (group,) = info["groups"]
    release = driver_release()
    driver = f"{release[0]}.{release[1]}" if release else "any"
    assert (group["arch"], group["cuda"], group["driver"], group["entries"]) == ("sm_90a", "12.9", driver, 2)
    assert cache.clear() == {"entries": 2, "bytes": info["bytes"], "failed": 0}
    assert cache.info()["entries"] == 0
    assert not (root / "sm_90a").exists()
    assert (root / "notes.txt").exists()
    assert rebuild(root).layer == "compiled"


def test_an_evicted_entry_is_a_plain_miss(root: Path, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (entry, entry / META):
        removed(path)
        assert rebuild(root).layer == "compiled"
    assert caplog.records == []


def test_two_schemas_share_a_root(root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.jit.key.SCHEMA", 999)
    assert [rebuild(root).layer for _ in range(2)] == ["compiled", "disk"]
    monkeypatch.undo()
    assert rebuild(root).layer == "disk"
    assert DiskCache(root).info()["entries"] == 2


@pytest.mark.parametrize(("level", "name"), [(2, "sm_100a"), (1, "cuda-12.8"), (0, "driver-11.0")])
def test_an_entry_in_another_versions_place_is_never_used(root: Path, entry: Path, level: int, name: str) -> None:
    parts = list(entry.relative_to(root).parts)
    parts[2 - level] = name
    aim = root.joinpath(*parts)
    aim.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(entry, aim)
    assert builder(root).lookup(request()) is None
    assert rebuild(root).layer == "compiled"
    assert aim.exists()
