"""Every legal config in turn, whatever the selector thinks of it, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from forced import compiled, force, load, nvrtc
from golden_renders import PLAIN, SMALL, SWAPPED, make_params
from gpu_cases import DEVICE

from deep_gemm import engine, kernels
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.sm90_fp8_swapped import scales_held
from deep_gemm.params import FP8Config, GemmConfig, KernelParams, SmallConfig, SwappedConfig, align
from deep_gemm.reference import exact_product
from deep_gemm.testing import Operand, assert_close_to_exact, guarded, integer_operands, random_operands

ALL_SMS = SM90.num_sms
# Few SMs, so that every CTA walks many tiles. A multiple of the largest cluster.
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
    (65, 144, 128, ALL_SMS),  # one block of K, fewer than shares
    (200, 400, 256, ALL_SMS),  # two
    (130, 264, 384, ALL_SMS),  # three
    (300, 776, 4240, FEW_SMS),  # 34 blocks: scales of B are fetched 32 at a time, and so are the next tile's
]
# For element by element stores, of odd widths.
DIRECT_SHAPES = [(100, 333, 400, ALL_SMS), (513, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)]

# Tokens past the m64 slices of a tile of 136 to 272: some there, some not; with odd M and N where elements are stored.
TALL_SHAPES = [(259, 392, 384, ALL_SMS), (531, 776, 272, FEW_SMS)]
TALL_DIRECT_SHAPES = [(259, 333, 400, ALL_SMS), (131, 141, 272, FEW_SMS)]

# There are more swapped configs, so each gets fewer shapes; between them these leave tiles short along M, N and K.
SWAPPED_SHAPES = [
    (300, 776, 656, FEW_SMS),  # many tiles a CTA, and a block of K cut short
    (8, 1003, 896, ALL_SMS),  # pieces of eight columns do not end where D does; its rows are padded
    (65, 256, 128, ALL_SMS),  # one block of K, fewer than shares
    (300, 776, 4240, FEW_SMS),  # 34 blocks: scales of B are fetched 32 at a time, and so are the next tile's
]
SWAPPED_DIRECT_SHAPES = [(269, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)]
# Where a stage holds several blocks of K, these are whole; the output is stored element by element anyway.
NARROW_SHAPES = [
    (300, 777, 640, FEW_SMS),
    (7, 1000, 896, ALL_SMS),
    (65, 141, 128, ALL_SMS),
    (40, 392, 4224, ALL_SMS),
    (1, 1, 384, ALL_SMS),
]

# All of K fits into shared memory, and there is a CTA for each tile, on however many SMs.
SMALL_SHAPES = [
    (100, 2112, 1024, ALL_SMS),
    (333, 592, 912, ALL_SMS),
    (7, 1003, 896, ALL_SMS),  # pieces of four columns do not end where D does
    (33, 80, 16, ALL_SMS),
    (65, 144, 128, ALL_SMS),
    (200, 400, 256, ALL_SMS),
    (130, 264, 384, ALL_SMS),
]
SMALL_DIRECT_SHAPES = [(100, 333, 400, ALL_SMS), (513, 777, 272, ALL_SMS), (1, 1, 128, ALL_SMS)]

Shape = tuple[int, int, int, int]


def narrow(config: GemmConfig) -> bool:
    """Whether a stage of ``config`` holds several blocks of K."""
    return isinstance(config, SwappedConfig) and config.stage_blocks > 1


def entry(params: KernelParams) -> str:
    return kernels.get(params.kernel).entry(params)


PLAIN_CONFIGS: list[FP8Config] = list(PLAIN.configs(SM90))
SWAPPED_CONFIGS: list[FP8Config] = list(SWAPPED.configs(SM90))
SMALL_CONFIGS: list[FP8Config] = list(SMALL.configs(SM90))
ALL_CONFIGS = PLAIN_CONFIGS + SWAPPED_CONFIGS + SMALL_CONFIGS
USUAL = [make_params(config) for config in ALL_CONFIGS]  # by TMA, but for narrow tiles
DIRECT = [make_params(c, store="direct") for c in ALL_CONFIGS if not narrow(c)]


def shapes_of(params: KernelParams) -> list[Shape]:
    """The shapes that a config is forced on: a few thousand checks in all."""
    if narrow(params.config):
        return NARROW_SHAPES
    if isinstance(params.config, SmallConfig):
        return SMALL_SHAPES if params.store == "tma" else SMALL_DIRECT_SHAPES
    if isinstance(params.config, SwappedConfig):
        return SWAPPED_SHAPES if params.store == "tma" else SWAPPED_DIRECT_SHAPES
    assert isinstance(params.config, FP8Config)
    if params.config.extra_tokens:
        return SHAPES + TALL_SHAPES if params.store == "tma" else DIRECT_SHAPES + TALL_DIRECT_SHAPES
    return SHAPES if params.store == "tma" else DIRECT_SHAPES


def launched_early() -> list[KernelParams]:
    """One config for each way to share K, width of tile, residency, way to store, and to bring tokens' scales or tokens
    past the slices."""
    chosen: dict[tuple[object, ...], KernelParams] = {}
    for params in USUAL + DIRECT:
        c = params.config
        assert isinstance(c, FP8Config)
        split = (c.cluster_m, c.cluster_n, c.cluster_k, c.consumers_k, c.ctas_per_sm)
        late = isinstance(c, SwappedConfig) and not scales_held(c)
        chosen.setdefault((params.kernel, params.store, c.block_n, *split, c.extra_tokens > 0, late), params)
    return list(chosen.values())


Loaded = Callable[[KernelParams], Function]


def shape_id(shape: Shape) -> str:
    return "x".join(map(str, shape[:3])) + (f"-on{shape[3]}" if shape[3] != ALL_SMS else "")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Functions by their params: all compiled at once, each loaded when it is first asked for."""
    builder = Builder(tmp_path_factory.mktemp("configs"), nvrtc())
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
    ("params", "shape"), WORK, ids=[f"{entry(params)}-{shape_id(shape)}" for params, shape in WORK]
)
def test_every_config(loaded: Loaded, params: KernelParams, shape: Shape) -> None:
    check(params, loaded(params), shape)


def ragged_k(config: GemmConfig) -> int:
    """A K that does not end with a block, where that is legal."""
    return 1008 if isinstance(config, SmallConfig) else 1536 if narrow(config) else 1552


def hundred_runs(params: KernelParams, function: Function, pdl: bool = False, constant_b: bool = False) -> torch.Tensor:
    """The output of a hundred runs, checked to be the same bits; ragged along M, N and, where that is legal, K. CTAs
    that do more than one tile also run on few SMs, where each has many, and hands one over to the next."""
    k = ragged_k(params.config)
    a, b = real_data(333, 592, k)
    stream = engine.raw_stream(torch.cuda.current_device())
    config = params.config
    assert isinstance(config, FP8Config)
    found = []
    for num_sms in (ALL_SMS, FEW_SMS) if config.persistent else (ALL_SMS,):
        outputs = torch.full((100, 333, 592), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        # Prepared first: they then follow each other without a gap, so that one can disturb the next.
        for run in [force(params, function, a, b, d, num_sms, stream, pdl, constant_b) for d in outputs]:
            run()
        assert_close_to_exact(outputs[0], *a, *b)
        assert torch.equal(outputs, outputs[:1].expand_as(outputs))
        found.append(outputs[0])
    # Dealt out over fewer CTAs, blocks of K are added up in other pieces.
    assert config.stream_k or torch.equal(found[0], found[-1])
    return found[0]


@pytest.mark.parametrize("params", USUAL, ids=entry)
def test_a_hundred_runs_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    hundred_runs(params, loaded(params))


@pytest.mark.parametrize("params", launched_early(), ids=entry)
def test_a_hundred_programmatic_launches_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    """Each begins, and reads B, while the one before it still runs; the bits are those of an ordinary launch."""
    early = hundred_runs(params, loaded(params), pdl=True, constant_b=True)
    a, b = real_data(333, 592, ragged_k(params.config))
    alone = torch.full_like(early, float("nan"))
    force(params, loaded(params), a, b, alone, ALL_SMS, engine.raw_stream(torch.cuda.current_device()))()
    assert torch.equal(early, alone)


@pytest.mark.parametrize("params", USUAL, ids=entry)
def test_as_many_ctas_live_on_an_sm_as_the_model_counts_on(loaded: Loaded, params: KernelParams) -> None:
    config = params.config
    assert isinstance(config, FP8Config)
    shared = kernels.get(params.kernel).shared_bytes(params)
    blocks = loaded(params).max_active_blocks(config.num_threads, shared)
    assert blocks >= config.ctas_per_sm
