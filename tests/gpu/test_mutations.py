"""A test of the tests: each layer of the oracle finds kernels that are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forced import compiled, force, load, nvrtc
from gpu_cases import DEVICE, nan_output
from mutations import MUTATIONS, Mutation, mutants, mutated_kernels

from deep_gemm import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.quantisation import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.reference import exact_product
from deep_gemm.testing import assert_close_to_exact, calc_diff, integer_operands

KERNELS = mutated_kernels()
# Several tiles of every kernel in both directions, a number of rows that no tile divides, eight blocks of K with a
# partial last one, and so few SMs that CTAs compute several tiles.
M, N, K = 200, 520, 1008
NUM_SMS = 4

LoadedMutant = Callable[[Mutation | None, str], Function]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedMutant]:
    """Functions by mutation (None for sound ones) and kernel."""
    root, compiler = tmp_path_factory.mktemp("mutants"), nvrtc()

    def builder(name: str, headers: Path | None) -> Builder:
        return Builder(root / name, compiler, headers)

    builders = {m.name: builder(f"mutant{i}", m.headers(root / f"headers{i}")) for i, m in enumerate(MUTATIONS)}
    sound = builder("sound", None)
    jobs = [((m.name, kernel), builders[m.name], KERNELS[kernel]) for m, kernel in mutants()]
    jobs += [(("", kernel), sound, params) for kernel, params in KERNELS.items()]
    with compiled(jobs) as binaries:
        yield lambda mutation, kernel: load(
            KERNELS[kernel], binaries[mutation.name if mutation else "", kernel].result()
        )


def complaints(kernel: str, function: Function, k: int = 0) -> list[str]:
    """The layers of the oracle that find a fault in a kernel, at this K or the usual one."""
    stream = engine.raw_stream(torch.cuda.current_device())
    found = []
    k = k or K
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(rows, k, device=DEVICE, generator=generator) for rows in (M, N))
    # Rows and blocks with different scales differ by more than a factor of ten, so that a wrong scale shows.
    factors_a, factors_b = (
        torch.rand(rows, -(-k // 128), device=DEVICE, generator=generator) * 4 + 0.25 for rows in (M, -(-N // 128))
    )
    x *= factors_a.repeat_interleave(128, 1)[:, :k]
    y *= factors_b.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :k]
    a, b = per_token_cast_to_fp8(x, use_ue8m0=False), per_block_cast_to_fp8(y, use_ue8m0=False)
    d = nan_output(M, N)
    force(KERNELS[kernel], function, a, b, d, NUM_SMS, stream)()
    try:
        assert_close_to_exact(d, *a, *b)
    except AssertionError:
        found.append("bound")
    if not bool(calc_diff(d, x.double() @ y.double().t()) < 1e-3):
        found.append("difference")
    a, b = integer_operands(M, N, k, DEVICE)
    d = nan_output(M, N)
    force(KERNELS[kernel], function, a, b, d, NUM_SMS, stream)()
    if not torch.equal(d, exact_product(*a, *b).bfloat16()):
        found.append("integers")
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_pass(loaded: LoadedMutant, kernel: str) -> None:
    assert complaints(kernel, loaded(None, kernel)) == []


@pytest.mark.parametrize(("mutation", "kernel"), [(m, kernel) for m, kernel in mutants() if m.k])
def test_sound_kernels_pass_at_other_k(loaded: LoadedMutant, mutation: Mutation, kernel: str) -> None:
    assert complaints(kernel, loaded(None, kernel), mutation.k) == []


@pytest.mark.parametrize(
    ("mutation", "kernel"), mutants(), ids=[f"{mutation.name}, {kernel}" for mutation, kernel in mutants()]
)
def test_broken_kernels_do_not(loaded: LoadedMutant, mutation: Mutation, kernel: str) -> None:
    assert complaints(kernel, loaded(mutation, kernel), mutation.k) == ["bound", "difference", "integers"]
