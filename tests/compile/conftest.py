"""Fixtures that several tests of compilers and processes share."""

from pathlib import Path

import pytest
from processes import start

__all__ = ["start"]


@pytest.fixture(scope="session")
def kernels_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of kernels that all test files share, also those that run in other processes: several look at the same
    kernels, each at something else."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(request.config, "workerinput") else base) / "kernels"
