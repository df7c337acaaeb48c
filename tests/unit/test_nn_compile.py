"""`torch.compile(fullgraph=True)` over the modules, forward and backward: one graph for many M, and no copies."""

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_cases import IN, OUT, experts_results, layer, matrix, results
from torch import Tensor

import deep_gemm
from deep_gemm import nn

ROWS = (192, 208, 320, 464)
"""None is a size of the weights: sizes that are equal in the first call would be taken for one."""


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fresh_compiler")]

MADE: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: layer(name) for name in ("1x128", "mixed", "kept casts", "fused")},
    "bf16": lambda: nn.BF16Linear(IN, OUT),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_compiled_layer_gives_the_same_bits(made: Callable[[], Any], dynamic: bool, fresh_compiler: Any) -> None:
    module = made()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in ROWS if dynamic else ROWS[:1]:
        x, dy = matrix(2, m // 2, IN), matrix(2, m // 2, OUT)
        found, wanted = results(module, x, dy, compiled), results(module, x, dy)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert fresh_compiler["stats"]["unique_graphs"] == 1
    assert not fresh_compiler["graph_break"]


def test_tokens_that_are_no_multiple_of_16_are_another_graph_and_no_more(fresh_compiler: Any) -> None:
    module = layer("1x128")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (*ROWS, 150, 201, 333):
        x, dy = matrix(m, IN), matrix(m, OUT)
        found, wanted = results(module, x, dy, compiled), results(module, x, dy)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert fresh_compiler["stats"]["unique_graphs"] == 2


def test_a_stored_layer_is_compiled_with_the_gradient_of_x(fresh_compiler: Any) -> None:
    module = nn.FP8Linear.from_linear(torch.nn.Linear(IN, OUT), mode="inference")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)

    def gradient(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    for m in (150, *ROWS):
        x = matrix(m, IN)
        assert all(map(torch.equal, gradient(compiled, x), gradient(module, x)))
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))
    assert fresh_compiler["stats"]["unique_graphs"] == 2, "with gradients and without"


def test_a_mixture_is_compiled(fresh_compiler: Any) -> None:
    module = nn.MoE(IN, 48, experts=5, top_k=2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (*ROWS, 2):
        x, dy = matrix(m, IN), matrix(m, IN)
        found, wanted = experts_results(module, x, dy, compiled), experts_results(module, x, dy)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert fresh_compiler["stats"]["unique_graphs"] == 1


@pytest.mark.limit(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["1x128", "fused", "bias"])
def test_inductor_adds_no_kernel_that_copies(name: str) -> None:
    from torch._inductor.utils import run_and_get_code

    module = nn.FP8Linear(
        256, 384, bias=name == "bias", **({"fuse_wgrad_accumulation": True} if name == "fused" else {})
    )
    weight: Any = module.weight
    weight.main_grad = torch.zeros(384, 256)
    compiled = torch.compile(module, fullgraph=True)
    x, dy = matrix(128, 256).requires_grad_(), matrix(128, 384)
    backward = name != "bias"  # whose gradient is a sum, by a kernel of inductor's
    _, codes = run_and_get_code(lambda: compiled(x).backward(dy) if backward else compiled(x))
    assert len(codes) == 1 + backward
    for code, called in zip(codes, ("fp8_linear", "fp8_linear_backward"), strict=False):
        assert re.findall(r"torch\.ops\.deep_gemm_jit\.(\w+)\.default\(", code) == [called]
        assert "cpp_fused" not in code
        assert "copy_(" not in code


def sliced(x: Tensor, w: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype)
    deep_gemm.bf16_gemm_nn(x[:, :IN], w.t(), d)
    return d


def gradient(x: Tensor, w: Tensor) -> Tensor:
    d = torch.empty(IN, IN)
    deep_gemm.bf16_gemm_tn(x[:, :IN], x[:, :IN], d)
    return d


def scaled(x: Tensor, w: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype)
    deep_gemm.fp8_gemm_nt(deep_gemm.quantize.rows(x[:, :IN]), deep_gemm.quantize.blocks(w), d)
    return d


@pytest.mark.limit(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("function", "called"),
    [
        (sliced, ["bf16_gemm"]),
        (gradient, ["bf16_gemm"]),
        (scaled, ["quantize_plain", "quantize_plain", "fp8_gemm"]),
    ],
)
def test_inductor_copies_no_operand_that_is_a_view(function: Callable[..., Tensor], called: list[str]) -> None:
    """Slices of wider tensors, and transposes. One graph for all M."""

    from torch._inductor.utils import run_and_get_code

    x, w = matrix(ROWS[0], 2 * IN), matrix(OUT, IN)
    found, codes = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=True), x, w)
    assert torch.equal(found, function(x, w))
    assert re.findall(r"torch\.ops\.deep_gemm_jit\.(\w+)\.default\(", codes[0]) == called
    assert not re.findall(r"copy_\(|clone\(|cpp_fused", codes[0])
