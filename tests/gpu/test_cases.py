"""Every case of the dense families, launched directly: the selector chooses few of them in other tests. Those of
FP8 with scales of blocks and bf16 output are in test_configs.py."""

import functools
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest
import torch
from chosen import FAMILIES, kernel_name
from cover import cover
from forced import DTYPES, assert_right, compiled, fits, force_gemm, load, nvrtc, operands
from gpu_cases import DEVICE

from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.families import GEMMS
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import align
from deep_gemm.testing import guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

ALL_SMS, FEW_SMS = SM90.num_sms, 8
"""On few SMs every CTA computes many tiles. A multiple of the largest cluster."""

# M, N, K, SMs: tiles that cross the edge along M, N and K; several tiles per CTA; one block of K or less, two, and more
# than stages.
SHAPES = {
    "half": [(333, 592, 776, ALL_SMS), (1544, 1096, 328, FEW_SMS), (1544, 1096, 8, FEW_SMS), (1544, 1096, 72, FEW_SMS),
        (600, 1032, 2120, FEW_SMS)],
    "fp8": [(200, 520, 656, FEW_SMS), (130, 264, 128, ALL_SMS), (333, 592, 1552, ALL_SMS), (300, 776, 4240, FEW_SMS),
        (1, 8, 16, ALL_SMS)],
}  # fmt: skip
ODD_SHAPES = {
    "half": [(333, 593, 776, ALL_SMS), (517, 777, 264, FEW_SMS), (1, 1, 128, ALL_SMS)],
    "fp8": [(100, 333, 400, ALL_SMS), (513, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)],
}
RUNS = 20

CASES = [
    params
    for family in GEMMS
    if family.groupings == ("none",) and family not in FAMILIES and SM90.name in family.archs
    for params in family.cases()
    if not any(params.shape) and not params.epilogue
]
"""Those with an epilogue are in test_epilogues_gpu.py, and those of other GPUs in test_mma_gpu.py."""
Loaded = Callable[[KernelParams], Function]
Shape = tuple[int, int, int, int]


def shapes_of(params: KernelParams) -> list[Shape]:
    kind = "fp8" if params.scaling != "none" else "half"
    found = (SHAPES if params.store == "tma" else ODD_SHAPES)[kind]
    return [shape for shape in found if kind == "fp8" or fits(params, *shape)]


def features(params: KernelParams) -> frozenset[tuple[Hashable, ...]]:
    """What kernels synchronise by: cluster, consumers, CTAs on an SM, way to store and to add."""
    config = params.gemm
    shared = (params.kernel, config.cluster_m, config.cluster_n, config.cluster_k)
    kinds = {"parts": (config.num_consumers, config.ctas_per_sm, config.block_m % 64 > 0), "store": params.store}
    kinds |= {"output": (params.output, params.adds_c), "majors": params.majors, "scaling": params.scaling}
    kinds |= {"dtypes": params.dtype}
    return frozenset([shared, *((params.kernel, kind, value) for kind, value in kinds.items())])


@pytest.fixture(scope="module")
def loaded(kernels_root: Path) -> Iterator[Loaded]:
    """Functions by their params. All are compiled at once, and each is loaded at its first use."""
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in CASES) as binaries:
        yield functools.cache(lambda params: load(params, binaries[params].result()))


@functools.cache
def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Random ones for a positive ``seed``, else small integers, whose sums are exact."""
    generator = torch.Generator(DEVICE).manual_seed(abs(seed))
    if seed > 0:
        return torch.randn(rows, columns, device=DEVICE, generator=generator)
    return torch.randint(-3, 4, (rows, columns), device=DEVICE, generator=generator).float()


def surrounded(x: torch.Tensor, major: str) -> torch.Tensor:
    """A copy with NaN around it and between its rows."""
    stored = x if major == "k" else x.t()
    tensor = guarded_copy(stored, (align(stored.shape[1], 16) + 16, 1)).tensor
    return tensor if major == "k" else tensor.t()


def launches(
    params: KernelParams, function: Function, shape: Shape, seed: int, runs: int, early: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """The outputs of launches that follow each other without a gap, the operands, and C. Nothing outside D is
    written."""
    m, n, k, num_sms = shape
    out, strides = DTYPES[params.output], (align(n, 8) + 8, 1) if params.store == "tma" else None
    given = operands(params, *(values(rows, k, seed * (rows + at)) for at, rows in enumerate((m, n))))
    given |= {name: surrounded(given[name], major) for name, major in zip("ab", params.majors, strict=True)}
    c = guarded_copy(values(m, n, 3 * seed).to(out), strides).tensor
    outputs = [guarded((m, n), out, DEVICE, strides) for _ in range(runs)]
    stream, prepared = engine.raw_stream(torch.cuda.current_device()), []
    for d in outputs:
        if params.adds_c == "tma":
            d.tensor.copy_(c)
        tensors = {**given, "d": d.tensor} | ({"c": c} if params.adds_c == "threads" else {})
        prepared.append(force_gemm(params, function, tensors, num_sms, stream, early, early))
    torch.cuda.synchronize()
    for launch in prepared:
        launch()
    torch.cuda.synchronize()
    for d in outputs:
        d.check(f"d, {m} x {n} x {k}")
    return [d.tensor for d in outputs], given, c


@cuda_only
@pytest.mark.parametrize("params", CASES, ids=kernel_name)
def test_every_kernel_is_right_whatever_the_edges(loaded: Loaded, params: KernelParams) -> None:
    """Results are within the bound, and exact where sums of 16-bit operands are; two launches in a row have the same
    bits."""
    for shape in shapes_of(params):
        for seed in (1, -1) if params.scaling == "none" else (1,):
            (first, second), given, c = launches(params, loaded(params), shape, seed, runs=2)
            assert_right(params, {**given, "d": first}, c)
            assert torch.equal(first, second), shape
            if seed < 0:
                exact = given["a"].double() @ given["b"].double().t()
                exact += 0 if params.adds_c == "none" else c.double()
                assert torch.equal(first, exact.to(first.dtype)), shape


@cuda_only
@pytest.mark.parametrize("params", cover(CASES, features), ids=kernel_name)
def test_many_launches_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    """Also as programmatic dependent launches, which begin and read B while the one before still runs."""
    shape = shapes_of(params)[1]
    (alone,), *_ = launches(params, loaded(params), shape, 1, runs=1)
    for early in (False, True):
        outputs, *_ = launches(params, loaded(params), shape, 1, RUNS, early)
        assert all(torch.equal(alone, each) for each in outputs), f"early: {early}"
