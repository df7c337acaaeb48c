"""A test of the tests: 16-bit kernels that are broken on purpose give results outside the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from forced import compiled, force_half, laid_out, load, nvrtc
from gpu_cases import DEVICE, nan_output
from half_mutations import KERNELS, MUTATIONS, Mutation, mutants

from deep_gemm import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.params import HalfParams
from deep_gemm.testing import assert_half_close_to_exact

# Several tiles in both directions, eight blocks of K with a partial last one, and so few SMs that CTAs compute several
# tiles.
M, N, K, NUM_SMS = 200, 520, 504, 4


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


def is_right(params: HalfParams, function: Function) -> bool:
    """Whether a kernel's result is within the bound."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(rows, K, device=DEVICE, generator=generator).bfloat16() for rows in (M, N))
    a, b = (laid_out(t, major) for t, major in zip((x, y), params.majors, strict=True))
    out = torch.float32 if params.output == "f32" else torch.bfloat16
    tensors = {"a": a, "b": b, "d": nan_output(M, N).to(out)}
    if params.accumulate == "reads":
        tensors["c"] = torch.randn(M, N, device=DEVICE, generator=generator).to(out)
    force_half(params, function, tensors, NUM_SMS, engine.raw_stream(torch.cuda.current_device()))()
    torch.cuda.synchronize()
    try:
        assert_half_close_to_exact(tensors["d"], a, b, tensors.get("c"))
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
