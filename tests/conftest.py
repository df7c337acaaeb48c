"""Shared by all tests: markers by directory, a private kernel cache, the record of a GPU run."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from gpu_record import GpuRecord

TESTS = Path(__file__).parent
SCRATCH = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
MESSAGES = pytest.StashKey[TextIO]()
LIMIT = 120.0  # seconds


def why_no_gpu() -> str | None:
    """Why the GPU tests cannot run here, or None if they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    from deep_gemm import arch
    from deep_gemm.errors import UnsupportedError

    try:
        arch.for_device(0)
    except UnsupportedError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests of interrupts would hang.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests must not depend on the settings of the caller's shell, nor touch the caller's kernels.
    for variable in [name for name in os.environ if name.startswith("DG_")]:
        del os.environ[variable]
    # Threads of torch wait by spinning, so that several processes with several threads each take four times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if why_no_gpu() is not None:  # whoever imports Triton first decides for the process
        os.environ["TRITON_INTERPRET"] = "1"
    scratch = tempfile.TemporaryDirectory(prefix="deep_gemm_tests_", ignore_cleanup_errors=True)
    os.environ["DG_JIT_CACHE_DIR"] = str(Path(scratch.name, "cache"))
    config.stash[SCRATCH] = scratch
    config.stash[MESSAGES] = os.fdopen(os.dup(2), "w")  # stderr, which is captured during a test
    config.pluginmanager.register(GpuRecord(TESTS / "gpu"))
    if hasattr(config.option, "loadscopereorder"):
        # Side by side, files begin in the order of collection, not those with most tests first.
        config.option.loadscopereorder = False
        # A process that a test has ended is not replaced: the new one would begin with the same test.
        config.option.maxworkerrestart = "0"


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[SCRATCH].cleanup()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process if a test hangs, whatever it waits for, and show what all threads do. Side by side, pytest-xdist
    names the test and ends the run."""
    limit = item.get_closest_marker("limit")
    seconds = limit.args[0] if limit is not None else LIMIT
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[MESSAGES])
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_report_header() -> str:
    import deep_gemm

    reason = why_no_gpu()
    origin = Path(deep_gemm.__file__ or "").parent
    return f"deep_gemm: {origin}; gpu tests: {'run' if reason is None else f'skipped, {reason}'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # side by side: long files first, so that no process ends long after the others
        items.sort(key=lambda item: item.path.parent.name != "compile")
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in ("gpu", "compile"):
            item.add_marker(kind)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    for item in on_gpu if reason is not None else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of this test's own."""
    directory = tmp_path / "kernels"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(directory))
    return directory
