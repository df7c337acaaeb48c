"""Real processes that build kernels, and are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.log import reset_warnings

WORKER = Path(__file__).parent / "jit_worker.py"
Start = Callable[..., "subprocess.Popen[str]"]
_messages: dict[int, Path] = {}
"""What workers write to stderr, by process id."""


@pytest.fixture
def reachable_path() -> Iterator[Path]:
    """A directory whose files other users reach. Each process of pytest that begins closes those of all others to them,
    so that `tmp_path` is none."""
    with tempfile.TemporaryDirectory(prefix="deep_gemm_tests_", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o711)
        yield Path(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers on tmp_path/root, which write their compilations to tmp_path/journal.

    `prefix` is a command that runs the worker, `env` its environment; the rest is the worker's job.
    """
    reset_warnings()
    running = []

    def begin(prefix: Sequence[str] = (), env: dict[str, str] | None = None, **job: Any) -> subprocess.Popen[str]:
        job = {"root": str(tmp_path / "root"), "journal": str(tmp_path / "journal"), **job}
        command = [*prefix, sys.executable, str(WORKER), json.dumps(job)]
        # Its messages go to a file, which cannot fill up as a pipe can.
        messages = tmp_path / f"stderr-{len(running)}"
        with messages.open("w") as errors:
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        running.append(worker)
        _messages[worker.pid] = messages
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n", messages.read_text()
        return worker

    yield begin
    for worker in running:
        worker.kill()
        worker.communicate()


def result(worker: subprocess.Popen[str]) -> dict[str, Any]:
    # Not communicate(), which would miss what readline() has read ahead. A worker that hangs kills itself.
    assert worker.stdout is not None
    output = worker.stdout.read()
    assert worker.wait() == 0, _messages[worker.pid].read_text()
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def said(tmp_path: Path, worker: int = 0) -> list[str]:
    """The log of the worker of that number."""
    return [line for line in (tmp_path / f"stderr-{worker}").read_text().splitlines() if line.startswith("WARNING")]


def kill(worker: subprocess.Popen[str]) -> None:
    """Send SIGKILL and wait until the process is gone."""
    worker.kill()
    worker.wait()


def end_those_in(folder: Path) -> None:
    """End all processes that work in a folder: compilers whose parent was killed run on, on a busy machine for
    minutes."""

    def found() -> list[int]:
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                    pids.append(int(process.name))
        return pids

    def ended() -> bool:
        for pid in (pids := found()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_for(ended)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
