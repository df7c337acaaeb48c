"""Locks of the cache: filesystems without locks, links in place of locks, and interrupts, which must leave no lock
held."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.errors import CompileError
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import limit, locks, maintenance
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.files import Folder, open_file, read, write_whole
from deep_gemm.jit.forking import ForkLock
from deep_gemm.jit.key import content_of

# A lock of another machine, whose process cannot be seen from here.
LEFT_BY_A_KILLED_HOLDER = "4194304\nanother-machine\n"


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL], ids=errno.errorcode.get)
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without locks, such as a network filesystem without a lock server."""

    def fail(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", fail)
    monkeypatch.setattr(fcntl, "fcntl", fail)


@pytest.fixture(params=["bytes", "files"])
def kind_of_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Bytes of one file, or, where the system has no such locks, files."""
    if request.param == "files":
        monkeypatch.setattr(locks, "_SET", 9999)
    return str(request.param)


def lock_files(root: Path) -> list[str]:
    """Those of one lock each."""
    return sorted({path.name for path in (root / "locks").iterdir()} - {locks.KEYS})


def lock_of(build: Builder, source: str) -> Path:
    disk = build.disk()
    assert disk is not None
    address = build._resolved(request(source=source)).addresses[0]
    return disk.root / "locks" / f"{address.arch}-{address.key}.lock"


def test_a_filesystem_without_locks_costs_nothing(root: Path, no_flock: None) -> None:
    """A killed holder has left its lock files: nobody waits for them, and they do not stay."""
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
    assert lock_files(root) == []
    # Eviction and repair work without locks, too.
    disk = DiskCache(root)
    (disk.directory(build._resolved(request(source=bodies[0])).addresses[0]) / "kernel.cubin").write_bytes(b"")
    assert [item.done for item in maintenance.delete_bad(disk, maintenance.verify(disk))] == [True]
    assert [item.done for item in maintenance.prune(disk, max_bytes=0)] == [True, True]


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo"])
def test_whatever_is_in_place_of_a_lock_harms_nothing(root: Path, tmp_path: Path, kind: str) -> None:
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


def test_one_at_a_time_holds_a_lock_though_each_deletes_its_file(tmp_path: Path, kind_of_lock: str) -> None:
    inside, most = [], []

    def work(turn: int) -> None:
        with Folder.open(tmp_path, trust=True) as folder, locks.take(folder, "lock", 60.0):
            inside.append(turn)
            most.append(len(inside))
            time.sleep(0.001)
            inside.remove(turn)
            if turn % 3:
                folder.unlink("lock")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert most == [1] * 80


def test_a_held_lock_is_waited_for_until_the_limit(tmp_path: Path, kind_of_lock: str) -> None:
    with Folder.open(tmp_path, trust=True) as folder, locks.take(folder, "lock", 0.0):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="lock is held"):
            locks.take(folder, "lock", 0.2)
        assert 0.2 <= time.monotonic() - start < 20
        locks.sweep(folder)
        assert (tmp_path / "lock").exists() == (kind_of_lock == "files")
        with locks.take(folder, "another", 0.0), pytest.raises(TimeoutError):
            locks.take(folder, "lock", 0.0)
    with Folder.open(tmp_path, trust=True) as folder:
        locks.sweep(folder)
    assert not (tmp_path / "lock").exists()


def test_a_killed_process_leaves_no_lock(tmp_path: Path, kind_of_lock: str) -> None:
    """51 of 170 runs left lock files."""
    child = os.fork()
    if child == 0:
        with Folder.open(tmp_path, trust=True) as folder, locks.take(folder, "lock", 60.0):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == ({locks.KEYS} if kind_of_lock == "bytes" else {"keys", "lock"})
    with Folder.open(tmp_path, trust=True) as folder, locks.take(folder, "lock", 0.0):
        assert (tmp_path / locks.KEYS).stat().st_size == 0


def test_no_lock_file_stays(root: Path, kind_of_lock: str) -> None:
    """They stayed one for each kernel, and `cache clear` left them."""
    build = builder(root)
    build.build(request())
    with pytest.raises(CompileError):
        build.build(request(source="#error\n"))
    assert lock_files(root) == []
    left = lock_of(build, "int killed;\n")
    left.touch()
    builder(root).build(request(source="int another;\n"))
    assert lock_files(root) == [], "a killed process's goes with the next one"
    left.touch()
    disk = DiskCache(root)
    with disk.lock(build._resolved(request()).addresses[0], 0.0) as held:
        assert held
        disk.clear()
        assert lock_files(root) == [lock_of(build, "int body;\n").name] * (kind_of_lock == "files")
        with pytest.raises(TimeoutError):
            disk.take(lock_of(build, "int body;\n").name, 0.0)


# ---- interrupts


@pytest.fixture
def storm() -> Iterator[None]:
    """KeyboardInterrupt in the main thread at each SIGALRM."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.freeze()  # so that collecting looks only at what a test makes
    yield
    gc.unfreeze()
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
    assert under_interrupts(lambda: build.build(request()), 0.3) > 100
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

    assert under_interrupts(next_one, 0.5) > 100
    signal.setitimer(signal.ITIMER_REAL, 0)
    done = threading.Event()

    def again_and_new() -> None:
        for number, build in enumerate(builds):
            for source in (*(f"int body{i};\n" for i in range(7)), f"int new{number};\n"):
                build.build(request(source=source))
            assert build.stats["lock_timeout"] == 0
        done.set()

    threading.Thread(target=again_and_new, daemon=True).start()
    assert done.wait(60), "a build waits for a lock that nobody will release"
    assert builder(root).build(request(source="int new0;\n")).layer == "disk"


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


HELD: dict[str, Callable[[Path], object]] = {
    "a file of headers": lambda root: content_of(str(root / "file"), 4),
    "a file": lambda root: read(root / "file", 10),
    "a pack": lambda root: open_file(root / "file").close(),
    "a directory": lambda root: Folder.open(root, trust=True).__exit__(),
    "a path": lambda root: DiskCache(root).open().below(("a", "b")).__exit__(),
    "a path that is made": lambda root: DiskCache(root).open().made_below(("a", "c")).__exit__(),
    "a lock": lambda root: locks.take(Folder.open(root, trust=True), "lock", 5.0).close(),
    "a new file": lambda root: write_whole(root / "new", [b"text"]),
    "a published file": lambda root: Folder.open(root, trust=True).publish("x", b"y", Folder.open(root, trust=True)),
    "a tally": lambda root: limit._tally(Folder.open(root, trust=True)).close(),
    "checking": lambda root: maintenance._times_kept(root / "file").__enter__(),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_leave_nothing_open(root: Path, storm: None, name: str) -> None:
    """5,900 descriptors of 30,580 interrupts were lost between `os.open` and what was to close them."""
    (root / "a" / "b").mkdir(0o700, parents=True)
    for folder in (root, root / "a"):
        folder.chmod(0o700)
    (root / "file").write_text("text")
    (root / "file").chmod(0o600)
    before = _open_files()
    assert under_interrupts(lambda: HELD[name](root), 0.1) > 100
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert _open_files() <= before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_over_a_lock_leave_it_free(tmp_path: Path, storm: None) -> None:
    """A library that counts locks in Python was left believing that one is held, for all threads and for ever."""
    with Folder.open(tmp_path, trust=True) as folder:

        def take(name: str, limit: float) -> None:
            with locks.take(folder, name, limit):
                pass

        assert under_interrupts(lambda: take("lock", 5.0), 0.5) > 100
        signal.setitimer(signal.ITIMER_REAL, 0)
        with ThreadPoolExecutor(1) as pool:
            for name in ("lock", "another"):
                pool.submit(take, name, 0.0).result(60)


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
