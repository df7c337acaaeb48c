"""The mutations of tests/gpu apply to the current device code, and compile."""

from __future__ import annotations

from pathlib import Path

import grouped_mutations
import pytest
import scaled_mutations
from headers import edited_headers
from kernel_builds import open_compiler
from mutations import MUTATIONS, Mutation, mutated_kernels

from deep_gemm import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import Compiler
from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels import k_group_maps

KERNELS = mutated_kernels()


def one_in_turn(mutation: Mutation) -> str:
    """One of the kernels that the mutation breaks. tests/gpu/test_mutations.py compiles and runs all of them."""
    return mutation.kernels[MUTATIONS.index(mutation) % len(mutation.kernels)]


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    return open_compiler("nvrtc")


@pytest.fixture(scope="module")
def sound(nvrtc: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("sound"), nvrtc)


def test_names_are_distinct() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_an_edit_that_fits_nowhere_or_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="0 times"):
        edited_headers(tmp_path / "none", "fp8_gemm.cuh", ("no such line", ""))
    with pytest.raises(LookupError, match=r"\d+ times"):
        edited_headers(tmp_path / "many", "fp8_gemm.cuh", ("u32", ""))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_applies_once_compiles_and_changes_the_code(
    mutation: Mutation, nvrtc: Compiler, sound: Builder, tmp_path: Path
) -> None:
    headers = mutation.headers(tmp_path / "include")
    changed = [p.name for p in include_dir().glob("*.cuh") if p.read_bytes() != (headers / p.name).read_bytes()]
    assert changed == [mutation.file]
    broken = Builder(tmp_path / "broken", nvrtc, headers)
    request = engine.build_request(KERNELS[one_in_turn(mutation)])
    mutant, original = broken.build(request), sound.build(request)
    assert mutant.key != original.key
    assert mutant.cubin != original.cubin
    # The mutant must still launch: spills would do no harm, but more registers would.
    assert mutant.resources.registers <= original.resources.registers


@pytest.mark.parametrize("mutation", scaled_mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_so_does_each_of_the_kernel_with_any_scaling(
    mutation: Mutation, nvrtc: Compiler, sound: Builder, tmp_path: Path
) -> None:
    request = engine.build_request(scaled_mutations.KERNELS[mutation.kernels[0]])
    broken = Builder(tmp_path / "broken", nvrtc, mutation.headers(tmp_path / "include"))
    assert broken.build(request).cubin != sound.build(request).cubin


@pytest.mark.parametrize("mutation", grouped_mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_so_does_each_of_grouped_kernels(mutation: Mutation, nvrtc: Compiler, sound: Builder, tmp_path: Path) -> None:
    params = grouped_mutations.KERNELS[mutation.kernels[0]].params
    if mutation.file == "k_group_maps.cuh":
        params = k_group_maps.KERNEL.cases()[0]
    request = engine.build_request(params)
    broken = Builder(tmp_path / "broken", nvrtc, mutation.headers(tmp_path / "include"))
    assert broken.build(request).cubin != sound.build(request).cubin
