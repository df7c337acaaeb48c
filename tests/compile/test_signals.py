"""Signals that arrive while NVRTC compiles: the process reacts as it would elsewhere."""

import _thread
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chosen import find_config, make_params
from processes import wait_for
from signal_worker import SIGNALS, slow_source

from deep_gemm.errors import CompileError
from deep_gemm.jit.compilers import Compiler, Nvrtc, choose
from deep_gemm.jit.compilers import nvrtc as nvrtc_module
from deep_gemm.jit.compilers.signals import interruptible
from deep_gemm.jit.forking import ForkWaits
from deep_gemm.jit.generator import include_dir
from deep_gemm.runtime import engine
from deep_gemm.settings import settings

pytestmark = pytest.mark.long

WORKER = Path(__file__).parents[1] / "signal_worker.py"
LIMIT = 60.0  # seconds; more than a busy machine takes, so a longer time is a hang


@pytest.fixture
def nvrtc() -> Compiler:
    with settings.override(use_nvrtc=True):
        return choose()


def end(seed: str, number: signal.Signals | None, **job: Any) -> tuple[int, str, float]:
    """Send a process the signal at a random moment, if any. Returns its exit status, its output, and the time until it
    ended."""
    command = [sys.executable, str(WORKER), json.dumps({"parts": 1200, **job})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "compiling\n"
        time.sleep(random.Random(seed).random() * 0.5)
        begin = time.monotonic()
        if number is not None:
            worker.send_signal(number)
        try:
            said = "".join(worker.communicate(timeout=LIMIT))
        except subprocess.TimeoutExpired:
            worker.kill()
            raise
        return worker.returncode, said, time.monotonic() - begin


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(("handler", "expected"), [("default", ""), ("function", "handled\n")])
def test_a_signal_ends_a_process_that_compiles(where: str, number: signal.Signals, handler: str, expected: str) -> None:
    # NVRTC is in its front end for half a minute, where its own handlers ended most of these by status 4 or SIGSEGV.
    status, said, seconds = end(f"{where} {number} {handler}", number, handler=handler, where=where)
    assert (status, said) == (-number, expected)
    assert seconds < 15  # the handler does not wait for the compilation


def test_an_exception_of_a_handler_ends_a_process_that_compiles() -> None:
    status, said, _ = end("", signal.SIGINT, handler="interrupt", where="main", parts=20)
    assert "KeyboardInterrupt" in said
    assert status in (1, -signal.SIGINT)


def test_an_interrupted_compilation_is_cancelled(nvrtc: Compiler) -> None:
    """The interrupt arrives at once, and Python does not wait for the rest of the compilation at exit."""
    assert isinstance(nvrtc, Nvrtc)
    library = nvrtc._open()
    if not hasattr(library, "nvrtcSetFlowCallback"):
        pytest.skip("NVRTC before 12.8 cannot be told to stop")
    began, statuses = threading.Event(), list[int]()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return self.compile if name == "nvrtcCompileProgram" else getattr(library, name)

        def compile(self, *arguments: Any) -> int:
            began.set()
            statuses.append(library.nvrtcCompileProgram(*arguments))
            return statuses[-1]

    def interrupt() -> None:
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    own = Nvrtc(nvrtc.path, nvrtc.version)
    own._library = Watched()  # type: ignore[assignment]
    request = engine.build_request(make_params(find_config(block_m=128, block_n=128)))
    flags = own.flags("sm_90a")
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        own.compile(request.name, request.source, "kernel.cu", flags, include_dir())
    assert statuses == []
    wait_for(lambda: len(statuses) == 1)
    assert statuses == [16], "NVRTC_ERROR_CANCELLED"
    assert own.compile("k", slow_source(1), "kernel.cu", flags, None).cubin


@pytest.mark.parametrize("parts", [1200, 20, 1])
@pytest.mark.parametrize(
    ("where", "handler", "number"),
    [("thread", "exit", signal.SIGTERM), ("main", "exit", signal.SIGTERM), ("thread", "ends", None)],
)
def test_a_process_that_exits_while_threads_compile_ends_with_its_own_status(
    where: str, handler: str, number: signal.Signals | None, parts: int
) -> None:
    """C frees NVRTC's memory at exit: in 8 of 30 processes, a daemon thread that compiled crashed."""
    for turn in range(4):
        status, said, seconds = end(f"{turn} {where} {handler}", number, handler=handler, where=where, parts=parts)
        assert (status, said) == (7, "")
        assert seconds < 15  # it does not wait for the compilation


# NVRTC up to 13.0 changes handlers in the first compilation of a process only, so each of these needs a new process.
CHILD = """
import os, sys, threading, time
sys.path.insert(0, {tests!r})
from jit_worker import without_torch
without_torch()
from signal_worker import slow_source
from deep_gemm.jit.compilers import choose

def dispositions():
    lines = [line.split() for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigCgt"))]
    return [int(mask, 16) & 0x7fffffff for name, mask in lines]  # without glibc's own, which come with threads

compiler = choose()
before, seen = dispositions(), []
thread = threading.Thread(target=compiler.compile, args=("k", slow_source(10), "k.cu", compiler.flags("sm_90a"), None))
thread.start()
while thread.is_alive():
    seen.append(dispositions())
    time.sleep(0.001)
print(len(seen) > 10, all(one == before for one in seen), flush=True)
os.read(0, 1)
"""


def test_handlers_are_those_of_the_program_all_the_time() -> None:
    command = [sys.executable, "-c", CHILD.format(tests=str(WORKER.parent))]
    environment = {**os.environ, "DG_JIT_USE_NVRTC": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, text=True, **pipes) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True True\n"
        # NVRTC put SIGINT back with SA_RESTART: Ctrl-C waited until the read that it was to end had come.
        time.sleep(0.1)
        reader.send_signal(signal.SIGINT)
        try:
            assert reader.wait(LIMIT) in (1, -signal.SIGINT)
        finally:
            reader.kill()


def test_another_thread_works() -> None:
    ran: list[threading.Thread] = []
    cancelled: list[bool] = []
    ended = threading.Event()

    def work() -> int:
        ran.append(threading.current_thread())
        return 3

    assert interruptible(work, lambda: None, LIMIT) == 3
    assert ran[0] is not threading.main_thread()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(interruptible, work, lambda: None, LIMIT).result() == 3
        assert ran[1] is not pool.submit(threading.current_thread).result()
    with pytest.raises(CompileError, match="no"):
        interruptible(lambda: (_ for _ in ()).throw(CompileError("no")), lambda: None, LIMIT)

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(LIMIT)

    with pytest.raises(KeyboardInterrupt):
        interruptible(interrupted, lambda: cancelled.append(ended.set() is None), LIMIT)
    assert cancelled == [True]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_nvrtc_has_a_limit(where: str, nvrtc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front end waits for ever for the other end of a FIFO, and does not ask whether to end."""
    monkeypatch.setattr(nvrtc_module, "_COMPILE_LIMIT", 0.2)
    monkeypatch.setattr(nvrtc_module, "_at_work", ForkWaits(longest=0.2))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    source = f'#define HEADER "{fifo}"\n#include HEADER\n'

    def compiled() -> None:
        with pytest.raises(CompileError, match=r"did not finish k within 0\.2 s.*compile with NVCC"):
            nvrtc.compile("k", source, "k.cu", nvrtc.flags("sm_90a"), None)

    threads = _thread._count()
    try:
        if where == "main":
            compiled()
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(compiled).result(LIMIT)
        before = time.monotonic()
        nvrtc_module._at_work._wait()  # as a fork does
        assert time.monotonic() - before < LIMIT
    finally:
        with open(fifo, "w"):
            wait_for(lambda: _thread._count() <= threads)


def test_without_another_thread_it_works_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    assert interruptible(threading.current_thread, lambda: None, LIMIT) is threading.main_thread()


def test_interrupts_leave_no_thread_behind() -> None:
    """An exception inside `Thread.start` or `Future.wait` left a lock taken, for which the thread waited for ever."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    threads, interrupts = _thread._count(), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + (turn % 97) * 3e-6)
                for _ in range(20):
                    assert interruptible(lambda: 3, lambda: None, LIMIT) == 3
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 1000
    wait_for(lambda: _thread._count() <= threads)
