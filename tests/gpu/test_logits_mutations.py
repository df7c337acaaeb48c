"""A test of the tests: kernels of logits and of the prenorm product that are broken on purpose give wrong results."""

from collections.abc import Callable, Iterator

import pytest
from forced import compiled, load, nvrtc
from logit_runs import Run
from logits_mutations import KERNELS, MUTATIONS, SPECS, Mutation, mutants

from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mutation | None, str], Function]]:
    """Functions by mutation (None for sound ones) and kernel."""
    root, compiler = tmp_path_factory.mktemp("mutants"), nvrtc()
    builders = {
        m.name: Builder(root / f"mutant{i}", compiler, m.headers(root / f"headers{i}")) for i, m in enumerate(MUTATIONS)
    }
    sound = Builder(root / "sound", compiler)
    jobs = [((m.name, kernel), builders[m.name], KERNELS[kernel]) for m, kernel in mutants()]
    jobs += [(("", kernel), sound, params) for kernel, params in KERNELS.items()]
    with compiled(jobs) as binaries:
        yield lambda mutation, kernel: load(
            KERNELS[kernel], binaries[mutation.name if mutation else "", kernel].result()
        )


def is_right(name: str, function: Function) -> bool:
    """Whether a kernel's result is within its bound."""
    return Run(KERNELS[name], SPECS[name], function).is_right()


@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_pass(loaded: Callable[[Mutation | None, str], Function], kernel: str) -> None:
    assert is_right(kernel, loaded(None, kernel))


@pytest.mark.parametrize(("mutation", "kernel"), mutants(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_broken_ones_are_found(
    loaded: Callable[[Mutation | None, str], Function], mutation: Mutation, kernel: str
) -> None:
    assert not is_right(kernel, loaded(mutation, kernel))
