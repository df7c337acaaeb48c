"""Fixtures that several unit tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_fakes import driver, function
from gpu_fakes import gpu

from deep_gemm.log import reset_warnings

__all__ = ["driver", "function", "gpu"]


@pytest.fixture(autouse=True)
def _warnings_are_new() -> Iterator[None]:
    reset_warnings()
    yield
    reset_warnings()


@pytest.fixture(autouse=True)
def _the_path_stays() -> Iterator[None]:
    """A test that leaves another `sys.path` fails here, not in whatever its process runs next."""
    before = list(sys.path)
    yield
    after, sys.path[:] = list(sys.path), before
    assert after == before


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile has seen nothing yet, and its counters are empty. Use it with `pytest.mark.usefixtures`."""
    import torch
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The cache directory of a test; it need not exist yet."""
    return tmp_path / "root"
