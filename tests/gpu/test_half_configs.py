"""Every 16-bit kernel that calls can choose, launched directly: the selector chooses few of them in other tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator

import pytest
import torch
from cover import cover
from forced import compiled, force_half, load, nvrtc
from gpu_cases import DEVICE

from deep_gemm import engine, kernels
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels import sm90_half_gemm, sm90_half_swapped, sm90_half_turned
from deep_gemm.ops import half_dense
from deep_gemm.params import GemmConfig, HalfParams
from deep_gemm.spec import align
from deep_gemm.testing import assert_half_close_to_exact, guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

ALL_SMS, FEW_SMS = SM90.num_sms, 8
"""On few SMs every CTA computes many tiles. A multiple of the largest cluster."""

# M, N, K, SMs: tiles that cross the edge along M, N and K; several tiles per CTA; less than a block of K, two blocks,
# and more blocks than stages.
SHAPES = [
    (333, 592, 776, ALL_SMS),
    (1544, 1096, 328, FEW_SMS),
    (1544, 1096, 8, FEW_SMS),
    (1544, 1096, 72, FEW_SMS),
    (600, 1032, 2120, FEW_SMS),
]
ODD_SHAPES = [(333, 593, 776, ALL_SMS), (517, 777, 264, FEW_SMS), (1, 1, 128, ALL_SMS)]
RUNS = 20

CASES: list[HalfParams] = [
    params  # type: ignore[misc]
    for module in (sm90_half_gemm, sm90_half_swapped, sm90_half_turned)
    for params in module.KERNEL.cases()
    if not any(params.shape)
]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
Loaded = Callable[[HalfParams], Function]


def entry(params: HalfParams) -> str:
    return kernels.get(params.kernel).entry(params)


def config_of(params: HalfParams) -> GemmConfig:
    assert isinstance(params.config, GemmConfig)
    return params.config


def features(params: HalfParams) -> frozenset[tuple[Hashable, ...]]:
    """What kernels synchronise by: cluster, consumers, CTAs on an SM, way to store and to add."""
    config = config_of(params)
    shared = (params.kernel, config.cluster_m, config.cluster_n, config.cluster_k)
    kinds = {"parts": (config.num_consumers, config.ctas_per_sm, config.block_m % 64 > 0), "store": params.store}
    kinds |= {"output": (params.output, params.accumulate), "majors": params.majors}
    return frozenset([shared, *((params.kernel, kind, value) for kind, value in kinds.items())])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Functions by their params. All are compiled at once, and each is loaded at its first use."""
    builder = Builder(tmp_path_factory.mktemp("half"), nvrtc())
    with compiled((params, builder, params) for params in CASES) as binaries:
        yield functools.cache(lambda params: load(params, binaries[params].result()))


@functools.cache
def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Random ones for a positive ``seed``, else small integers, whose sums are exact."""
    generator = torch.Generator(DEVICE).manual_seed(abs(seed))
    if seed > 0:
        return torch.randn(rows, columns, device=DEVICE, generator=generator)
    return torch.randint(-3, 4, (rows, columns), device=DEVICE, generator=generator).float()


def operand(params: HalfParams, index: int, rows: int, k: int, seed: int) -> torch.Tensor:
    """An operand (rows, K) as the kernel reads it, with NaN around it and between its rows."""
    x = values(rows, k, seed + (rows if seed > 0 else -rows)).to(DTYPES[params.dtype])
    stored = x if params.majors[index] == "k" else x.t()
    tensor = guarded_copy(stored, (align(stored.shape[1], 8) + 8, 1)).tensor
    return tensor if params.majors[index] == "k" else tensor.t()


def computes(params: HalfParams, m: int, n: int, k: int, num_sms: int) -> bool:
    """Whether the config can be launched for these sizes: parts of split K need a block each."""
    kernel, op = kernels.get(params.kernel), half_dense.BF16 if params.dtype == "bf16" else half_dense.FP16
    return kernel.runs(half_dense.spec(op, m, n, k, num_sms), params.config)


def launches(
    params: HalfParams, function: Function, shape: tuple[int, int, int, int], seed: int, runs: int, early: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The outputs of launches that follow each other without a gap, and A, B and C. Nothing outside D is written."""
    m, n, k, num_sms = shape
    out, strides = DTYPES[params.output], (align(n, 8) + 8, 1) if params.store == "tma" else None
    a, b = operand(params, 0, m, k, seed), operand(params, 1, n, k, 2 * seed)
    c = None if params.accumulate == "none" else guarded_copy(values(m, n, 3 * seed).to(out), strides).tensor
    outputs = [guarded((m, n), out, DEVICE, strides) for _ in range(runs)]
    prepared = []
    for d in outputs:
        if params.accumulate == "reduces" and c is not None:
            d.tensor.copy_(c)
        tensors = {"a": a, "b": b, "d": d.tensor}
        if params.accumulate == "reads" and c is not None:
            tensors["c"] = c
        stream = engine.raw_stream(torch.cuda.current_device())
        prepared.append(force_half(params, function, tensors, num_sms, stream, early, early))
    torch.cuda.synchronize()
    for launch in prepared:
        launch()
    torch.cuda.synchronize()
    for d in outputs:
        d.check(f"d, {m} x {n} x {k}")
    return [d.tensor for d in outputs], a, b, c


@cuda_only
@pytest.mark.parametrize("params", CASES, ids=entry)
def test_every_kernel_is_right_whatever_the_edges(loaded: Loaded, params: HalfParams) -> None:
    """Results are within the bound, and exact where sums are; two launches in a row have the same bits."""
    for shape in SHAPES if params.store == "tma" else ODD_SHAPES:
        if not computes(params, *shape):
            continue
        for seed in (1, -1):
            (first, second), a, b, c = launches(params, loaded(params), shape, seed, runs=2)
            assert_half_close_to_exact(first, a, b, c)
            assert torch.equal(first, second), shape
            if seed < 0:
                exact = a.double() @ b.double().t() + (0 if c is None else c.double())
                assert torch.equal(first, exact.to(first.dtype)), shape


@cuda_only
@pytest.mark.parametrize("params", cover(CASES, features), ids=entry)
def test_many_launches_agree_bit_for_bit(loaded: Loaded, params: HalfParams) -> None:
    """Also as programmatic dependent launches, which begin and read B while the one before still runs."""
    shapes = (*(SHAPES if params.store == "tma" else ODD_SHAPES)[1:], SHAPES[-1])
    shape = next(shape for shape in shapes if computes(params, *shape))
    (alone,), *_ = launches(params, loaded(params), shape, 1, runs=1)
    for early in (False, True):
        outputs, *_ = launches(params, loaded(params), shape, 1, RUNS, early)
        assert all(torch.equal(alone, each) for each in outputs), f"early: {early}"
