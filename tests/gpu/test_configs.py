"""Every legal config against the oracle, also those that the selector would not choose."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chosen import FAMILIES, kernel_name, make_params
from forced import compiled, force, load, nvrtc
from gpu_cases import DEVICE

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.ops.reference import exact_product
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import align
from deep_gemm.testing import Operand, assert_close_to_exact, guarded, integer_operands, random_operands

ALL_SMS = SM90.num_sms
# Few SMs, so that every CTA computes many tiles. A multiple of the largest cluster.
FEW_SMS = 8

# M, N, K, SMs. N is a multiple of 8, for CTAs with one tile.
SHAPES = [
    (100, 2112, 1024, ALL_SMS),
    (333, 592, 1552, ALL_SMS),
    (7, 1000, 896, ALL_SMS),
    (1024, 1536, 512, ALL_SMS),
    (1024, 1536, 512, FEW_SMS),
    (300, 776, 656, FEW_SMS),
    (33, 80, 16, ALL_SMS),  # an eighth of a block of K
    (65, 144, 128, ALL_SMS),  # one block of K, fewer than parts of split K
    (200, 400, 256, ALL_SMS),  # two
    (130, 264, 384, ALL_SMS),  # three
    (300, 776, 4240, FEW_SMS),  # 34 blocks: scales of B are fetched 32 at a time, and so are the next tile's
]
# Odd widths, for stores element by element.
DIRECT_SHAPES = [(100, 333, 400, ALL_SMS), (513, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)]

# With these shapes swapped tiles cross the edge along M, N and K.
SWAPPED_SHAPES = [
    (300, 776, 656, FEW_SMS),  # many tiles per CTA, and a partial block of K
    (8, 1003, 896, ALL_SMS),  # N is not a multiple of eight columns; rows of D are padded
    (65, 256, 128, ALL_SMS),  # one block of K, fewer than parts of split K
    (300, 776, 4240, FEW_SMS),  # 34 blocks: scales of B are fetched 32 at a time, and so are the next tile's
]
SWAPPED_DIRECT_SHAPES = [(269, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)]
# For configs outside the serving set: surveys use them, and they may be added to the serving set.
OTHER_SHAPES = [(333, 592, 1552, ALL_SMS), (300, 776, 4240, FEW_SMS)]

Shape = tuple[int, int, int, int]


SERVING = [config for kernel in FAMILIES for config in kernel.configs(SM90)]
LEGAL = [config for kernel in FAMILIES for config in kernel.legal(SM90)]
USUAL, DIRECT = ([make_params(config, store) for config in LEGAL] for store in ("tma", "direct"))


def shapes_of(params: KernelParams) -> list[Shape]:
    """The shapes that a config must compute: a thousand checks in all."""
    direct = params.store == "direct"
    if params.gemm.in_turn > 1:  # each part has two blocks or more
        return [(100, 333, 1040, ALL_SMS)] if direct else [*OTHER_SHAPES, (100, 2112, 1024, ALL_SMS)]
    if params.config not in SERVING:
        return DIRECT_SHAPES[:1] if direct else OTHER_SHAPES
    if params.gemm.swap_ab:
        return SWAPPED_DIRECT_SHAPES if direct else SWAPPED_SHAPES
    return DIRECT_SHAPES if direct else SHAPES


def launched_early() -> list[KernelParams]:
    """One config for each way to split K, width of tile, residency, and way to store."""
    chosen: dict[tuple[object, ...], KernelParams] = {}
    for params in USUAL + DIRECT:
        c = params.gemm
        split = (c.cluster_m, c.cluster_n, c.cluster_k, c.consumers_k, c.ctas_per_sm)
        chosen.setdefault((params.kernel, params.store, c.block_n, *split, c.persistent), params)
    return list(chosen.values())


Loaded = Callable[[KernelParams], Function]


def shape_id(shape: Shape) -> str:
    return "x".join(map(str, shape[:3])) + (f"-on{shape[3]}" if shape[3] != ALL_SMS else "")


@pytest.fixture(scope="module")
def loaded(kernels_root: Path) -> Iterator[Loaded]:
    """Functions by their params. All are compiled at once, and each is loaded at its first use."""
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in USUAL + DIRECT) as binaries:
        yield functools.cache(lambda params: load(params, binaries[params].result()))


@functools.cache
def real_data(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    a, b, _, _ = random_operands(m, n, k, DEVICE, seed=m + n + k)
    return a, b


@functools.cache
def integers(m: int, n: int, k: int) -> tuple[Operand, Operand, torch.Tensor]:
    a, b = integer_operands(m, n, k, DEVICE, seed=m + n + k)
    return a, b, exact_product(*a, *b).bfloat16()


def check(params: KernelParams, function: Function, shape: Shape) -> None:
    m, n, k, num_sms = shape
    stream = engine.raw_stream(torch.cuda.current_device())
    a, b = real_data(m, n, k)
    strides = (align(n, 8), 1) if params.store == "tma" else None
    d = guarded((m, n), torch.bfloat16, DEVICE, strides)  # all of it NaN
    force(params, function, a, b, d.tensor, num_sms, stream)()
    assert_close_to_exact(d.tensor, *a, *b)
    d.check("d")
    a, b, expected = integers(m, n, k)
    d.tensor.fill_(float("nan"))
    force(params, function, a, b, d.tensor, num_sms, stream)()
    assert torch.equal(d.tensor, expected)


WORK = [(params, shape) for params in USUAL + DIRECT for shape in shapes_of(params)]


@pytest.mark.parametrize(
    ("params", "shape"), WORK, ids=[f"{kernel_name(params)}-{shape_id(shape)}" for params, shape in WORK]
)
def test_every_config(loaded: Loaded, params: KernelParams, shape: Shape) -> None:
    check(params, loaded(params), shape)


RAGGED = (333, 592, 1552)
"""M, N and K that are not multiples of any tile."""


def hundred_runs(params: KernelParams, function: Function, pdl: bool = False, constant_b: bool = False) -> torch.Tensor:
    """The output of a hundred runs on `RAGGED`, after a check that all have the same bits. Persistent configs also run
    on few SMs, where each CTA has many tiles."""
    (m, n, _), (a, b) = RAGGED, real_data(*RAGGED)
    stream = engine.raw_stream(torch.cuda.current_device())
    found = []
    for num_sms in (ALL_SMS, FEW_SMS) if params.gemm.persistent else (ALL_SMS,):
        outputs = torch.full((100, m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        # Launches are prepared first and then follow each other without a gap, so that one can disturb the next.
        for run in [force(params, function, a, b, d, num_sms, stream, pdl, constant_b) for d in outputs]:
            run()
        assert_close_to_exact(outputs[0], *a, *b)
        assert torch.equal(outputs, outputs[:1].expand_as(outputs))
        found.append(outputs[0])
    assert torch.equal(found[0], found[-1])
    return found[0]


@pytest.mark.parametrize("params", USUAL, ids=kernel_name)
def test_a_hundred_runs_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    hundred_runs(params, loaded(params))


@pytest.mark.parametrize("params", launched_early(), ids=kernel_name)
def test_a_hundred_programmatic_launches_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    """Each kernel begins and reads B while the previous one still runs. The bits are those of ordinary launches."""
    early = hundred_runs(params, loaded(params), pdl=True, constant_b=True)
    a, b = real_data(*RAGGED)
    alone = torch.full_like(early, float("nan"))
    force(params, loaded(params), a, b, alone, ALL_SMS, engine.raw_stream(torch.cuda.current_device()))()
    assert torch.equal(early, alone)


@pytest.mark.parametrize("params", USUAL, ids=kernel_name)
def test_as_many_ctas_live_on_an_sm_as_the_model_counts_on(loaded: Loaded, params: KernelParams) -> None:
    config = params.gemm
    family = kernels.gemm_family(params.kernel)
    blocks = loaded(params).max_active_blocks(family.template.num_threads(config), family.shared_bytes(params))
    assert blocks >= config.ctas_per_sm
