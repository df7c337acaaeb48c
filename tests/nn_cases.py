"""Layers of `deep_gemm.nn`, what they compute, and what is exact; for tests without a GPU and with one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import nn, quantize
from deep_gemm.nn import casts

IN, OUT = 144, 272
"""Sizes that end inside blocks of 128."""
BOUNDS = {"y": 0.045, "dx": 0.045, "dw": 0.045, "db": 0.01}
"""The largest relative errors of FP8, by norm. A cast to E4M3 has an error of some 0.026, and each product has two."""
OPTIONS: dict[str, dict[str, Any]] = {
    "1x128": {}, "mixed": {"weight_gradient": "mixed"}, "kept casts": {"recast": "when changed"},
    "fused": {"fuse_wgrad_accumulation": True}, "bfloat16": {"dtype": torch.bfloat16},
}  # fmt: skip
SHAPES = [(IN,), (0, IN), (1, IN), (16, IN), (37, IN), (2, 3, 65, IN)]
Results = dict[str, Tensor]


def matrix(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def layer(name: str, device: str = "cpu", **more: Any) -> nn.FP8Linear:
    made = nn.FP8Linear(IN, OUT, **{"device": device, **OPTIONS[name], **more})
    if made.fuse_wgrad_accumulation:
        weight: Any = made.weight
        weight.main_grad = torch.zeros_like(made.weight, dtype=torch.float32)
    return made


def results(layer: Any, x: Tensor, dy: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Results:
    """The result of a layer, or of ``run``, and its gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    main = getattr(layer.weight, "main_grad", None)
    if main is not None:
        main.zero_()
    y = (layer if run is None else run)(x)
    y.backward(dy.to(y.dtype))
    dw = layer.weight.grad if main is None else main.clone()
    assert main is None or layer.weight.grad is None
    assert x.grad is not None
    of_bias = {} if layer.bias is None else {"db": layer.bias.grad}
    return {"y": y.detach(), "dx": x.grad, "dw": dw, **of_bias}


def exact(layer: Any, x: Tensor, dy: Tensor) -> Results:
    """The same in float64."""
    double = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64, device=x.device)
    double.load_state_dict(layer.state_dict())
    return results(double, x.double(), dy.double())


def relative(x: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the norm of the exact one."""
    assert x.shape == exact.shape
    difference = (x.double() - exact.double()).norm()
    return (difference / exact.double().norm().clamp_min(1e-300)).item()


def check(found: Results, wanted: Results, bounds: dict[str, float] = BOUNDS) -> None:
    errors = {name: relative(found[name], wanted[name]) for name in wanted}
    assert all(error <= bounds[name] for name, error in errors.items()), errors


def of_casts(layer: Any, x: Tensor, dy: Tensor) -> Results:
    """What the products of the casts are, in float64."""

    def meant(pair: tuple[Tensor, Tensor], block: tuple[int, int] = (1, 128)) -> Tensor:
        return deep_gemm.dequantise(*pair, block, torch.float64)

    weight = layer.weight.detach()
    w = meant(quantize.blocks(weight), (128, 128))
    mixed = layer.weight_gradient == "mixed"
    columns = meant(quantize.blocks_transposed(x), (128, 128)) if mixed else meant(quantize.columns(x))
    of_dy = meant(quantize.columns(dy, epsilon=0.0))
    return {
        "y": meant(quantize.rows(x)) @ w.t() + layer.bias.double(),
        "dx": meant(quantize.rows(dy, epsilon=0.0)) @ w,
        "dw": of_dy @ columns.t(),
        "db": dy.double().sum(0),
    }


def of_separate_calls(layer: Any, x: Tensor, dy: Tensor) -> Results:
    """What the public functions give, one call for each cast and each product. A layer has the same bits."""
    x, dy, weight = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), layer.weight.detach()
    wgrad, (n, k) = layer.weight_gradient, weight.shape
    rows, columns = casts.tokens(x, casts.BLOCKS[wgrad])
    plain, turned = quantize.blocks_and_transpose(weight)
    of_dy, columns_of_dy = casts.gradients(dy.to(x.dtype))
    y, dx = x.new_empty(x.shape[0], n), torch.empty_like(x)
    epilogue = None if layer.bias is None else deep_gemm.Epilogue(layer.bias.detach())
    deep_gemm.fp8_gemm_nt(rows, plain, y, epilogue=epilogue)
    deep_gemm.fp8_gemm_nt(of_dy, turned, dx)
    main = layer.fuse_wgrad_accumulation
    dw = torch.zeros(n, k, device=x.device) if main else torch.empty_like(weight)
    deep_gemm.fp8_gemm_nt(columns_of_dy, columns, dw, c=dw if main else None, recipe=casts.RECIPES[wgrad])
    return {"y": y, "dx": dx, "dw": dw}


OF_CASTS = {"y": 5e-3, "dx": 5e-3, "dw": 5e-3, "db": 1e-2}
"""How far results are from the products of the casts: by rounding to bfloat16, and by the tensor cores' sums."""


def experts_exact(layer: Any, x: Tensor, dy: Tensor) -> Results:
    """Results and gradients of a mixture in float64, with the same choices of experts."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    weights, chosen = layer.route(x)
    y = torch.zeros(x.shape, device=x.device, dtype=torch.float64)
    for e, (gate_up, down) in enumerate(zip(layer.gate_up.weight, layer.down.weight, strict=True)):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[token].double(), gate_up.double()).chunk(2, dim=1)
        out = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down.double())
        y = y.index_add(0, token, out * weights[token, choice, None].double())
    y.backward(dy.double())
    return of_experts(layer, x, y)


def experts_results(layer: Any, x: Tensor, dy: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Results:
    """Results and gradients of a mixture."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = (layer if run is None else run)(x)
    y.backward(dy)
    return of_experts(layer, x, y)


def of_experts(layer: Any, x: Tensor, y: Tensor) -> Results:
    assert x.grad is not None
    names = ("d router", "d gate_up", "d down")
    found = zip(names, (layer.router.weight, layer.gate_up.weight, layer.down.weight), strict=True)
    return {"y": y.detach(), "dx": x.grad, **{name: weight.grad for name, weight in found}}


EXPERT_BOUNDS = {"y": 0.1, "dx": 0.1, "d router": 0.2, "d gate_up": 0.1, "d down": 0.1}
"""The largest relative errors of a mixture. Four casts or more lie on the way to each tensor."""
