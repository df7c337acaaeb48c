"""NVIDIA's tools as child processes: in a private directory, with a time limit, and without a path that a shell reads.

nvcc hands its command lines to a shell, with each path between double quotes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deep_gemm.jit.cache.files import sweep
from deep_gemm.jit.forking import forget
from deep_gemm.settings import child_environment

# Both add options to nvcc's command line that the key does not cover.
_HIDDEN_FLAGS = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
_PREFIX = "deep_gemm-tool-"
_swept: set[Path] = set()


def is_plain(path: str) -> bool:
    """Whether a path means only itself to a shell, and to nvcc, which has rules of its own for quotation marks."""
    return shlex.quote(path) == path


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory with a plain path, since tools also pass the path of their working directory to a shell. If this
    process ends meanwhile, however it does, so do the tools that work there, and the directory goes. Raises OSError."""
    usual = tempfile.gettempdir()
    places = [Path(os.path.realpath(place)) for place in (usual, "/tmp", "/var/tmp")]
    place = next((place for place in places if is_plain(str(place)) and place.is_dir()), None)
    if place is None:
        raise NotADirectoryError(f"{usual!r} has characters that mean something to a shell, and there is no /tmp")
    if place not in _swept:  # where this process and its guard were killed at once, a directory stays
        _swept.add(place)
        sweep(place, prefix=_PREFIX)
    folder = place / f"{_PREFIX}{os.urandom(8).hex()}"
    guard = _Child(["/bin/sh", "-c", _GUARD, "sh", str(folder)], Path("/"), {"PATH": "/usr/bin:/bin"}, guards=True)
    try:
        with contextlib.suppress(OSError):  # a machine without a shell has no nvcc either
            guard.start()
        folder.mkdir(0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.end()  # if an interrupt comes before, its input is closed with it


_GUARD = """trap '' HUP INT TERM
read -r line
found=1
while [ "$found" ]; do
  found=
  for process in /proc/[0-9]*; do
    [ "$process/cwd" -ef "$1" ] && kill -9 "${process#/proc/}" && found=1
  done
done
rm -rf "$1"
"""
"""A shell that waits until its standard input is closed, as the system does when a process ends. Then it kills those
whose working directory is the one named, and deletes that."""


class _Child:
    """A command that is started at most once, and by a thread of its own: Python's signal handlers run in the main
    thread, where one could raise after the fork and before the process is known to anyone who could kill it."""

    def __init__(
        self, command: list[str], folder: Path | None, environment: dict[str, str], guards: bool = False
    ) -> None:
        """One that `guards` has this process at the other end of its standard input, and no output."""
        self._command, self._folder, self._environment, self._guards = command, folder, environment, guards
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[str] | None = None
        self._error: Exception | None = None

    def start(self) -> subprocess.Popen[str]:
        """Raises OSError."""
        thread = threading.Thread(target=self._start, daemon=True)
        thread.start()
        thread.join()
        if self._process is None:
            raise self._error or OSError(f"{self._command[0]} was not started")
        return self._process

    def _start(self) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                output = subprocess.DEVNULL if self._guards else subprocess.PIPE
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE if self._guards else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    encoding="utf-8",
                    errors="replace",
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
            except Exception as error:
                self._error = error
            if self._process is not None and self._process.stdin is not None:
                _inputs.add(self._process.stdin)

    def output(self, process: subprocess.Popen[str], limit: float) -> tuple[str, str]:
        """What it wrote until it ended; processes of its own that still hold its output open are killed. Raises
        subprocess.TimeoutExpired after `limit` seconds."""
        end = time.monotonic() + limit
        while not _ended(process.pid):
            left = end - time.monotonic()
            try:
                return process.communicate(timeout=max(0.0, min(_POLL, left)))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise subprocess.TimeoutExpired(self._command, limit) from None
        try:
            return process.communicate(timeout=_POLL)
        except subprocess.TimeoutExpired:
            self._kill()
        try:
            return process.communicate(timeout=_POLL)
        except subprocess.TimeoutExpired as error:  # one of another session holds it open
            with process:
                return _text(error.output), _text(error.stderr)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills whatever was started, waits for the command, and closes its pipes. Nothing starts afterwards."""
        with self._lock:
            self._ended = True
        if self._process is None:
            return
        self._kill()
        with self._process:
            pass


_POLL = 0.05  # seconds
_inputs: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""This process's ends of guards' standard input."""

os.register_at_fork(after_in_child=lambda: forget(file.fileno() for file in _inputs if not file.closed))


def _ended(pid: int) -> bool:
    """Whether this child has ended. It stays a zombie, so that its number is nobody else's."""
    with contextlib.suppress(ChildProcessError):  # of a process that ignores SIGCHLD
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def _text(output: bytes | str | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""


def run(command: list[str], limit: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command's output and status. `folder` is where it runs and keeps temporary files.

    Raises OSError, and subprocess.TimeoutExpired after `limit` seconds. Then, or if a signal handler raises meanwhile,
    every process that the command started is killed.
    """
    environment = child_environment(*_HIDDEN_FLAGS)
    if folder is not None:
        environment["TMPDIR"] = "."
    child = _Child(command, folder, environment)
    try:
        process = child.start()
        output, errors = child.output(process, limit)
    except BaseException:
        child.end()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
