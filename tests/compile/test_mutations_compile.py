"""The mutations of tests/gpu apply to the current device code, and compile."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import b16_mutations
import batched_mutations
import epilogue_mutations
import fp4_mutations
import gated_mutations
import grouped_mutations
import logits_mutations
import mutations
import pytest
import rows_mutations
import scaled_mutations
from headers import edited_headers
from kernel_builds import open_compiler, ptx
from mutation import Mutation

from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels.helpers import K_GROUP_MAPS
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long

MODULES: tuple[Any, ...] = (
    mutations, scaled_mutations, grouped_mutations, b16_mutations, logits_mutations, batched_mutations, rows_mutations,
    epilogue_mutations, gated_mutations, fp4_mutations,
)  # fmt: skip
EACH = [(module, mutation) for module in MODULES for mutation in module.MUTATIONS]


def one_in_turn(module: Any, mutation: Mutation) -> KernelParams:
    """One of the kernels that the mutation breaks. tests/gpu compiles all of them as they are used, and runs them."""
    if mutation.file == "k_group_maps.cuh":
        return K_GROUP_MAPS.cases()[0]
    return module.KERNELS[mutation.kernels[module.MUTATIONS.index(mutation) % len(mutation.kernels)]]


def compiled(params: KernelParams, headers: Path) -> str:
    """PTX of a kernel. Called in a process of its own."""
    return ptx(open_compiler("nvrtc"), engine.build_request(params), headers, fast=True)


@pytest.fixture(scope="module")
def child() -> Iterator[Callable[[KernelParams, Path], str]]:
    """`compiled`, in one other process for all tests: it makes NVRTC compile worse from then on."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda params, headers: pool.submit(compiled, params, headers).result()


@pytest.fixture(scope="module")
def sound(child: Callable[[KernelParams, Path], str]) -> Callable[[KernelParams], str]:
    """PTX of a kernel without mutations."""
    return functools.cache(lambda params: child(params, include_dir()))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_are_distinct(module: Any) -> None:
    assert len({mutation.name for mutation in module.MUTATIONS}) == len(module.MUTATIONS)


def test_an_edit_that_fits_nowhere_or_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="0 times"):
        edited_headers(tmp_path / "none", "fp8_gemm.cuh", ("no such line", ""))
    with pytest.raises(LookupError, match=r"\d+ times"):
        edited_headers(tmp_path / "many", "fp8_gemm.cuh", ("u32", ""))


@pytest.mark.parametrize(("module", "mutation"), EACH, ids=lambda it: getattr(it, "name", None) or it.__name__)
def test_it_applies_once_compiles_and_changes_the_code(
    module: Any,
    mutation: Mutation,
    child: Callable[[KernelParams, Path], str],
    sound: Callable[[KernelParams], str],
    tmp_path: Path,
) -> None:
    """Whether a mutant still launches, and is wrong, only a GPU can tell."""
    headers = mutation.headers(tmp_path / "include")
    changed = [p.name for p in include_dir().glob("*.cuh") if p.read_bytes() != (headers / p.name).read_bytes()]
    assert changed == [mutation.file]
    params = one_in_turn(module, mutation)
    assert child(params, headers) != sound(params)
