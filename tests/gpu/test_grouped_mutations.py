"""A test of the tests: grouped kernels that are broken on purpose give wrong results, or write where they must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from forced import nvrtc
from grouped_mutations import KERNELS, MUTATIONS, Mutation, mutants
from grouped_runs import is_right

from deep_gemm.jit import Builder


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mutation | None], Builder]:
    """A builder for each mutation, and one for sound kernels."""
    root, compiler = tmp_path_factory.mktemp("mutants"), nvrtc()
    found = {
        m.name: Builder(root / f"mutant{i}", compiler, m.headers(root / f"headers{i}")) for i, m in enumerate(MUTATIONS)
    }
    sound = Builder(root / "sound", compiler)
    return lambda mutation: found[mutation.name] if mutation else sound


@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_pass(builders: Callable[[Mutation | None], Builder], kernel: str) -> None:
    assert is_right(KERNELS[kernel], builders(None))


@pytest.mark.parametrize(("mutation", "kernel"), mutants(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_broken_ones_are_found(builders: Callable[[Mutation | None], Builder], mutation: Mutation, kernel: str) -> None:
    assert not is_right(KERNELS[kernel], builders(mutation))
