"""Layers of experts with MXFP4 weights at full size on a GPU: against float64, repeated, and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import DEEPSEEK_V4, GPT_OSS, Layer, State, exact, relative
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import UnsupportedError
from deep_gemm.nn import MoE

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(scope="module", params=[GPT_OSS, DEEPSEEK_V4], ids=str)
def loaded(request: Any) -> tuple[Layer, State, MoE]:
    """A layer of a model, smaller on the CPU."""
    layer: Layer = request.param
    if DEVICE == "cpu":
        layer = layer.resized(160, 96, 5, 2)
    state = layer.state(DEVICE)
    module = layer.module(DEVICE)
    module.load_state_dict(state)
    return layer, state, module


def tokens(count: int, width: int) -> torch.Tensor:
    x = torch.randn(count, width, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(count)).bfloat16()
    x[::3] *= 16  # beyond the limits of activations
    return x


@pytest.mark.parametrize("count", [1, 20, 300])
def test_results_are_near_float64_and_repeat(loaded: tuple[Layer, State, MoE], count: int) -> None:
    layer, state, module = loaded
    x = tokens(count, layer.width)
    y = module(x)
    assert relative(y, exact(layer, state, x, module.route(x))) < layer.bound
    assert all(torch.equal(module(x), y) for _ in range(5))
    if count > 1:
        assert relative(y[:1], exact(layer, state, x[:1], module.route(x[:1]))) < 2 * layer.bound


@cuda_only
def test_a_graph_takes_other_tokens(loaded: tuple[Layer, State, MoE]) -> None:
    layer, _, module = loaded
    x = tokens(20, layer.width)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    for seed in (3, 4):
        x.copy_(tokens(20 + seed, layer.width)[:20])
        graph.replay()
        assert torch.equal(y, module(x))


@cuda_only
def test_float32_scales_of_a_checkpoint_are_refused_in_a_capture() -> None:
    packed, scales = deep_gemm.quantize.mxfp4(torch.randn(64, 256, device=DEVICE))
    a, d = torch.ones(4, 256, device=DEVICE).bfloat16(), torch.empty(4, 64, device=DEVICE).bfloat16()
    for given in (scales, scales.float()):
        deep_gemm.bf16_fp4_gemm_nt(a, (packed, given), d)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UnsupportedError, match="while a CUDA graph is capt"):
        deep_gemm.bf16_fp4_gemm_nt(a, (packed, scales.float()), d)
    wanted = d.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.bf16_fp4_gemm_nt(a, (packed, scales), d.fill_(0))
    graph.replay()
    assert torch.equal(d, wanted)
