"""Owners and modes: the cache uses only directories and files that nobody but this user or root can write to, at every
level, and it reads exactly the files that it checked."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request
from pack_kernels import make, sources, user

from deep_gemm.jit.cache import files, transfer
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.files import Folder
from deep_gemm.settings import settings

BODY = "int body;\n"
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def entry(root: Path) -> Path:
    """The directory of one good entry."""
    return Path(builder(root).build(request(render_key="0" * 40)).source_path or "").parent


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


# ---- the directories beside the entries


@pytest.mark.parametrize("kind", ["linked", "open to all"])
@pytest.mark.parametrize("name", ["tmp", "locks", "rendered"])
def test_no_folder_beside_the_entries_is_trusted_more(
    root: Path, entry: Path, name: str, kind: str, tmp_path: Path
) -> None:
    path, aside = root / name, tmp_path / "aside"
    if kind == "linked":
        shutil.rmtree(path)
        aside.mkdir()
        (aside / "stale").write_text("not the cache's to sweep")
        os.utime(aside / "stale", (0, 0))
        path.symlink_to(aside)
    else:
        path.chmod(0o777)
    assert builder(root).source("0" * 40) == (None if name == "rendered" else BODY)
    other = request(source="int other;\n", render_key="1" * 40)
    build = builder(root)
    assert build.build(other).cubin == cubin_of(other.source)
    # Without a safe directory for temporary files nothing can be stored.
    assert build.stats["unstored"] == ((name, kind) == ("tmp", "open to all"))
    assert not aside.exists() or [found.name for found in aside.iterdir()] == ["stale"]
    assert DiskCache(root).clear()["failed"] == 0
    assert not aside.exists() or [found.name for found in aside.iterdir()] == ["stale"]


def test_clearing_follows_no_link(root: Path, entry: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    entry.parents[2].rename(aside)
    entry.parents[2].symlink_to(aside)
    assert DiskCache(root).clear()["entries"] == 0
    assert (aside / entry.relative_to(entry.parents[2]) / "kernel.json").exists()


# ---- the file that was checked is the one that is read


@pytest.fixture
def evil(tmp_path: Path, entry: Path) -> Path:
    """Another root, sound in itself, with other bytes under the same key."""
    path = tmp_path / "evil"
    builder(path, FakeCompiler(tag="evil"), include_dir=tmp_path / "no-headers").build(request())
    return path


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("between")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_a_root_that_is_exchanged_after_its_check_is_not_read(
    root: Path, entry: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.danger
    checks = []

    def exchanged_afterwards(*arguments: Any) -> str | None:
        checks.append(arguments)
        problem = real(*arguments)
        if len(checks) == moment:
            exchange(root, evil)
        return problem

    for moment in range(1, 9):  # the root, its four levels and the three files of an entry
        with monkeypatch.context() as patch:
            patch.setattr(files, "danger", exchanged_afterwards)
            found = builder(root).lookup(request())
        assert found is not None
        assert found.cubin == cubin_of(BODY), f"after {moment} checks"
        assert len(checks) == 8
        exchange(root, evil)
        checks.clear()


EXCHANGE = """
import os, sys, time
parent = int(sys.argv[1])
os.setgid(54321)
os.setuid(54321)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for source, target in (("root", "a"), ("evil", "root"), ("root", "evil"), ("a", "root")):
        os.rename(source, target, src_dir_fd=parent, dst_dir_fd=parent)
"""


@as_root
@pytest.mark.parametrize("theirs", ["their directory", "their link to it"])
def test_another_user_who_exchanges_the_root_gets_nothing_loaded(
    root: Path, entry: Path, evil: Path, tmp_path: Path, theirs: str
) -> None:
    """The directory around the root is writable to all. Before the fix, other bytes were loaded after 0.6 s."""
    for path in [evil, *evil.rglob("*")]:
        given_away(path)
    if theirs == "their link to it":
        evil.rename(tmp_path / "real")
        evil.symlink_to(tmp_path / "real")
        os.chown(evil, STRANGER, STRANGER, follow_symlinks=False)
    tmp_path.chmod(0o777)
    parent = os.open(tmp_path, os.O_RDONLY)
    seconds = 1.5
    command = [sys.executable, "-c", EXCHANGE, str(parent), str(seconds)]
    try:
        with subprocess.Popen(command, pass_fds=[parent], stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"ready\n"
            found: set[bytes | None] = set()
            asked = 0
            while attacker.poll() is None:
                binary = builder(root, include_dir=tmp_path / "no-headers").lookup(request())
                found.add(binary.cubin if binary else None)
                asked += 1
            assert attacker.returncode == 0
    finally:
        os.close(parent)
    assert found <= {cubin_of(BODY), None}
    # Both roots were seen, so the attack was real.
    assert len(found) == 2
    assert asked > 100


# ---- what is created


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o002, 0o777])
def test_all_that_is_created_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "one" / "two" / "root"
    before = os.umask(mask)
    try:
        builder(root, include_dir=tmp_path / "no-headers").build(request())
    finally:
        os.umask(before)
    made = [tmp_path / "one", *(tmp_path / "one").rglob("*")]
    assert {path.name for path in made} >= {"kernel.cubin", "kernel.json", "kernel.cu", "tmp", "locks"}
    assert list((root / "tmp").iterdir()) == []
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600 & ~mask), path


def test_a_parent_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o2755)
    builder(tmp_path / "theirs" / "new" / "root", include_dir=tmp_path / "no-headers").build(request())
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o2755
    # The set-group-ID bit of a directory is kept.
    assert stat.S_IMODE((tmp_path / "theirs" / "new").stat().st_mode) == 0o2700


@pytest.mark.parametrize(("fixed", "stored"), [(0o755, 1), (0o777, 0)])
def test_a_filesystem_with_fixed_modes(root: Path, fixed: int, stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem with fixed modes: mkdir ignores the mode, and chmod fails. It is used if its modes are safe."""
    mkdir, chmod = os.mkdir, os.chmod

    def unlike(path: Any, mode: int = 0, *, dir_fd: int | None = None) -> None:
        mkdir(path, dir_fd=dir_fd)
        chmod(path, fixed, dir_fd=dir_fd)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", unlike)
        patch.setattr(os, "chmod", refused)
        assert builder(root).build(request()).layer == "compiled"
    assert len(list(root.rglob("kernel.json"))) == stored


def test_a_pack_is_written_where_others_can_read_it_and_not_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        out = tmp_path / "a.dgpack"
        transfer.join([make(tmp_path / "b.dgpack")], out, trust=True)
        with pytest.raises(FileNotFoundError):
            transfer.join([tmp_path / "b.dgpack"], tmp_path / "mistyped" / "a.dgpack", trust=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o644
    assert not (tmp_path / "mistyped").exists()
    assert len(packs.read(out).kernels) == 3


def test_a_deep_tree_is_removed_and_a_link_in_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(tmp_path / "mine")
    with Folder.open(tmp_path, trust=True) as folder:
        assert folder.remove("tree")
        assert folder.remove("absent")
        assert folder.has("mine")
    assert (tmp_path / "mine" / "file").exists()


# ---- publishing


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


def test_the_loser_of_a_race_uses_its_own_bytes(root: Path) -> None:
    """Another process publishes the entry while this one compiles. On a network filesystem it may not even be
    visible."""
    other = FakeCompiler(tag="theirs")

    def overtake(source: str) -> None:
        assert builder(root, other, lock_limit=0.01).build(request()).layer == "compiled"

    assert builder(root, FakeCompiler(on_compile=overtake)).build(request()).cubin == cubin_of(BODY)


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
    assert (built.layer, built.cubin) == ("compiled", cubin_of(BODY))
    # Looked up before the lock and once inside it, for each driver's directory; not in a loop.
    assert len(looked) <= 4


# ---- packs


def layer_of(pack: Path, tmp_path: Path, **options: Any) -> str:
    root = tmp_path / f"none{time.monotonic_ns()}" / "root"
    with settings.override(**options):
        return user(root, pack, include_dir=tmp_path / "no-headers")[0].build(sources()[0]).layer


def chmod(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (chmod(0o664), "other users can write to"),
        (chmod(0o646), "other users can write to"),
        pytest.param(given_away, f"belongs to user {STRANGER}, not to you", marks=as_root),
        (lambda pack: pack.parent.chmod(0o777), "others can replace it, since other users can write to"),
        (lambda pack: pack.parent.chmod(0o775), "others can replace it, since other users can write to"),
    ],
    ids=["group", "others", "owner", "directory", "directory of a group"],
)
@pytest.mark.parametrize("named", ["by itself", "by its directory", "through a link", "in a sticky directory"])
def test_a_pack_obeys_the_roots_rule(
    tmp_path: Path, change: Callable[[Path], None], says: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packs"
    folder.mkdir()
    pack = make(tmp_path / "a.dgpack").rename(folder / "a.dgpack")
    if named == "in a sticky directory":
        folder.chmod(0o1777)
    path = pack if named == "by itself" else folder
    if named == "through a link":
        path = tmp_path / "link.dgpack"
        path.symlink_to(pack)
    assert layer_of(path, tmp_path) == "pack"
    change(pack)
    assert layer_of(path, tmp_path) == "compiled"
    (warning,) = [record.message for record in caplog.records]
    assert says in warning
    assert "DG_JIT_TRUST_CACHE_DIR" in warning
    (item,) = transfer.join([path if path.is_file() else pack], tmp_path / "out.dgpack", trust=False)
    assert (item.state, says in item.reason) == ("unsound", True)
    assert layer_of(path, tmp_path, trust_cache_dir=True) == "pack"


def test_a_pack_that_is_exchanged_after_its_check_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil").mkdir()
    evil = make(tmp_path / "evil" / "a.dgpack", compiler=FakeCompiler(tag="evil"))
    pack = make(tmp_path / "a.dgpack")
    real = packs._danger

    def exchanged_afterwards(*arguments: Any) -> str | None:
        problem = real(*arguments)
        evil.rename(pack)
        return problem

    monkeypatch.setattr(packs, "_danger", exchanged_afterwards)
    build, compiler = user(tmp_path / "root", pack, include_dir=tmp_path / "no-headers")
    # The checked manifest has the SHA-256 of every kernel: the bytes of the other file are refused.
    assert build.build(sources()[0]).cubin == cubin_of(sources()[0].source)
    assert len(compiler.calls) == 1


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
