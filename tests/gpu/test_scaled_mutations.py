"""A test of the tests: FP8 kernels with any scaling that are broken on purpose give results outside the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from forced import compiled, force_scaled, load, nvrtc, scaled_operands, scaling_of
from gpu_cases import DEVICE
from scaled_mutations import KERNELS, MUTATIONS, Mutation, mutants

from deep_gemm import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.params import ScaledParams
from deep_gemm.spec import align
from deep_gemm.testing import assert_close_to_exact

# Several tiles in both directions; more blocks of K than two rounds of any ring, with a partial last block; and so few
# SMs that CTAs compute several tiles.
M, N, K, NUM_SMS = 200, 520, 128 * 33 + 64, 4
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


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


def is_right(params: ScaledParams, function: Function) -> bool:
    """Whether a kernel's result is within the bound."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    # Rows and columns with very different magnitudes, so that a wrong scale shows.
    x, y = (
        torch.randn(rows, K, device=DEVICE, generator=generator)
        * 4.0 ** torch.randint(-3, 4, (rows, 1), device=DEVICE, generator=generator)
        for rows in (M, N)
    )
    tensors = scaled_operands(params, x, y)
    out = DTYPES[params.output]
    c = torch.randn(M, N, device=DEVICE, generator=generator).to(out)
    width = align(N, 8)
    d = torch.full((M, width), float("nan"), device=DEVICE, dtype=out)[:, :N]
    if params.accumulate == "reduces":
        d.copy_(c)
    given = {**tensors, "d": d} | ({"c": c} if params.accumulate == "reads" else {})
    force_scaled(params, function, given, NUM_SMS, engine.raw_stream(torch.cuda.current_device()))()
    torch.cuda.synchronize()
    try:
        operands = tensors["a"], tensors["sfa"], tensors["b"], tensors["sfb"]
        assert_close_to_exact(d, *operands, c=None if params.accumulate == "none" else c, scaling=scaling_of(params))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_pass(loaded: Callable[[Mutation | None, str], Function], kernel: str) -> None:
    assert is_right(KERNELS[kernel], loaded(None, kernel))


@pytest.mark.parametrize(("mutation", "kernel"), mutants(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_broken_ones_are_found(
    loaded: Callable[[Mutation | None, str], Function], mutation: Mutation, kernel: str
) -> None:
    assert not is_right(KERNELS[kernel], loaded(mutation, kernel))
