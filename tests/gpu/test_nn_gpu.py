"""The modules of `deep_gemm.nn` on a GPU: results, gradients, compiled layers, CUDA graphs and streams."""

import re
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE
from nn_cases import (
    EXPERT_BOUNDS,
    IN,
    OF_CASTS,
    OPTIONS,
    OUT,
    SHAPES,
    check,
    exact,
    experts_exact,
    experts_results,
    layer,
    matrix,
    of_casts,
    of_separate_calls,
    results,
)
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from deep_gemm import InvalidInputError, nn
from deep_gemm.settings import settings

BF16 = torch.bfloat16
cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_near_those_in_float64(name: str, shape: tuple[int, ...]) -> None:
    made, x = layer(name, DEVICE), matrix(*shape, device=DEVICE)
    dy = matrix(*shape[:-1], OUT, device=DEVICE)
    check(results(made, x, dy), exact(made, x, dy))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [16, 200, 1000])
def test_results_are_the_products_of_the_casts(name: str, rows: int) -> None:
    made, x, dy = layer(name, DEVICE), matrix(rows, IN, device=DEVICE), matrix(rows, OUT, device=DEVICE)
    check(results(made, x, dy), of_casts(made, x, dy), OF_CASTS)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, IN), (37, IN), (2, 500, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_one_call_has_the_bits_of_separate_calls(name: str, shape: tuple[int, ...], bias: bool) -> None:
    made, x = layer(name, DEVICE, bias=bias), matrix(*shape, device=DEVICE)
    dy = matrix(*shape[:-1], OUT, device=DEVICE)
    wanted = of_separate_calls(made, x, dy)
    for _ in range(3):  # the first call, a replay, and a record
        found = results(made, x, dy)
        assert all(torch.equal(found[key].reshape(wanted[key].shape), wanted[key]) for key in wanted)
    stored = nn.FP8Linear.from_linear(made, mode="inference")
    for run in (made, stored):
        with torch.no_grad():
            assert all(torch.equal(run(x), found["y"]) for _ in range(3))


@pytest.mark.parametrize("weight", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("way", ["plain", "autocast", "deterministic"])
def test_16_bit_layers_are_near_those_in_float64(weight: torch.dtype, way: str) -> None:
    module = nn.BF16Linear(IN, OUT, device=DEVICE, dtype=weight)
    x, dy = matrix(200, IN, device=DEVICE), matrix(200, OUT, device=DEVICE)
    torch.use_deterministic_algorithms(way == "deterministic")
    try:
        with torch.autocast(DEVICE, dtype=BF16, enabled=way == "autocast"):
            found = results(module, x.float() if way == "autocast" else x, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    check(found, exact(module, x, dy), dict.fromkeys(found, 0.01))


@pytest.mark.parametrize("name", OPTIONS)
def test_repeats_have_the_same_bits(name: str) -> None:
    made, x, dy = layer(name, DEVICE), matrix(300, IN, device=DEVICE), matrix(300, OUT, device=DEVICE)
    once = results(made, x, dy)
    torch.use_deterministic_algorithms(True)
    try:
        again = results(made, x, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(once[key], again[key]) for key in once)


@pytest.mark.parametrize("recipe", ["1x128", "mixed"])
def test_a_mixture_is_near_the_one_in_float64(recipe: Any) -> None:
    made = nn.MoE(256, 144, experts=6, top_k=2, weight_gradient=recipe, device=DEVICE)
    x, dy = matrix(300, 256, device=DEVICE), matrix(300, 256, device=DEVICE)
    check(experts_results(made, x, dy), experts_exact(made, x, dy), EXPERT_BOUNDS)


def test_dropped_choices_are_as_on_the_cpu() -> None:
    """Routing has the same numbers, and a mixture computes what is left; other numbers are refused under the check."""
    chosen = torch.rand(200, 5).argsort(1)[:, :2]
    chosen[::3, 0], chosen[1::5, 1] = -1, 5
    found, wanted = nn.Routing.from_choices(chosen.to(DEVICE), 5), nn.Routing.from_choices(chosen, 5)
    assert all(torch.equal(x.cpu(), vars(wanted)[name]) for name, x in vars(found).items())
    layer: Any = nn.MoE(IN, 48, 5, 2, device=DEVICE)
    own = chosen.to(DEVICE)
    layer.route = lambda x: (layer.router(x.float()).softmax(1).gather(1, own.clamp(0, 4)), own)
    x, dy = matrix(200, IN, device=DEVICE), matrix(200, IN, device=DEVICE)
    check(experts_results(layer, x, dy), experts_exact(layer, x, dy), EXPERT_BOUNDS)
    chosen[4, 1] = 7
    with settings.override(check=True), pytest.raises(InvalidInputError, match=r"chosen\[4, 1\] is 7, but experts are"):
        nn.Routing.from_choices(chosen.to(DEVICE), 5)


@cuda_only
@pytest.mark.limit(400)
@pytest.mark.parametrize("name", ["1x128", "mixed", "fused", "bias"])
def test_a_compiled_layer_gives_the_same_bits_and_copies_nothing(name: str) -> None:
    made = layer("1x128", DEVICE) if name == "bias" else layer(name, DEVICE, bias=False)
    compiled = torch.compile(made, fullgraph=True, dynamic=True)
    main: Any = getattr(made.weight, "main_grad", torch.zeros(0, device=DEVICE))

    def for_three_sizes() -> None:
        for m in (192, 208, 320):
            x, dy = matrix(m, IN, device=DEVICE).requires_grad_(), matrix(m, OUT, device=DEVICE)
            found = []
            for run in (made, compiled):
                x.grad = made.weight.grad = None
                main.zero_()
                y = backward(run, x, dy)
                found.append((y, x.grad, made.weight.grad if name != "fused" else main.clone()))
            assert all(map(torch.equal, *found))

    _, codes = run_and_get_code(for_three_sizes)  # once: it makes torch forget all graphs first
    assert counters["stats"]["unique_graphs"] == 1
    assert len(codes) == 2
    checked = codes[:1] if name == "bias" else codes  # the gradient of a bias is a sum
    assert not any("async_compile.triton(" in code or "copy_(" in code for code in checked), codes
    for code, called in zip(codes, ("fp8_linear", "fp8_linear_backward"), strict=True):
        assert re.findall(r"torch\.ops\.deep_gemm_jit\.(\w+)\.default\(", code) == [called]


def backward(run: Any, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = run(x)
    y.backward(dy)
    return y.detach()


@cuda_only
def test_a_step_can_be_captured_in_a_graph() -> None:
    made = layer("fused", DEVICE, dtype=BF16)
    x, dy = matrix(256, IN, device=DEVICE).requires_grad_(), matrix(256, OUT, device=DEVICE)
    main: Any = made.weight
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = None
            made(x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    x.grad, graph = None, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = made(x)
        y.backward(dy)
    main.main_grad.zero_()
    with torch.no_grad():
        x.copy_(matrix(256, IN, device=DEVICE))
    graph.replay()
    torch.cuda.synchronize()
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad, "dw": main.main_grad.clone()}
    wanted = results(made, x, dy)
    assert all(torch.equal(found[key], wanted[key]) for key in found)


@cuda_only
def test_a_stored_layer_moves_to_the_gpu_and_back() -> None:
    stored = nn.FP8Linear.from_linear(torch.nn.Linear(IN, OUT, dtype=BF16), mode="inference")
    before = [tensor.view(torch.uint8).clone() for tensor in stored.state_dict().values()]
    x = matrix(37, IN, device=DEVICE)
    on_gpu = stored.to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        y = on_gpu(x)
    assert y.isfinite().all()
    after = [tensor.cpu().view(torch.uint8) for tensor in stored.cpu().state_dict().values()]
    assert all(map(torch.equal, before, after))
