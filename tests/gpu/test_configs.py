"""Every legal config in turn, whatever the selector thinks of it, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from forced import compiled, force, load, nvrtc
from gpu_cases import DEVICE

from deep_gemm import engine
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.sm90_fp8_gemm import KERNEL, make_params
from deep_gemm.params import FP8Config, KernelParams
from deep_gemm.reference import exact_product
from deep_gemm.testing import Operand, assert_close_to_exact, guarded, integer_operands, random_operands

ALL_SMS = SM90.num_sms
# Few SMs, so that every CTA walks many tiles. A multiple of the largest cluster.
FEW_SMS = 8

# M, N, K, SMs. N is a multiple of 8: these are stored by TMA.
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
    (40, 392, 4240, ALL_SMS),  # 34 blocks: scales of B are fetched 32 at a time
]
# For element by element stores, of odd widths.
DIRECT_SHAPES = [(100, 333, 400, ALL_SMS), (513, 777, 272, FEW_SMS), (1, 1, 128, ALL_SMS)]

CONFIGS = list(KERNEL.configs(SM90))
TMA = [make_params(config) for config in CONFIGS]
DIRECT = [make_params(config, store="direct") for config in CONFIGS]

Loaded = Callable[[KernelParams], Function]


def shape_id(shape: tuple[int, int, int, int]) -> str:
    return "x".join(map(str, shape[:3])) + (f"-on{shape[3]}" if shape[3] != ALL_SMS else "")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Functions by their params: all compiled at once, each loaded when it is first asked for."""
    builder = Builder(tmp_path_factory.mktemp("configs"), nvrtc())
    with compiled((params, builder, params) for params in TMA + DIRECT) as binaries:
        yield functools.cache(lambda params: load(params, binaries[params].result()))


@functools.cache
def real_data(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    a, b, _, _ = random_operands(m, n, k, DEVICE, seed=m + n + k)
    return a, b


@functools.cache
def integers(m: int, n: int, k: int) -> tuple[Operand, Operand, torch.Tensor]:
    a, b = integer_operands(m, n, k, DEVICE, seed=m + n + k)
    return a, b, exact_product(*a, *b).bfloat16()


def check(params: KernelParams, function: Function, shape: tuple[int, int, int, int]) -> None:
    m, n, k, num_sms = shape
    stream = engine.raw_stream(torch.cuda.current_device())
    a, b = real_data(m, n, k)
    d = guarded((m, n), torch.bfloat16, DEVICE)  # all of it NaN
    force(params, function, a, b, d.tensor, num_sms, stream)()
    assert_close_to_exact(d.tensor, *a, *b)
    d.check("d")
    a, b, expected = integers(m, n, k)
    d.tensor.fill_(float("nan"))
    force(params, function, a, b, d.tensor, num_sms, stream)()
    assert torch.equal(d.tensor, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("params", TMA, ids=KERNEL.entry)
def test_every_config(loaded: Loaded, params: KernelParams, shape: tuple[int, int, int, int]) -> None:
    check(params, loaded(params), shape)


@pytest.mark.parametrize("shape", DIRECT_SHAPES, ids=shape_id)
@pytest.mark.parametrize("params", DIRECT, ids=KERNEL.entry)
def test_every_config_storing_elements(loaded: Loaded, params: KernelParams, shape: tuple[int, int, int, int]) -> None:
    check(params, loaded(params), shape)


@pytest.mark.parametrize("params", TMA, ids=KERNEL.entry)
def test_twenty_runs_agree_bit_for_bit(loaded: Loaded, params: KernelParams) -> None:
    a, b = real_data(333, 592, 1552)
    outputs = torch.full((20, 333, 592), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    stream = engine.raw_stream(torch.cuda.current_device())
    # Prepared first: they then follow each other without a gap, so that one can disturb the next.
    for run in [force(params, loaded(params), a, b, d, ALL_SMS, stream) for d in outputs]:
        run()
    assert_close_to_exact(outputs[0], *a, *b)
    assert torch.equal(outputs, outputs[:1].expand_as(outputs))


@pytest.mark.parametrize("params", TMA, ids=KERNEL.entry)
def test_as_many_ctas_live_on_an_sm_as_the_model_counts_on(loaded: Loaded, params: KernelParams) -> None:
    config = params.config
    assert isinstance(config, FP8Config)
    blocks = loaded(params).max_active_blocks(config.num_threads, KERNEL.shared_bytes(params))
    assert blocks >= config.ctas_per_sm
