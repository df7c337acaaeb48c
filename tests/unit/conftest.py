"""Fixtures that several unit tests share."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_fakes import driver, function
from gpu_fakes import gpu

from deep_gemm import options
from deep_gemm.log import reset_warnings

__all__ = ["driver", "function", "gpu"]


@pytest.fixture(autouse=True)
def _warnings_are_new() -> Iterator[None]:
    reset_warnings()
    yield
    reset_warnings()


@pytest.fixture(autouse=True)
def _the_process_stays() -> Iterator[None]:
    """A test that leaves another `sys.path`, or other handlers of Ctrl-C, fails here, not in what its process runs
    next. `deep_gemm.tuning` has its process use the times that it finds, which is undone."""
    path, handler = list(sys.path), signal.getsignal(signal.SIGINT)
    yield
    options._options.measured_times = False
    after, sys.path[:] = list(sys.path), path
    found = signal.signal(signal.SIGINT, handler)
    assert (after, found) == (path, handler)


@pytest.fixture
def fresh_compiler() -> Iterator[Any]:
    """The counters of torch.compile, which are empty: it has seen nothing yet. Importing it takes a second, so that no
    test file does."""
    import torch
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The cache directory of a test; it need not exist yet."""
    return tmp_path / "root"
