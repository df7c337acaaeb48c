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


def run(command: list[str], limit: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command's output and status. `folder` is where it runs and keeps temporary files.

    Raises OSError, and subprocess.TimeoutExpired after `limit` seconds. Then, or if a signal handler raises meanwhile,
    every process that the command started is killed.
    """
    environment = child_environment(*_HIDDEN_FLAGS)
    if folder is not None:
        environment["TMPDIR"] = "."
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
