"""A test of the tests: each layer of the oracle finds kernels that are broken on purpose."""

from collections.abc import Callable, Iterator
from typing import Any

import b16_mutations
import batched_cases
import batched_mutations
import epilogue_mutations
import epilogue_runs
import fp4_mutations
import fp4_runs
import gated_mutations
import gated_runs
import grouped_mutations
import grouped_runs
import head_cases
import mutations
import pytest
import rows_mutations
import scaled_mutations
import torch
from forced import DTYPES, assert_right, compiled, force, force_gemm, load, nvrtc, operands
from gpu_cases import DEVICE, nan_output
from mutation import Mutation, mutants

from deep_gemm.jit import Binary, Builder
from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.ops.reference import exact_product
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import align
from deep_gemm.testing import calc_diff, integer_operands

# Several tiles of every kernel in both directions, a number of rows that no tile divides, and so few SMs that CTAs
# compute several tiles.
M, N, NUM_SMS = 200, 520, 4


def holds(check: Callable[[], object]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


def plain(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    """Eight blocks of K with a partial last one, or another K."""
    stream, k, function = engine.raw_stream(torch.cuda.current_device()), k or 1008, load(params, binary)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(rows, k, device=DEVICE, generator=generator) for rows in (M, N))
    # Rows and blocks with different scales differ by more than a factor of ten, so that a wrong scale shows.
    factors_a, factors_b = (
        torch.rand(rows, -(-k // 128), device=DEVICE, generator=generator) * 4 + 0.25 for rows in (M, -(-N // 128))
    )
    x *= factors_a.repeat_interleave(128, 1)[:, :k]
    y *= factors_b.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :k]
    a, b = per_token_cast_to_fp8(x, use_ue8m0=False), per_block_cast_to_fp8(y, use_ue8m0=False)
    d, integers = nan_output(M, N), nan_output(M, N)
    force(params, function, a, b, d, NUM_SMS, stream)()
    tensors = {"a": a[0], "sfa": a[1], "b": b[0], "sfb": b[1], "d": d}
    found = {
        "bound": holds(lambda: assert_right(params, tensors)),
        "difference": bool(calc_diff(d, x.double() @ y.double().t()) < 1e-3),
    }
    a, b = integer_operands(M, N, k, DEVICE)
    force(params, function, a, b, integers, NUM_SMS, stream)()
    return found | {"integers": torch.equal(integers, exact_product(*a, *b).bfloat16())}


def scaled(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    """More blocks of K than two rounds of any ring, with a partial last block; rows and columns with very different
    magnitudes, so that a wrong scale shows."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (
        torch.randn(rows, 128 * 33 + 64, device=DEVICE, generator=generator)
        * 4.0 ** torch.randint(-3, 4, (rows, 1), device=DEVICE, generator=generator)
        for rows in (M, N)
    )
    return within_bound(params, binary, x, y)


def half(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    """Eight blocks of K with a partial last one."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return within_bound(
        params, binary, *(torch.randn(rows, 504, device=DEVICE, generator=generator) for rows in (M, N))
    )


def within_bound(params: KernelParams, binary: Binary, x: torch.Tensor, y: torch.Tensor) -> dict[str, bool]:
    out = DTYPES[params.output]
    c = torch.randn(M, N, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(out)
    d = torch.full((M, align(N, 8)), float("nan"), device=DEVICE, dtype=out)[:, :N]
    if params.adds_c == "tma":
        d.copy_(c)
    tensors = {**operands(params, x, y), "d": d} | ({"c": c} if params.adds_c == "threads" else {})
    function = load(params, binary)
    force_gemm(params, function, tensors, NUM_SMS, engine.raw_stream(torch.cuda.current_device()))()
    torch.cuda.synchronize()
    return {"bound": holds(lambda: assert_right(params, tensors, c))}


def grouped(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    return {"result": grouped_runs.is_right(params, builder)}


def batched(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    run = head_cases if params.grouping == "heads" else batched_cases
    return {"result": run.is_right(params, builder)}


def gated(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    return {"result": gated_runs.is_right(params, builder)}


def rows(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    (run,) = (run for run in rows_mutations.RUNS.values() if run.params == params)
    return {"result": run.is_right(load(params, binary))}


def fp4(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    return {"result": fp4_runs.BY_PARAMS[params].is_right(load(params, binary))}


def finished(params: KernelParams, builder: Builder, binary: Binary, k: int) -> dict[str, bool]:
    if params.grouping != "none":
        return {"result": grouped_runs.is_right(params, builder)}
    return {"result": epilogue_runs.is_right(params, load(params, binary))}


ORACLES: dict[Any, Callable[[KernelParams, Builder, Binary, int], dict[str, bool]]] = {
    mutations: plain, scaled_mutations: scaled, b16_mutations: half, grouped_mutations: grouped,
    batched_mutations: batched, gated_mutations: gated, rows_mutations: rows, epilogue_mutations: finished,
    fp4_mutations: fp4,
}  # fmt: skip
"""The layers of the oracle that say whether a kernel is right, by the mutations and their kernels."""

SOUND = [(module, kernel) for module in ORACLES for kernel in module.KERNELS]
BROKEN = [(module, mutation, kernel) for module in ORACLES for mutation, kernel in mutants(module)]
Verdicts = Callable[[Any, Mutation | None, str, int], dict[str, bool]]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    """What the oracle says of a kernel with a mutation, or of the sound one, at this K or the usual one."""
    root, compiler = tmp_path_factory.mktemp("mutants"), nvrtc()
    builders = {(module, ""): Builder(root / module.__name__, compiler) for module in ORACLES}
    for module in ORACLES:
        for index, each in enumerate(module.MUTATIONS):
            place = root / f"{module.__name__}{index}"
            builders[module, each.name] = Builder(place / "cache", compiler, each.headers(place / "include"))
    wanted = [(module, "", kernel) for module, kernel in SOUND]
    wanted += [(module, mutation.name, kernel) for module, mutation, kernel in BROKEN]
    with compiled((key, builders[key[:2]], key[0].KERNELS[key[2]]) for key in wanted) as binaries:

        def found(module: Any, mutation: Mutation | None, kernel: str, k: int) -> dict[str, bool]:
            name = mutation.name if mutation else ""
            binary = binaries[module, name, kernel].result()
            return ORACLES[module](module.KERNELS[kernel], builders[module, name], binary, k)

        yield found


def ids(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "name", "") or value.__name__


@pytest.mark.parametrize(("module", "kernel"), SOUND, ids=ids)
def test_sound_kernels_pass(verdicts: Verdicts, module: Any, kernel: str) -> None:
    ks = {0} | {mutation.k for mutation, broken in mutants(module) if broken == kernel}
    for k in ks:
        assert all(verdicts(module, None, kernel, k).values()), k


@pytest.mark.parametrize(("module", "mutation", "kernel"), BROKEN, ids=ids)
def test_broken_kernels_do_not(verdicts: Verdicts, module: Any, mutation: Mutation, kernel: str) -> None:
    assert not any(verdicts(module, mutation, kernel, mutation.k).values())
