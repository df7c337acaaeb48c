"""Stream K on a GPU: sums that CTAs exchange, and workspaces that launches, streams and graphs must not share.

What goes wrong here depends on who is faster, so everything is done many times, and compared bit for bit with what
comes out when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from forced import compiled, force, load, nvrtc
from golden_renders import PLAIN, find_config, make_params
from gpu_cases import DEVICE, busy, call

import deep_gemm
from deep_gemm import engine, workspace
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.module import Function, primary_context
from deep_gemm.kernels.stream_k import FLAG_BYTES, stream
from deep_gemm.params import FP8Config, GemmProblem, KernelParams
from deep_gemm.reference import exact_product
from deep_gemm.select import Choice
from deep_gemm.testing import Operand, assert_close_to_exact, guarded, integer_operands, random_operands

ALL_SMS = SM90.num_sms
RUNS = 100


def tile(block_m: int, block_n: int) -> FP8Config:
    return find_config(PLAIN, block_m=block_m, block_n=block_n, stream_k=True)


@dataclass(frozen=True)
class Case:
    """A tile and a GEMM whose K is dealt out."""

    tile: tuple[int, int]
    m: int
    n: int
    k: int
    num_sms: int = ALL_SMS

    @property
    def params(self) -> KernelParams:
        return make_params(tile(*self.tile), "direct" if self.n % 8 else "tma")

    def __str__(self) -> str:
        block_m, block_n = self.tile
        return f"{block_m}x{block_n}-{self.m}x{self.n}x{self.k}-on{self.num_sms}"


CASES = [
    Case((64, 64), 96, 576, 7168),  # up to 8 donors, and groups of two
    Case((128, 64), 300, 576, 7168),  # groups of three
    Case((128, 128), 96, 576, 7168),  # up to 28 donors, of two or three blocks each
    Case((128, 128), 300, 577, 7056),  # short along M, N and K, and stored element by element
    Case((192, 96), 333, 592, 1552),  # one or two blocks for each group
    Case((128, 256), 130, 1000, 400),  # a block for each group, and fewer groups than SMs
    Case((256, 128), 1000, 4104, 656, 8),  # whole tiles before those that are dealt out
    Case((128, 192), 513, 776, 2064, 7),  # the same, with SMs that nothing divides
]

Loaded = Callable[[Case], Function]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """The kernel of a case: all compiled at once."""
    builder = Builder(tmp_path_factory.mktemp("stream_k"), nvrtc())
    with compiled((params, builder, params) for params in {case.params for case in CASES}) as binaries:
        yield lambda case: load(case.params, binaries[case.params].result())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dealt_out_sums_are_right(loaded: Loaded, case: Case) -> None:
    assert stream(tile(*case.tile), case.m, case.n, case.k, case.num_sms).dealt > 0
    m, n, k = case.m, case.n, case.k
    handle = engine.raw_stream(torch.cuda.current_device())
    function = loaded(case)
    a, b, _, _ = random_operands(m, n, k, DEVICE, seed=m + n + k)
    d = guarded((m, n), torch.bfloat16, DEVICE)
    forced = force(case.params, function, a, b, d.tensor, case.num_sms, handle)
    forced()
    assert_close_to_exact(d.tensor, *a, *b)
    d.check("d")
    assert not bool(forced.workspace[:FLAG_BYTES].any())
    a, b = integer_operands(m, n, k, DEVICE, seed=m + n + k)
    d.tensor.fill_(float("nan"))
    force(case.params, function, a, b, d.tensor, case.num_sms, handle)()
    assert torch.equal(d.tensor, exact_product(*a, *b).bfloat16())


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_in_one_workspace_agree_bit_for_bit(loaded: Loaded, case: Case, early: bool) -> None:
    """Whoever comes first, sums are added in one order; and each launch leaves the flags as it found them, or the next
    one would not wait for its sums."""
    handle = engine.raw_stream(torch.cuda.current_device())
    a, b, _, _ = random_operands(case.m, case.n, case.k, DEVICE, seed=1)
    d = torch.full((case.m, case.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    forced = force(case.params, loaded(case), a, b, d, case.num_sms, handle, pdl=early, constant_b=early)
    forced()
    first = d.clone()
    assert_close_to_exact(first, *a, *b)
    differed = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(RUNS):
        d.fill_(float("nan"))
        forced()
        differed |= (bits(d) != bits(first)).any()
    assert not bool(differed)
    # With nothing between them one may begin while the one before it still adds.
    for _ in range(RUNS):
        forced()
    torch.cuda.synchronize()
    assert torch.equal(bits(d), bits(first))
    assert not bool(forced.workspace[:FLAG_BYTES].any())


# What follows goes through the public call, with this tile whatever the selector thinks of it.
TILE = (128, 64)
SMALL = (100, 576, 1024)  # 72 CTAs: two such GEMMs have SMs at the same time
LARGE = (300, 576, 7168)  # all SMs


@pytest.fixture
def dealt_out() -> Iterator[list[GemmProblem]]:
    """The problems that were given a plan, all of them with a stream config."""
    asked: list[GemmProblem] = []
    rank = engine.select.rank

    def only(problem: GemmProblem, *rest: Any) -> list[Choice]:
        asked.append(problem)
        return [replace(rank(problem, *rest)[0], config=tile(*TILE))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.select, "rank", only)
        deep_gemm.set_pdl(True)  # which also forgets what was decided before
        yield asked
        torch.cuda.synchronize()
    deep_gemm.set_pdl(True)


def with_ready_scales(a: Operand) -> Operand:
    """So that nothing is launched but the GEMM."""
    return a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])


def flags_are_clear(device: int, address: int) -> bool:
    """No tensor holds them: they are the driver's."""
    torch.cuda.synchronize()
    there = torch.full((FLAG_BYTES,), 0xFF, dtype=torch.uint8)
    with primary_context(device):
        api.call("cuMemcpyDtoH", there.data_ptr(), address, FLAG_BYTES)
    return not bool(there.any())


def eager_flags_are_clear() -> bool:
    assert workspace._kept
    return all(flags_are_clear(device, address) for (device, _), (address, _) in workspace._kept.items())


@pytest.fixture
def graph_flags(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The device and the address of the flags of each launch that was captured."""
    given: list[tuple[int, int]] = []
    flags_of_capture = workspace.flags_of_capture

    def noting(device: int, stream: int) -> int:
        given.append((device, flags_of_capture(device, stream)))
        return given[-1][1]

    monkeypatch.setattr(workspace, "flags_of_capture", noting)
    return given


class Loop:
    """A GEMM into several outputs, with operands of its own, and whether any output ever differed from what comes out
    when nothing else runs."""

    def __init__(self, shape: tuple[int, int, int], seed: int) -> None:
        a, self.b, _, _ = random_operands(*shape, DEVICE, seed=seed)
        self.a = with_ready_scales(a)
        self.expected = call(self.a, self.b)
        assert_close_to_exact(self.expected, *a, *self.b)
        self.outputs = torch.stack([self.expected] * 8)
        self.differed = torch.zeros((), dtype=torch.bool, device=DEVICE)

    def __call__(self) -> None:
        self.outputs.fill_(float("nan"))
        for d in self.outputs:
            deep_gemm.fp8_gemm_nt(self.a, self.b, d)
        self.differed |= (bits(self.outputs) != bits(self.expected)).any()

    def captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("modes", [("eager", "eager"), ("graph", "graph", "eager")], ids="-".join)
def test_streams_and_graphs_at_the_same_time(
    dealt_out: list[GemmProblem],
    graph_flags: list[tuple[int, int]],
    modes: tuple[str, ...],
    shape: tuple[int, int, int],
) -> None:
    """Two launches with the same flags or slots would take each other's sums for theirs. Graphs are captured on one
    stream, and have their own all the same."""
    loops = [Loop(shape, seed) for seed in range(len(modes))]
    assert [(problem.m, problem.n, problem.k) for problem in dealt_out] == [shape]
    assert not any(torch.equal(one.expected, other.expected) for one, other in combinations(loops, 2))
    for loop in loops:
        loop()  # everything is warm now, also what torch launches
    torch.cuda.synchronize()
    assert graph_flags == []
    runs = [loop.captured() if mode == "graph" else loop for loop, mode in zip(loops, modes, strict=True)]
    assert len(graph_flags) == sum(
        len(loop.outputs) for loop, mode in zip(loops, modes, strict=True) if mode == "graph"
    )
    assert len(set(graph_flags)) == modes.count("graph")
    streams = [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    for _ in range(3):
        busy()  # the host is slower than these kernels: let it run ahead
    for own in streams:
        own.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        for run, own in zip(runs, streams, strict=True):
            with torch.cuda.stream(own):
                run()
    torch.cuda.synchronize()
    assert [bool(loop.differed) for loop in loops] == [False] * len(loops)
    assert all(torch.equal(bits(loop.outputs[-1]), bits(loop.expected)) for loop in loops)
    assert eager_flags_are_clear()
    assert all(flags_are_clear(*flags) for flags in set(graph_flags))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_launches_that_follow_each_other_do_not_meet_in_their_workspace(
    dealt_out: list[GemmProblem], graph_flags: list[tuple[int, int]], mode: str
) -> None:
    """With constant weights a launch begins while the one before it still adds up sums, in the same workspace."""
    shapes = [LARGE, (100, 2112, 1024)]
    # As many CTAs: in a graph torch has the same memory for their slots then.
    assert len({stream(tile(*TILE), *shape, ALL_SMS).ctas for shape in shapes}) == 1
    work = []
    for seed, (m, n, k) in enumerate(shapes):
        a, b, _, _ = random_operands(m, n, k, DEVICE, seed=seed)
        out = torch.full((RUNS, m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        work.append((with_ready_scales(a), b, out))
        torch.cuda.synchronize()
        deep_gemm.declare_constant(*b)

    def step(i: int) -> None:
        a, b, out = work[i % 2]
        deep_gemm.fp8_gemm_nt(a, b, out[i // 2])

    def all_steps() -> None:
        for i in range(2 * RUNS):
            step(i)

    for i in range(2 * RUNS):
        step(i)
        torch.cuda.synchronize()
    assert len(dealt_out) == len(shapes)
    expected = [out.clone() for _, _, out in work]
    for (a, b, _), found in zip(work, expected, strict=True):
        assert_close_to_exact(found[0], *a, *b)
        assert torch.equal(bits(found), bits(found[:1]).expand_as(found))
    run: Callable[[], None] = all_steps
    if mode == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_steps()
        run = graph.replay
        assert len(graph_flags) == 2 * RUNS
        assert len(set(graph_flags)) == 1
    for index in range(3):
        for _, _, out in work:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        busy()
        run()
        torch.cuda.synchronize()
        for (_, _, out), wanted in zip(work, expected, strict=True):
            wrong = (bits(out) != bits(wanted)).flatten(1).any(1).nonzero().flatten().tolist()
            assert wrong == [], f"round {index}: launches {wrong[:10]} of {RUNS} differ"
    assert eager_flags_are_clear()
    assert all(flags_are_clear(*flags) for flags in set(graph_flags))
