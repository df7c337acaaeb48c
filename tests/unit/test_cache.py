"""The disk cache: a bad entry is a miss, a bad root means memory only, and neither fails a build."""

from __future__ import annotations

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

CUBIN = cubin_of("int body;\n")


@pytest.fixture
def entry(root: Path) -> Path:
    """The directory of one good entry."""
    return Path(builder(root).build(request()).source_path or "").parent


def rebuild(root: Path, **options: Any) -> Binary:
    """The binary that a new process would get."""
    return builder(root, **options).build(request())


def truncate(size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:size])

    return damage


def edit(**fields: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return damage


def drop(field: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != field}))

    return damage


def replace_by_link(path: Path) -> None:
    good = path.with_name("moved")
    path.rename(good)
    path.symlink_to(good)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: list[tuple[str, str, Callable[[Path], None]]] = [
    ("other source", "kernel.cu", lambda path: path.write_text("int other;\n") and None),
    ("no source", "kernel.cu", Path.unlink),
    ("linked source", "kernel.cu", replace_by_link),
    ("empty cubin", "kernel.cubin", truncate(0)),
    ("cut cubin", "kernel.cubin", truncate(100)),
    ("cut cubin by one", "kernel.cubin", truncate(len(CUBIN) - 1)),
    ("longer cubin", "kernel.cubin", lambda path: path.write_bytes(CUBIN + b"\0") and None),
    ("other cubin", "kernel.cubin", lambda path: path.write_bytes(cubin_of("other")) and None),
    ("no cubin", "kernel.cubin", Path.unlink),
    ("linked cubin", "kernel.cubin", replace_by_link),
    ("directory for cubin", "kernel.cubin", replace_by_directory),
    ("fifo for cubin", "kernel.cubin", replace_by_fifo),
    ("empty meta", "kernel.json", truncate(0)),
    ("cut meta", "kernel.json", truncate(200)),
    ("meta is a list", "kernel.json", lambda path: path.write_text("[]") and None),
    ("meta is deep", "kernel.json", lambda path: path.write_text("[" * 100_000) and None),
    ("meta is not text", "kernel.json", lambda path: path.write_bytes(b"\xff\xfe\x00") and None),
    ("foreign key", "kernel.json", edit(key="0" * 40)),
    ("foreign name", "kernel.json", edit(name="k2")),
    ("foreign arch", "kernel.json", edit(arch="sm_100a")),
    ("future format", "kernel.json", edit(format=99)),
    ("changed registers", "kernel.json", edit(resources={"registers": 1})),
    ("no checksum", "kernel.json", drop("checksum")),
    ("no resources", "kernel.json", drop("resources")),
    ("linked meta", "kernel.json", replace_by_link),
    ("directory for meta", "kernel.json", replace_by_directory),
    ("fifo for meta", "kernel.json", replace_by_fifo),
]


@pytest.mark.parametrize(("file", "damage"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_entry_is_a_miss_with_one_warning_and_replaced(
    root: Path, entry: Path, file: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(entry / file)
    assert builder(root).lookup(request()) is None
    built = rebuild(root)
    assert (built.layer, built.cubin) == ("compiled", CUBIN)
    assert len(caplog.records) == 1
    assert str(entry) in caplog.records[0].message
    assert "will be compiled again" in caplog.records[0].message
    again = rebuild(root)
    assert (again.layer, again.cubin) == ("disk", CUBIN)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_entry_that_is_no_directory_is_replaced(root: Path, entry: Path, kind: str, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    shutil.move(entry, aside)
    if kind == "file":
        entry.write_text("in the way")
    else:
        entry.symlink_to(aside)
    assert rebuild(root).layer == "compiled"
    assert entry.is_dir()
    assert not entry.is_symlink()
    assert rebuild(root).layer == "disk"


def test_every_flipped_bit_is_noticed(root: Path, entry: Path) -> None:
    address = address_of(entry)
    cache = DiskCache(root)
    good = cache.get(address)
    assert good is not None
    survivors = 0
    for name in ("kernel.cu", "kernel.cubin", "kernel.json"):
        content = (entry / name).read_bytes()
        for at in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[at] ^= 1 << (at % 8)
            (entry / name).write_bytes(flipped)
            found = cache.get(address)
            # Only white space between the fields of the description may change.
            if found is not None:
                survivors += 1
                assert name == "kernel.json"
                assert content[at : at + 1].isspace()
                assert (found.cubin, found.meta) == (good.cubin, good.meta)
        (entry / name).write_bytes(content)
    assert survivors < 20
    assert cache.get(address) is not None


def test_every_truncation_is_noticed(root: Path, entry: Path) -> None:
    address = address_of(entry)
    cache = DiskCache(root)
    for name in ("kernel.cu", "kernel.cubin", "kernel.json"):
        content = (entry / name).read_bytes()
        # The last byte of the description is its newline.
        last = len(content) - 1 - (name == "kernel.json")
        for length in (*range(min(64, last)), *range(64, last, 31), last):
            (entry / name).write_bytes(content[:length])
            assert cache.get(address) is None, (name, length)
        (entry / name).write_bytes(content)
    assert cache.get(address) is not None


def address_of(entry: Path) -> Address:
    name, _, key = entry.name.rpartition("-")
    arch, cuda, driver = entry.parts[-4:-1]
    return Address(arch, cuda.removeprefix("cuda-"), driver.removeprefix("driver-"), name, key)


@pytest.mark.parametrize("part", ["..", "a/b", "", "/x", ".hidden", "a\0b"])
def test_no_address_leaves_the_root(part: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a path"):
        Address("sm_90a", "12.9", "any", part, "0" * 40)


@pytest.mark.parametrize("most", [1, 7, 64])
def test_a_filesystem_that_gives_little_at_once(
    root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: real(descriptor, min(size, most)))
    assert rebuild(root).layer == "disk"


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "file", os.fstat
    path.write_bytes(b"short")

    def grown(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        path.write_bytes(b"longer than before")
        return status

    monkeypatch.setattr(os, "fstat", grown)
    assert files.read(path, 1000).data == b"longer than before"


def test_files_are_private(root: Path, entry: Path) -> None:
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert list((root / "tmp").iterdir()) == []


def memory_only(root: Path, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """Check that two builds are right, that nothing is on disk, and that there is one warning."""
    build = builder(root)
    first = build.build(request())
    second = build.build(request(source="int second;\n"))
    assert (first.layer, first.cubin, first.source_path) == ("compiled", CUBIN, None)
    assert (second.layer, second.source_path) == ("compiled", None)
    assert build.build(request()).layer == "memory"
    assert build.stats["unstored"] == 2
    assert len(caplog.records) == 1
    assert says in caplog.records[0].message
    assert "memory only" in caplog.records[0].message


def test_a_root_that_others_can_write_is_refused(root: Path, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.chmod(0o777)
    memory_only(root, caplog, "chmod go-w")
    with settings.override(trust_cache_dir=True):
        assert rebuild(root).layer == "disk"


def test_a_linked_root_is_refused(root: Path, entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    memory_only(link, caplog, "symbolic link")
    with settings.override(trust_cache_dir=True):
        assert rebuild(link).layer == "disk"


def test_a_dangling_root_is_refused_even_if_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with settings.override(trust_cache_dir=True):
        memory_only(link, caplog, "points nowhere")
    assert link.is_symlink()


def test_a_root_of_another_user_is_refused(
    root: Path, entry: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory of root would be accepted.
    if os.geteuid() == 0:
        os.chown(root, 54321, 54321)
    me = os.stat(root).st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: me)
    memory_only(root, caplog, f"belongs to user {me - 1}, not to you (user {me})")


def test_a_root_that_is_a_file_is_refused(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("not a directory")
    memory_only(root, caplog, "is not a directory")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_full_or_broken_filesystem_means_memory_only(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    memory_only(root, caplog, os.strerror(code))
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EEXIST])
@pytest.mark.parametrize("call", ["rename", "mkdir", "open", "fsync", "unlink"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_injected_errors_never_fail_a_build(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, nth: int
) -> None:
    real = getattr(os, call)
    count = 0

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
    assert build.build(request()).layer == "compiled"
    assert build.build(request()).layer == "memory"
    (record,) = caplog.records
    assert re.search(r"memory only.*no home directory.*DG_JIT_CACHE_DIR", record.message)


def test_stale_temporaries_are_swept_and_young_ones_are_not(root: Path, entry: Path) -> None:
    stale, young, future = (root / "tmp" / name for name in ("stale", "young", "future"))
    for path, age in ((stale, 7200), (young, 60), (future, -7200)):
        path.write_text("left by a killed writer")
        os.utime(path, (time.time() - age,) * 2)
    builder(root).build(request(source="int another;\n"))
    assert {path.name for path in (root / "tmp").iterdir()} == {"young", "future"}


def test_a_clock_that_goes_back_breaks_nothing(root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert rebuild(root).layer == "disk"
    assert builder(root).build(request(source="int another;\n")).layer == "compiled"
    assert builder(root).lookup(request(source="int another;\n")) is not None


def test_a_failed_write_leaves_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with files.Folder.open(tmp_path, trust=True) as folder, pytest.raises(OSError, match="directory"):
        folder.publish("target", b"x", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_info_counts_and_clear_removes_only_ours(root: Path, entry: Path) -> None:
    builder(root).build(request(source="int another;\n"))
    (root / "notes.txt").write_text("somebody's own file")
    cache = DiskCache(root)
    info = cache.info()
    assert (info["entries"], info["exists"], info["writable"], info["problem"]) == (2, True, True, None)
    assert info["bytes"] > 2 * len(CUBIN)
    (group,) = info["groups"]
    release = driver_release()
    driver = f"{release[0]}.{release[1]}" if release else "any"
    assert (group["arch"], group["cuda"], group["driver"], group["entries"]) == ("sm_90a", "12.9", driver, 2)
    cleared = cache.clear()
    assert cleared == {"entries": 2, "bytes": info["bytes"], "failed": 0}
    assert cache.info()["entries"] == 0
    assert not (root / "sm_90a").exists()
    assert (root / "notes.txt").exists()
    assert rebuild(root).layer == "compiled"


def test_info_and_clear_of_a_missing_root(root: Path) -> None:
    assert DiskCache(root).info()["exists"] is False
    assert DiskCache(root).clear() == {"entries": 0, "bytes": 0, "failed": 0}
    assert not root.exists()


def test_an_evicted_entry_is_a_plain_miss(root: Path, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(entry)
    assert rebuild(root).layer == "compiled"
    (entry / "kernel.json").unlink()
    assert rebuild(root).layer == "compiled"
    assert caplog.records == []


def test_two_schemas_share_a_root(root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.jit.key.SCHEMA", 999)
    assert rebuild(root).layer == "compiled"
    assert rebuild(root).layer == "disk"
    monkeypatch.undo()
    assert rebuild(root).layer == "disk"
    assert DiskCache(root).info()["entries"] == 2
