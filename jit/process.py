"""NVIDIA's tools as child processes: in a private directory, with a time limit, and without a path that a shell reads.

nvcc hands its command lines to a shell, with each path between double quotes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from deep_gemm.jit.cache.files import sweep
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
    """A new directory with a plain path, since tools also pass the path of their working directory to a shell.
    Directories that killed processes left are removed after an hour. Raises OSError."""
    usual = tempfile.gettempdir()
    places = [Path(os.path.realpath(place)) for place in (usual, "/tmp", "/var/tmp")]
    place = next((place for place in places if is_plain(str(place)) and place.is_dir()), None)
    if place is None:
        raise NotADirectoryError(f"{usual!r} has characters that mean something to a shell, and there is no /tmp")
    if place not in _swept:
        _swept.add(place)
        sweep(place, prefix=_PREFIX)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Child:
    """A command that is started at most once, and by a thread of its own: Python's signal handlers run in the main
    thread, where one could raise after the fork and before the process is known to anyone who could kill it."""

    def __init__(self, command: list[str], folder: Path | None, environment: dict[str, str]) -> None:
        self._command, self._folder, self._environment = command, folder, environment
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
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
            except Exception as error:
                self._error = error

    def end(self) -> None:
        """Kills whatever was started, waits for the command, and closes its pipes. Nothing starts afterwards."""
        with self._lock:
            self._ended = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with self._process:
                pass


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
        output, errors = process.communicate(timeout=limit)
    except BaseException:
        child.end()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
