"""`fp8_fp4_moe`, `bf16_fp4_moe` and `nn.MoE` with MXFP4 weights on a GPU: beside float64, in graphs, and repeated."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fp4_moe_cases import ERRORS, SIZES, exact, problem
from gpu_cases import DEVICE
from moe_cases import relative

import deep_gemm
from deep_gemm import nn

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
FUNCTIONS = {"fp8": deep_gemm.fp8_fp4_moe, "bf16": deep_gemm.bf16_fp4_moe}
LARGE = [(1, 128, 4, 2880, 2880), (64, 32, 4, 2880, 2880), (300, 32, 4, 2880, 2880)]
"""Tokens, experts, top_k, width, inner: those of gpt-oss."""
kinds = pytest.mark.parametrize("kind", FUNCTIONS)


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(part.to(DEVICE) for part in x) if isinstance(x, tuple) else x.to(DEVICE)
        for name, x in given.items()
    }


@pytest.fixture
def invariant() -> Iterator[None]:
    deep_gemm.set_batch_invariant(True)
    yield
    deep_gemm.set_batch_invariant(False)


@kinds
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_near_those_in_float64(sizes: tuple[int, ...], activation: str, kind: str) -> None:
    given, meant = problem(kind, *sizes)
    moved = on_gpu(given)
    for part in ({}, {"bias": None}):
        found = FUNCTIONS[kind](**{**moved, **part}, activation=activation)
        assert relative(found.cpu(), exact(**{**given, **meant, **part}, activation=activation)) < ERRORS[kind]
        assert not found[5:6].any()


@kinds
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_bits_repeat_and_one_graph_serves_all_choices(sizes: tuple[int, ...], kind: str) -> None:
    """Experts with all tokens, with none, and choices that are none."""
    given = on_gpu(problem(kind, *sizes, device=DEVICE)[0])
    y, call = torch.empty_like(given["x"]), FUNCTIONS[kind]
    wanted = call(**given, activation="swigluoai")
    for _ in range(30):
        assert torch.equal(call(**given, activation="swigluoai"), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**given, activation="swigluoai", y=y)
    everyone = torch.arange(sizes[2], device=DEVICE).expand(sizes[0], -1)
    for chosen in (everyone, -torch.ones_like(everyone), everyone.flip(1) + 7):
        given["topk_idx"].copy_(chosen)
        graph.replay()
        assert torch.equal(y, call(**given, activation="swigluoai"))


@kinds
def test_calls_with_changing_counts(kind: str, invariant: None) -> None:
    """Under batch invariance a token's bits are the same whichever others there are, up to 64 tokens."""
    rng, whole = random.Random(1), on_gpu(problem(kind, 64, 32, 4, 544, 288)[0])
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    wanted = FUNCTIONS[kind](**whole)
    for _ in range(300):
        first = rng.randrange(64)
        rows = slice(first, first + rng.randint(0, 64 - first))
        part = {name: whole[name][rows] for name in ("x", "topk_idx", "topk_weights")}
        wrong += (FUNCTIONS[kind](**{**whole, **part}).view(torch.int16) != wanted[rows].view(torch.int16)).sum()
    assert wrong.item() == 0


@kinds
@pytest.mark.parametrize("tokens", [5, 200])
def test_a_layer_is_as_on_the_cpu(kind: Any, tokens: int) -> None:
    options: dict[str, Any] = {"activation": "swigluoai", "bias": True, "mode": "inference", "activations": kind}
    layer = nn.MoE(288, 96, 6, 2, weights="mxfp4", **options)
    state, (given, _) = layer.state_dict(), problem(kind, tokens, 6, 2, 288, 96)
    for name in ("gate_up", "down"):
        state |= dict(zip((f"{name}.packed", f"{name}.factors"), given[name], strict=True))
    state |= {"gate_up.bias": given["bias"][0], "down.bias": given["bias"][1]}
    layer.load_state_dict(state)
    with torch.no_grad():
        wanted = layer(given["x"])
        found = layer.to(DEVICE)(given["x"].to(DEVICE))
    assert relative(found.cpu(), wanted.double()) < 0.01
