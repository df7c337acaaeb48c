"""`fp8_moe` and DeepGEMM's layer on a GPU: beside float64 and separate calls, in graphs, and with changing counts."""

import random
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE
from moe_cases import ERROR, SIZES, exact, problem, relative
from torch import Tensor

import deep_gemm
from deep_gemm import nn, quantize

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
LARGE = [(1, 256, 8, 1024, 256), (64, 256, 8, 1024, 256), (300, 64, 6, 2048, 512), (4096, 256, 8, 512, 128)]
"""Tokens, experts, top_k, width, inner."""
DEEPGEMM = [(1, 8, 2, 256, 128), (7, 16, 4, 512, 256), (64, 32, 6, 4096, 2048), (65, 32, 6, 4096, 2048), *LARGE]
"""Also those of one of eight ranks of DeepSeek-V4, as SGLang calls it."""


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(part.to(DEVICE) for part in x) if isinstance(x, tuple) else x.to(DEVICE)
        for name, x in given.items()
    }


def large(tokens: int, experts: int, top_k: int, width: int, inner: int, seed: int = 0) -> dict[str, Any]:
    """As `problem`, made on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    def stored(n: int, k: int) -> tuple[Tensor, Tensor]:
        values, scales = zip(*(quantize.blocks(normal(n, k) / k**0.5) for _ in range(experts)), strict=True)
        return torch.stack(values), torch.stack(scales)

    chosen = normal(tokens, experts).topk(top_k).indices
    chosen[normal(tokens, top_k) > 1.5] = -1
    weights = {"gate_up": stored(2 * inner, width), "down": stored(width, inner)}
    return {
        "x": normal(tokens, width).bfloat16(),
        "topk_idx": chosen,
        "topk_weights": normal(tokens, top_k).abs(),
        **weights,
    }


def separate(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: Any,
    down: Any,
    clamp: float | None = None,
    before_cast: bool = False,
) -> Tensor:
    """The same by public calls: a sort, a gathering cast, two grouped products in the index form, and sums in order.
    Weights are factors of rows, or of SwiGLU's results before their cast."""
    experts, inner = len(gate_up[0]), down[0].shape[2]
    routing = nn.Routing.from_choices(topk_idx, experts)
    rows = routing.tokens.int().masked_fill(routing.tokens == len(x), -1)
    a = quantize.rows(x, rows=rows)
    h = quantize.rows(torch.zeros(len(rows), inner, device=DEVICE))
    used, factors = (topk_idx >= 0) & (topk_idx < experts), torch.ones(len(rows), device=DEVICE)
    if before_cast:
        factors[routing.rows[used]] = topk_weights[used]
        topk_weights = torch.ones_like(topk_weights)
    epilogue = deep_gemm.Epilogue(activation="swiglu", clamp=clamp, row_factor=factors if before_cast else None)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, gate_up, h, routing.labels, epilogue=epilogue)
    out = torch.zeros(len(rows), x.shape[1], device=DEVICE).bfloat16()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(h, down, out, routing.labels)
    total = torch.zeros(x.shape, device=DEVICE)
    for choice in range(topk_idx.shape[1]):
        each = out[routing.rows[:, choice]].float() * topk_weights[:, choice, None]
        total = torch.where(used[:, choice, None], total + each, total)
    return total.bfloat16()


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_near_those_in_float64(sizes: tuple[int, ...], clamp: float | None) -> None:
    given = problem(*sizes)
    found = deep_gemm.fp8_moe(**on_gpu(given), clamp=clamp)
    assert relative(found.cpu(), exact(**given, clamp=clamp)) < ERROR
    assert not found[5:6].any()


@pytest.mark.limit(300)
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_bits_are_those_of_separate_calls_and_repeat(sizes: tuple[int, ...]) -> None:
    """100 times, also of tokens that are FP8 already."""
    given = large(*sizes)
    wanted = separate(**given)
    cast = {**given, "x": quantize.rows(given["x"])}
    for repeat in range(100):
        assert torch.equal(deep_gemm.fp8_moe(**(cast if repeat % 2 else given)), wanted), repeat


@pytest.mark.parametrize("sizes", [LARGE[1], LARGE[2]], ids=str)
def test_one_graph_serves_all_choices(sizes: tuple[int, ...]) -> None:
    """Experts with all tokens, with none, and choices that are none; without a copy between host and device."""
    given, y = large(*sizes), torch.empty(sizes[0], sizes[3], device=DEVICE).bfloat16()
    deep_gemm.fp8_moe(**given, y=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_moe(**given, y=y)
    everyone = torch.arange(sizes[2], device=DEVICE).expand(sizes[:1] + sizes[2:3])
    for chosen in (everyone, -torch.ones_like(everyone), everyone.flip(1) + 7, large(*sizes, seed=5)["topk_idx"]):
        given["topk_idx"].copy_(chosen)
        graph.replay()
        assert torch.equal(y, separate(**given))


@pytest.mark.limit(300)
def test_a_thousand_calls_with_changing_counts() -> None:
    """Of tokens and of rows of experts; each is compared on the GPU, and the host waits once."""
    rng, whole = random.Random(1), large(200, 32, 4, 512, 256)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    wanted = deep_gemm.fp8_moe(**whole)
    for _ in range(1000):
        first = rng.randrange(200)
        rows = slice(first, first + rng.randint(0, 200 - first))
        part = {name: whole[name][rows] for name in ("x", "topk_idx", "topk_weights")}
        wrong += (deep_gemm.fp8_moe(**{**whole, **part}).view(torch.int16) != wanted[rows].view(torch.int16)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("hidden", [128, 144])
def test_a_stored_layer_is_near_the_one_in_training_mode(hidden: int) -> None:
    made = nn.MoE(256, hidden, experts=6, top_k=2, device=DEVICE)
    stored = nn.MoE(256, hidden, experts=6, top_k=2, mode="inference", device=DEVICE)
    stored.load_state_dict(made.state_dict())
    x = torch.randn(300, 256, device=DEVICE).bfloat16()
    with torch.no_grad():
        assert relative(stored(x).cpu(), made(x).double().cpu()) < 0.02


def filled(given: dict[str, Any], most: int = 256) -> tuple[Any, Any]:
    """A buffer with the tokens, and the weights as `fp8_mega_moe` takes them."""
    experts, double, width = given["gate_up"][0].shape
    top_k = given["topk_idx"].shape[1]
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, experts, most, top_k, width, double // 2)
    fill(buffer, given)
    return buffer, deep_gemm.transform_weights_for_mega_moe_sm90(given["gate_up"], given["down"])


def fill(buffer: Any, given: dict[str, Any], rows: slice = slice(None)) -> None:
    own = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    x, chosen, weights = (given[name][rows] for name in ("x", "topk_idx", "topk_weights"))
    deep_gemm.mega_moe_pre_dispatch_sm90(x, chosen.int(), weights, *own, num_tokens=len(x), routed_scaling_factor=2.5)


@pytest.mark.limit(300)
@pytest.mark.parametrize("sizes", DEEPGEMM, ids=str)
def test_deepgemms_layer_has_the_bits_of_separate_calls(sizes: tuple[int, ...]) -> None:
    """100 times, of weights whose rows of gate and up alternate, with other bounds; within FP8's bounds of float64; and
    counts of rows that are added up."""
    given, clamp = large(*sizes), 2.0
    buffer, weights = filled(given, sizes[0] + 128)
    given["topk_weights"] *= 2.5
    stats = torch.zeros(sizes[1], dtype=torch.int32, device=DEVICE)
    wanted = separate(**given, clamp=clamp, before_cast=True)
    for bound in range(sizes[0], sizes[0] + 100):
        y, options = torch.empty_like(wanted), {"activation_clamp": clamp, "num_tokens_bound": bound}
        deep_gemm.fp8_mega_moe(y, *weights, buffer, cumulative_local_expert_recv_stats=stats, **options)
        assert torch.equal(y, wanted), bound
    assert relative(wanted, exact(**given, clamp=clamp)) < ERROR
    assert stats.tolist() == [100 * int((given["topk_idx"] == expert).sum()) for expert in range(sizes[1])]


def test_one_graph_of_deepgemms_layer_serves_all_counts() -> None:
    """As SGLang calls it: the tokens that a buffer has change between replays, and the others are no expert's."""
    given = large(200, 32, 4, 512, 256)
    buffer, weights = filled(given)
    y = torch.empty(256, 512, device=DEVICE).bfloat16()
    deep_gemm.fp8_mega_moe(y, *weights, buffer)
    graph, whole = torch.cuda.CUDAGraph(), y.clone()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_mega_moe(y, *weights, buffer)
    for count in (0, 1, 63, 64, 65, 200):
        fill(buffer, given, slice(count))
        graph.replay()
        assert torch.equal(y[:count], whole[:count])
        assert not y[count:].any()


@pytest.mark.limit(300)
def test_a_thousand_calls_of_deepgemms_layer() -> None:
    rng, given = random.Random(2), large(200, 32, 4, 512, 256)
    buffer, weights = filled(given)
    wanted = torch.empty(200, 512, device=DEVICE).bfloat16()
    deep_gemm.fp8_mega_moe(wanted, *weights, buffer)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        count = rng.randint(0, 200)
        fill(buffer, given, slice(count))
        y = torch.empty(count, 512, device=DEVICE).bfloat16()
        deep_gemm.fp8_mega_moe(y, *weights, buffer, num_tokens_bound=200)
        wrong += (y[:count].view(torch.int16) != wanted[:count].view(torch.int16)).sum()
    assert wrong.item() == 0
