"""Forked children: one that is forked after CUDA was initialised gets an error that says so, and no fork happens while
a thread is inside a library with locks."""

import ast
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import OK, FakeDriver

from deep_gemm.errors import DeepGemmError, DriverError
from deep_gemm.jit import forking
from deep_gemm.jit.cache import locks
from deep_gemm.jit.cache.files import Folder
from deep_gemm.jit.cache.locks import take
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function, load_function
from deep_gemm.jit.forking import ForkWaits, late

SHAPE = LaunchShape((1, 1, 1), 128, 0)


def in_child(action: Callable[[], object]) -> str:
    """The exception that `action` raises in a forked child, as "Class: message", or "nothing"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            said = "nothing"
        except DeepGemmError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"unexpected {error!r}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def inherited(driver: FakeDriver) -> FakeDriver:
    """Like the real driver, it answers every call with CUDA_ERROR_NOT_INITIALIZED in a child of the process that
    initialised it."""
    parent = os.getpid()

    def only_here(answer: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def asked(*arguments: Any) -> tuple[Any, ...]:
            if os.getpid() != parent:
                return (bindings.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
            return answer(*arguments)

        return asked

    for name in ("cuInit", "cuLaunchKernelEx"):
        driver.answers[name] = lambda *_: (OK,)
    driver.answers = {
        name: answer if name.startswith("cuGetError") else only_here(answer) for name, answer in driver.answers.items()
    }
    return driver


def test_loading_in_a_child_says_to_use_spawn(inherited: FakeDriver) -> None:
    load_function(b"cubin", "k", 0, 0)
    said = in_child(lambda: load_function(b"cubin", "k", 0, 0))
    assert said.startswith("DriverError: CUDA was initialised before this process was forked")
    assert 'multiprocessing.get_context("spawn")' in said


def test_a_launch_that_was_prepared_before_the_fork_says_so_too(inherited: FakeDriver, function: Function) -> None:
    launch = Launch(function, SHAPE, 0, [("i32", 1)])
    launch()
    said = in_child(launch)
    assert "cuLaunchKernelEx for k" in said
    assert "CUDA_ERROR_NOT_INITIALIZED" in said
    assert 'start workers with the "spawn" method' in said


def test_a_context_that_somebody_else_initialised_says_so_too(inherited: FakeDriver) -> None:
    """torch used CUDA in the parent and this package did not: only the driver knows."""
    said = in_child(lambda: load_function(b"cubin", "k", 0, 0))
    assert "cuInit failed with CUDA_ERROR_NOT_INITIALIZED" in said
    assert 'start workers with the "spawn" method' in said


def test_a_fork_before_cuda_is_free_to_use_it(inherited: FakeDriver) -> None:
    inherited.answers = FakeDriver().answers
    assert in_child(lambda: load_function(b"cubin", "k", 0, 0)) == "nothing"


def test_the_parent_goes_on(inherited: FakeDriver) -> None:
    load_function(b"cubin", "k", 0, 0)
    assert "DriverError" in in_child(lambda: load_function(b"cubin", "k", 0, 0))
    assert load_function(b"cubin", "k", 0, 0).symbol == "k"


def test_a_child_of_a_child_is_told_as_well(inherited: FakeDriver) -> None:
    load_function(b"cubin", "k", 0, 0)

    def nested() -> None:
        raise DriverError(in_child(api.initialise))

    assert "initialised before this process was forked" in in_child(nested)


def test_a_fork_waits_until_nobody_is_inside() -> None:
    waits, entered, inside = ForkWaits(), threading.Barrier(4), [True] * 3

    def work(number: int) -> None:
        # At the same time: threads inside do not exclude each other.
        entered.wait(timeout=60)
        time.sleep(0.1 * number)
        inside[number] = False

    threads = [threading.Thread(target=waits.run, args=(lambda number=number: work(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    entered.wait(timeout=60)

    def enter() -> None:
        raise DriverError(f"{any(inside)} {waits.run(lambda: 3)}")

    assert in_child(enter) == "DriverError: False 3"
    for thread in threads:
        thread.join()
    # Afterwards the parent can enter again.
    assert waits.run(lambda: 4) == 4


def test_a_fork_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked while a thread imports a module finds the module's lock taken. In builds it waited for
    ever, in 1 of 2 runs of all compile tests."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nvalue = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=late, args=("slow_to_import",))
    thread.start()
    while "slow_to_import" not in sys.modules:
        time.sleep(0.001)

    def imported() -> None:
        signal.alarm(20)
        raise DriverError(str(late("slow_to_import").value))

    assert in_child(imported) == "DriverError: 7"
    thread.join()
    del sys.modules["slow_to_import"]


def test_builds_import_nothing_late_but_through_it() -> None:
    """Imports inside of functions, where a thread may be while another one forks. Commands have none of it."""
    package = Path(forking.__file__).parent
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = [
            node.lineno
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name != "__getattr__"
            for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert not inside or path.name == "maintenance.py", f"{path.relative_to(package)}: {inside}"


def test_who_comes_during_a_fork_enters_after_it() -> None:
    waits, done = ForkWaits(), threading.Event()
    waits._gate.acquire()
    thread = threading.Thread(target=waits.run, args=(done.set,))
    thread.start()
    assert not done.wait(0.1)
    waits._wait()  # it is not inside, so that the fork goes on
    waits._gate.release()
    assert done.wait(60)
    thread.join()


def test_nobody_waits_longer_than_the_limit_for_a_fork() -> None:
    waits = ForkWaits(limit=0.1)
    with waits._gate, ThreadPoolExecutor(1) as pool:
        assert pool.submit(waits.run, lambda: 3).result(60) == 3


def test_one_that_was_made_during_a_fork_is_free() -> None:
    waits = ForkWaits()
    with pytest.raises(RuntimeError, match="unlocked"):
        waits._gate.release()
    assert waits.run(lambda: 3) == 3
    assert in_child(lambda: waits.run(int)) == "nothing"


@pytest.mark.parametrize(
    ("what", "interrupts", "ignored"),
    [("beside-threads", 0, []), ("interrupted", 100, ["KeyboardInterrupt()"])],
)
def test_every_fork_ends(what: str, interrupts: int, ignored: list[str]) -> None:
    """Exceptions around a fork are ignored: where one prevented the end of a fork, no compilation began any more."""
    command = [sys.executable, str(Path(__file__).parents[1] / "fork_worker.py"), what]
    worker = subprocess.run(command, capture_output=True, text=True, timeout=100)
    said = json.loads(worker.stdout or f'"{worker.stderr}"')
    # Python's logging has an RLock of its own around a fork, and gets it wrong when it is interrupted.
    of_logging = {"RuntimeError('cannot release un-acquired lock')"}
    assert (sorted({*said["ignored"]} - of_logging), said["free"]) == (ignored, True)
    assert said["interrupts"] >= interrupts


@pytest.mark.parametrize(("files", "unlinked"), [(False, False), (True, False), (True, True)])
def test_a_child_keeps_no_lock_of_its_parents(
    tmp_path: Path, files: bool, unlinked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if files:
        monkeypatch.setattr(locks, "_SET", 9999)
    (tmp_path / "locks").mkdir()
    path, other = tmp_path / "locks" / "lock", tmp_path / "other"
    with Folder.open(path.parent, trust=True) as folder, other.open("w") as kept:
        lock = take(folder, path.name, 1.0)
        again = os.open(path if files else path.with_name(locks.KEYS), os.O_RDWR)
        if unlinked:
            path.unlink()

        def seen() -> None:
            raise DriverError(str([os.readlink(f"/proc/self/fd/{file.fileno()}") for file in (lock, kept)]))

        # Only the lock is closed.
        assert in_child(seen) == f"DriverError: ['/dev/null', '{other}']"
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        lock.close()  # as if this process were killed
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(BlockingIOError, TimeoutError):
                    if files:
                        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    else:
                        take(folder, path.name, 0.0).close()
                    break
                assert time.monotonic() < deadline, "the child keeps the lock"
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(again)
