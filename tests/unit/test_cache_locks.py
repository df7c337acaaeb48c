"""Locks of the cache: filesystems without locks, links in place of locks, and interrupts, which must leave no lock
held."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import maintenance
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.forking import ForkLock

# A lock of another machine, whose process cannot be seen from here.
LEFT_BY_A_KILLED_HOLDER = "4194304\nanother-machine\n"


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL], ids=errno.errorcode.get)
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without locks, such as a network filesystem without a lock server."""

    def fail(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", fail)


def lock_of(build: Builder, source: str) -> Path:
    disk = build.disk()
    assert disk is not None
    address = build._plan(request(source=source)).addresses[0]
    return disk.root / "locks" / f"{address.arch}-{address.key}.lock"


@pytest.mark.filterwarnings("error:.*falling back to SoftFileLock.*")
def test_a_filesystem_without_locks_costs_nothing(root: Path, no_flock: None) -> None:
    """A killed holder has left its lock files: nobody waits for them, and no new ones are made."""
    build = builder(root, lock_limit=60.0)
    bodies = [f"int body{i};\n" for i in range(3)]
    (root / "locks").mkdir(parents=True)
    for body in bodies:
        lock_of(build, body).write_text(LEFT_BY_A_KILLED_HOLDER)
    start = time.monotonic()
    for body in bodies:
        assert build.build(request(source=body)).layer == "compiled"
    assert time.monotonic() - start < 40.0
    assert build.stats["lock_timeout"] == 0
    assert builder(root).build(request(source=bodies[0])).layer == "disk"
    assert len(list((root / "locks").iterdir())) == 3
    # Eviction and repair work without locks, too.
    disk = DiskCache(root)
    (disk.directory(build._plan(request(source=bodies[0])).addresses[0]) / "kernel.cubin").write_bytes(b"")
    assert [item.done for item in maintenance.delete_bad(disk, maintenance.verify(disk))] == [True]
    assert [item.done for item in maintenance.prune(disk, max_bytes=0)] == [True, True]


def test_a_filesystem_is_asked_once_for_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: asked.append(str(a[0])) or real(*a, **k))
    build = builder(root)
    for i in range(3):
        build.build(request(source=f"int body{i};\n"))
    assert sum(name.startswith("probe-") for name in asked) == 1
    assert not any(path.name.startswith("probe-") for path in (root / "locks").iterdir())


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo"])
def test_whatever_is_in_place_of_a_lock_harms_nothing(root: Path, tmp_path: Path, kind: str) -> None:
    """An old filelock followed the link and truncated its target."""
    build = builder(root, lock_limit=0.2)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = lock_of(build, "int body;\n")
    path.parent.mkdir(parents=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    assert build.build(request()).cubin == cubin_of("int body;\n")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    assert builder(root).build(request()).layer == "disk"


def test_the_filelock_that_is_installed_follows_no_link(tmp_path: Path) -> None:
    """This is why pyproject.toml requires 3.20.1: with 3.20.0 this test fails."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with contextlib.suppress(OSError, filelock.Timeout):
        filelock.FileLock(tmp_path / "lock", timeout=0, mode=0o600).acquire()
    assert (tmp_path / "precious").read_text() == "precious"


# ---- interrupts


@pytest.fixture
def storm() -> Iterator[None]:
    """KeyboardInterrupt in the main thread at each SIGALRM."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def under_interrupts(action: Any, seconds: float) -> int:
    """Call `action` repeatedly under interrupts, for longer on a busy machine. Returns how many interrupts there
    were."""
    interrupts, start = 0, time.monotonic()
    while (spent := time.monotonic() - start) < seconds or (interrupts <= 100 and spent < 60):
        try:
            # At another moment each time: a little longer than the call takes, or a little shorter.
            signal.setitimer(signal.ITIMER_REAL, 20e-6 + (interrupts % 97) * 1e-6)
            for _ in range(50):  # where Python ignores exceptions, as in __del__, an interrupt does not end the loop
                action()
        except KeyboardInterrupt:
            interrupts += 1
    return interrupts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_over_memory_hits_leave_no_lock_taken(root: Path, storm: None) -> None:
    build = builder(root)
    build.build(request())
    assert under_interrupts(lambda: build.build(request()), 1.0) > 100
    signal.setitimer(signal.ITIMER_REAL, 0)
    done = threading.Event()

    def other() -> None:
        build.build(request(source="int other;\n"))
        assert build.stats["memory"] > 0
        done.set()

    threading.Thread(target=other, daemon=True).start()
    assert done.wait(60), "the next build waits for a lock that nobody will release"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_over_every_layer_leave_no_lock_taken(root: Path, storm: None) -> None:
    """Compiling, loading from disk, and waiting for a key that another thread compiles."""
    compiler = FakeCompiler()
    builds = [builder(root, compiler) for _ in range(50)]
    turns = iter(range(10**9))

    def next_one() -> None:
        turn = next(turns)
        builds[turn % 50].build(request(source=f"int body{turn % 7};\n"))

    assert under_interrupts(next_one, 1.0) > 100
    signal.setitimer(signal.ITIMER_REAL, 0)
    done = threading.Event()

    def all_again() -> None:
        for build in builds:
            for i in range(7):
                build.build(request(source=f"int body{i};\n"))
        done.set()

    threading.Thread(target=all_again, daemon=True).start()
    assert done.wait(60)
    assert builder(root).build(request(source="int body0;\n")).layer == "disk"


def test_a_fork_inside_a_lock_leaves_it_free_in_the_child() -> None:
    lock = ForkLock()
    with lock.lock:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(10)
                with lock.lock:
                    os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.lock.locked()
    assert not lock.lock.locked()
