"""Forked children: one that is forked after CUDA was initialised gets an error that says so, and no fork happens while
a thread is inside a library with locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import OK, FakeDriver

from deep_gemm.errors import DeepGemmError, DriverError
from deep_gemm.jit.cache.locks import not_inherited
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function, load_function
from deep_gemm.jit.forking import ForkWaits

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
        name: answer if name == "cuGetErrorString" else only_here(answer) for name, answer in driver.answers.items()
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
        with waits:
            # At the same time: threads inside do not exclude each other.
            entered.wait(timeout=60)
            time.sleep(0.1 * number)
            inside[number] = False

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    entered.wait(timeout=60)

    def enter() -> None:
        raise DriverError(f"{any(inside)} {bool(waits.__enter__())}")

    assert in_child(enter) == "DriverError: False False"
    for thread in threads:
        thread.join()
    # Afterwards the parent can enter again.
    with waits:
        pass


def test_who_comes_during_a_fork_enters_after_it() -> None:
    waits = ForkWaits()
    waits._before_fork()
    done = threading.Event()

    def work() -> None:
        with waits:
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.1)
    waits._after_fork_in_parent()
    assert done.wait(60)
    thread.join()


def test_one_that_was_made_during_a_fork_is_free() -> None:
    waits = ForkWaits()
    waits._after_fork_in_parent()
    with waits:
        pass
    assert in_child(waits.__enter__) == "nothing"


@pytest.mark.parametrize("unlinked", [False, True])
def test_a_child_keeps_no_lock_of_its_parents(tmp_path: Path, unlinked: bool) -> None:
    """Older versions of filelock leave the descriptor open in the child. Here the lock is taken without filelock."""
    path, other = tmp_path / "lock", tmp_path / "other"
    descriptor, kept = (os.open(name, os.O_RDWR | os.O_CREAT) for name in (path, other))
    again = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def seen() -> None:
        still = []
        for number in (descriptor, kept):
            with contextlib.suppress(OSError):
                os.fstat(number)
                still.append(number == kept)
        raise DriverError(str(still))

    with not_inherited(path):
        if unlinked:
            path.unlink()
        # Only the lock is closed.
        assert in_child(seen) == "DriverError: [True]"
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        os.close(descriptor)  # as if this process were killed
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                assert time.monotonic() < deadline, "the child keeps the lock"
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert in_child(lambda: os.fstat(again)) == "nothing"
    for number in (kept, again):
        os.close(number)
