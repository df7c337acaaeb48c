"""Sums of products in parts of K on a GPU: the order of parts, memory with anything in it, repeats, streams, graphs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from batched_cases import DEVICE, integers, product
from forced import nvrtc
from headers import edited_headers

import deep_gemm
from deep_gemm.jit import Builder
from deep_gemm.kernels.families import B16_SUMMED
from deep_gemm.kernels.groups import parts
from deep_gemm.ops.batched import SUM, Summed
from deep_gemm.runtime import calls, engine
from deep_gemm.select import Choice
from deep_gemm.spec import GemmSpec, ceil_div

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16 = torch.bfloat16
TILES = [(128, 128), (64, 128), (64, 64), (128, 96), (128, 32)]
SIZES = [(1, 200, 136, 4096), (2, 128, 384, 2048), (129, 200, 136, 128), (129, 256, 256, 256), (4096, 72, 264, 64)]
"""Products, M, N, K of each."""


Tile = tuple[int, int]


def config_of(block_m: int, block_n: int) -> Any:
    return B16_SUMMED.config(block_m, block_n, (1, 1, 1), 1, True)


class Forced:
    """A sum of products, added to d, by a config, in memory of its own."""

    def __init__(
        self, tile: Tile, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, builder: Builder | None = None
    ) -> None:
        device = torch.cuda.current_device()
        x = Summed("bf16_bmk_bnk_mn", True).check(a=a, b=b, d=d, c=d)
        work = Summed("bf16_bmk_bnk_mn", True).launches(x, device)
        (step,) = work.steps
        assert isinstance(step.spec, GemmSpec)
        assert x is not None
        config = config_of(*tile)
        self.parts, self.blocks = parts(config, step.spec), ceil_div(step.spec.k, 64)
        ((shape, dtype),) = work.scratch.values()
        self.memory = torch.empty(shape, dtype=dtype, device=DEVICE)
        at = {name: each.data_ptr() for name, each in {**x.tensors, "memory": self.memory}.items()}
        plan = engine.forced_plan(step.spec, config, device, builder)
        addresses = {name: at[operand] for name, operand in step.operands.items()}
        self.launch = engine.launch_record(
            plan, step.strides, addresses, engine.raw_stream(device), numbers=step.numbers
        )

    def first_block(self, part: int) -> int:
        """A part's first block of K, among those of all products."""
        share, more = divmod(self.blocks, self.parts)
        return part * share + min(part, more)


@contextmanager
def chosen(tile: Tile) -> Iterator[None]:
    """Calls take this config."""
    usual = engine.ranked_configs

    def only(spec: GemmSpec, device: int) -> list[Choice]:
        return [Choice(config_of(*tile), spec, engine.calibration_of(device))]

    engine.ranked_configs = only
    engine.forget_plans()
    calls.forget_all()
    try:
        yield
    finally:
        engine.ranked_configs = usual
        engine.forget_plans()
        calls.forget_all()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("tile", TILES)
def test_parts_are_added_in_their_order(tile: Tile) -> None:
    """Each part has one product other than zero, of very different sizes: another order gives other bits."""
    groups, m, n, k = 300, 200, 136, 128
    a, b = (torch.zeros(groups, rows, k, dtype=BF16, device=DEVICE) for rows in (m, n))
    d = torch.zeros(m, n, device=DEVICE)
    forced = Forced(tile, a, b, d)
    assert forced.parts > 1
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(forced.parts, m, generator=generator), torch.randn(forced.parts, n, generator=generator)
    left *= torch.exp2(torch.randint(0, 20, (forced.parts, 1), generator=generator))
    left, right = left.bfloat16().to(DEVICE), right.bfloat16().to(DEVICE)
    wanted, other = torch.zeros_like(d), torch.zeros_like(d)
    terms = [left[part].float()[:, None] * right[part].float() for part in range(forced.parts)]
    for part, term in enumerate(terms):
        block = forced.first_block(part)
        a[block // 2, :, block % 2 * 64] = left[part]
        b[block // 2, :, block % 2 * 64] = right[part]
        wanted += term
        other += terms[-1 - part]
    assert not torch.equal(wanted, other)
    before = normal(m, n, seed=5).float()
    for _ in range(20):
        d.copy_(before)
        forced.launch()
        assert torch.equal(d, wanted + before), "C comes last"


@pytest.mark.parametrize("size", SIZES)
def test_all_parts_are_added_whatever_is_in_memory(size: tuple[int, int, int, int]) -> None:
    groups, m, n, k = size
    a, b = integers(groups, m, k), integers(groups, n, k, seed=1)
    exact = sum(product(x, y).sum(0) for x, y in zip(a.split(64), b.split(64), strict=True))
    for tile in TILES:
        d = torch.zeros(m, n, device=DEVICE)
        forced = Forced(tile, a, b, d)
        fills: list[Callable[[], Any]] = [forced.memory.zero_, lambda each=forced: each.memory.fill_(255), lambda: None]
        fills.append(lambda each=forced: each.memory.random_(0, 256))
        for fill in (*fills, lambda: None):
            d.fill_(1)
            fill()
            forced.launch()
            assert torch.equal(d.double(), exact + 1), (tile, forced.parts)


@pytest.mark.parametrize("tile", TILES)
def test_the_last_part_adds_all_if_others_leave(tile: Tile, tmp_path: Path) -> None:
    """CTAs that wait for a short time, or not at all, leave the sums to the last one."""
    a, b = integers(300, 200, 128), integers(300, 136, 128, seed=1)
    exact = product(a, b).sum(0)
    for patience in (0, 1000, 4000):
        edit = ("kPatience = 1 << 19", f"kPatience = {patience}")
        headers = edited_headers(tmp_path / f"{patience}", "parts_together.cuh", edit)
        d = torch.zeros(200, 136, device=DEVICE)
        forced = Forced(tile, a, b, d, Builder(compiler=nvrtc(), include_dir=headers))
        for _ in range(100):
            forced.launch()
        assert torch.equal(d.double(), 100 * exact), patience


@pytest.mark.parametrize("size", SIZES)
def test_repeats_give_the_same_bits(size: tuple[int, int, int, int]) -> None:
    groups, m, n, k = size
    a, b = normal(groups, m, k), normal(groups, n, k, seed=1)
    pairs = list(zip(a.split(64), b.split(64), strict=True))
    exact = sum(product(x, y).sum(0) for x, y in pairs)
    most = sum(product(x.abs(), y.abs()).sum(0) for x, y in pairs).max()
    for tile in TILES:
        d, found = torch.zeros(m, n, device=DEVICE), []
        forced = Forced(tile, a, b, d)
        for _ in range(20):
            d.zero_()
            forced.launch()
            found.append(d.clone())
        assert all(torch.equal(each, found[0]) for each in found), tile
        assert (found[0].double() - exact).abs().max() <= 2e-6 * most, tile


@pytest.mark.parametrize("tile", TILES)
def test_sums_on_several_streams_at_once(tile: Tile) -> None:
    """Each call has memory of its own. CTAs of several calls share the GPU, and none waits long for another."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    operands = [(integers(129, 256, 256, seed=2 * i), integers(129, 256, 256, seed=2 * i + 1)) for i in range(3)]
    outs = [torch.zeros(256, 256, device=DEVICE) for _ in streams]
    torch.cuda.synchronize()
    with chosen(tile):
        for _ in range(50):
            for stream, (a, b), d in zip(streams, operands, outs, strict=True):
                with torch.cuda.stream(stream):
                    deep_gemm.einsum(SUM, a, b, d, d)
        torch.cuda.synchronize()
    for (a, b), d in zip(operands, outs, strict=True):
        assert torch.equal(d.double(), 50 * product(a, b).sum(0)), "sums of integers are exact"


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ten calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph


@pytest.mark.parametrize("tile", TILES)
def test_graphs_are_replayed_at_once(tile: Tile) -> None:
    operands = [(integers(65, 200, 128, seed=2 * i), integers(65, 136, 128, seed=2 * i + 1)) for i in range(2)]
    outs = [torch.zeros(200, 136, device=DEVICE) for _ in operands]
    with chosen(tile):
        graphs = []
        for (a, b), d in zip(operands, outs, strict=True):
            call = functools.partial(deep_gemm.einsum, SUM, a, b, d, d)
            call()
            torch.cuda.synchronize()
            d.zero_()
            graphs.append(captured(call))
        for _ in range(20):
            for graph, stream in zip(graphs, (torch.cuda.Stream(), torch.cuda.Stream()), strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
    for (a, b), d in zip(operands, outs, strict=True):
        assert torch.equal(d.double(), 200 * product(a, b).sum(0))
