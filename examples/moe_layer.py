"""A mixture-of-experts layer in FP8, forward and backward, compared with the same layer in float32 and in bfloat16.

The layer is `deep_gemm.nn.MoE`, whose six products of forward and backward are deep_gemm's, and so are the casts.

    python examples/moe_layer.py                                        # small without a GPU, larger with one
    python examples/moe_layer.py --tokens 300 --experts 6 --top-k 3     # other sizes

How many rows each expert has stays on the device: the layer never waits for the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deep_gemm.nn import MoE

BOUNDS = {"y": 0.1, "dx": 0.1, "d router": 0.2, "d gate_up": 0.1, "d down": 0.1}
"""The largest relative errors, compared with float32. A cast to E4M3 has an error of some 0.026. Four or more of them
lie on the way to each tensor."""


def plain(layer: MoE, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same layer by torch, whose experts compute in ``dtype``, one after the other."""
    weights, chosen = layer.route(x)
    y = torch.zeros(x.shape, device=x.device)
    for e, (gate_up, down) in enumerate(zip(layer.gate_up.weight, layer.down.weight, strict=True)):
        token, choice = (chosen == e).nonzero(as_tuple=True)  # host code reads the number of rows: it must wait
        gate, up = functional.linear(x[token].to(dtype), gate_up.to(dtype)).chunk(2, dim=1)
        out = functional.linear(functional.silu(gate) * up, down.to(dtype))
        y = y.index_add(0, token, out.float() * weights[token, choice, None])
    return y.to(dtype)


def gradients(layer: MoE, run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The result of the layer and its gradients. ``run`` is the layer, or the same by torch."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = run(x)
    y.backward(dy.to(y.dtype))
    weights = {"d router": layer.router.weight, "d gate_up": layer.gate_up.weight, "d down": layer.down.weight}
    found = {"y": y.detach(), "dx": x.grad, **{name: weight.grad for name, weight in weights.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def relative_error(x: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the norm of the exact one."""
    difference = (x.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30)
    return difference.item()


def compare(layer: MoE, x: Tensor, dy: Tensor) -> dict[str, dict[str, float]]:
    """Relative errors by precision and tensor. Raises AssertionError if FP8's are above the bounds."""
    exact = gradients(layer, lambda x: plain(layer, x.float(), torch.float32), x, dy)
    found = {
        "FP8": gradients(layer, layer, x, dy),
        "BF16": gradients(layer, lambda x: plain(layer, x, torch.bfloat16), x, dy),
    }
    errors = {way: {name: relative_error(y, exact[name]) for name, y in each.items()} for way, each in found.items()}
    for name, bound in BOUNDS.items():
        assert errors["FP8"][name] <= bound, f"{name} differs by {errors['FP8'][name]:.4f}, more than {bound}"
    return errors


def milliseconds(step: Callable[[], Any], repeats: int = 10) -> float:
    """The mean time on the GPU, back to back, after calls that compile."""
    for _ in range(3):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def print_times(layer: MoE, x: Tensor, dy: Tensor) -> None:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "FP8": layer,
        "BF16, expert by expert": lambda x: plain(layer, x, torch.bfloat16),
    }
    for name, run in ways.items():
        with torch.no_grad():
            forward = milliseconds(partial(run, x))
        whole = milliseconds(partial(gradients, layer, run, x, dy))
        print(f"{name}: forward {forward:.2f} ms, forward and backward {whole:.2f} ms, casts of weights included")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option, on_gpu, on_cpu, meaning in (
        ("--tokens", 8192, 96, "tokens"),
        ("--width", 2048, 256, "size of a token, a multiple of 16"),
        ("--hidden", 1024, 128, "size inside an expert, a multiple of 16"),
        ("--experts", 64, 4, "experts"),
        ("--top-k", 8, 2, "experts of each token"),
        ("--seed", 0, 0, "of the random numbers"),
    ):
        parser.add_argument(option, type=int, default=on_gpu if gpu else on_cpu, help=f"{meaning} [%(default)s]")
    options = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(options.seed)
    layer = MoE(options.width, options.hidden, options.experts, options.top_k, device=device)
    x, dy = (torch.randn(options.tokens, options.width, device=device).bfloat16() for _ in range(2))

    # For the printout only, host code reads how many rows each expert has.
    counts = layer.route(x)[1].flatten().bincount(minlength=options.experts).tolist()
    print(f"{options.tokens} tokens, each to {options.top_k} of {options.experts} experts")
    print(f"experts have {min(counts)} to {max(counts)} rows")
    errors = compare(layer, x, dy)
    print("relative errors, compared with float32")
    print(f"{'':10} {'FP8':>8} {'bound':>8} {'BF16':>8}")
    for name, bound in BOUNDS.items():
        print(f"{name:10} {errors['FP8'][name]:8.4f} {bound:8.4f} {errors['BF16'][name]:8.4f}")
    if gpu:
        print_times(layer, x, dy)
    else:
        print("no times: without a GPU, products are those of the reference")


if __name__ == "__main__":
    main()
