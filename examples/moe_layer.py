"""A mixture-of-experts layer in FP8, forward and backward, compared with the same layer in float32 and in bfloat16.

Each token goes to a few experts, which a router chooses. Rows of tokens are put into expert order. Then all experts
are multiplied by one grouped GEMM: gate and up, SwiGLU, down. The results of a token are added with the router's
weights. The six products of forward and backward are deep_gemm's, and so are the casts. The rest is torch's.

    python examples/moe_layer.py                                        # small without a GPU, larger with one
    python examples/moe_layer.py --tokens 300 --experts 6 --top-k 3     # other sizes

How many rows each expert has stays on the device: the layer never waits for the GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deep_gemm
from deep_gemm import quantize
from deep_gemm.quantize import Quantized

BLOCK = 128
"""Values that share a scale."""

BOUNDS = {"y": 0.1, "dx": 0.1, "d router": 0.2, "d gate_up": 0.1, "d down": 0.1}
"""The largest relative errors, compared with float32. A cast to E4M3 has an error of some 0.026. Four or more of them
lie on the way to each tensor."""


@dataclass(frozen=True)
class Routing:
    """Where the rows of each expert are in a matrix of all rows. An expert's rows lie together, and begin at a multiple
    of the alignment. Other rows are padding. All tensors are on the device of the tokens."""

    rows: Tensor
    """(tokens, top_k) int64: the row of each choice of a token."""
    tokens: Tensor
    """(capacity,) int64: the token of each row. Padding has the number of tokens, one past the last."""
    labels: Tensor
    """(capacity,) int32: the expert of each row, or -1 for padding. Kernels read it."""
    sizes: Tensor
    """(experts,) int32: the rows of each expert with its padding, multiples of 128. Kernels read it."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routing:
        """``chosen`` (tokens, top_k) int64 are the experts of each token. Nothing here waits for the GPU: the number of
        rows is an upper bound that follows from shapes."""
        device, (tokens, top_k) = chosen.device, chosen.shape
        # A group begins with a new block of scales too, because rows are the K of weight gradients.
        alignment = math.lcm(deep_gemm.get_mk_alignment_for_contiguous_layout(), BLOCK)
        most = chosen.numel() + min(experts, chosen.numel()) * (alignment - 1)
        capacity = deep_gemm.align(max(most, 1), alignment)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(experts, device=device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        sizes = (counts + alignment - 1) // alignment * alignment
        shift = (sizes.cumsum(0) - sizes) - (ends - counts)  # from places without padding to rows
        row = torch.arange(chosen.numel(), device=device) + shift[expert]
        labels = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        return cls(
            rows=torch.empty_like(row).scatter_(0, order, row).view(tokens, top_k),
            tokens=torch.full((capacity,), tokens, device=device).scatter_(0, row, order // top_k),
            labels=labels.scatter_(0, row, expert.int()),
            sizes=sizes.int(),
        )

    def spread(self, x: Tensor) -> Tensor:
        """The rows (capacity, columns) of tokens x (tokens, columns). Rows of padding are zeros."""
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[self.tokens]

    def choices(self, x: Tensor) -> Tensor:
        """From rows x (capacity, columns), those of each token's choices: (tokens, top_k, columns) float32. A sum over
        them has a fixed order, so that its bits repeat."""
        return x[self.rows].float()


class Experts(torch.autograd.Function):
    """The results of the chosen experts, multiplied by the router's weights and added.

    x (tokens, width) bfloat16, weights (tokens, top_k) float32, gate_up (experts, 2 * hidden, width) and down (experts,
    width, hidden) float32. Gradients of gate_up and down are added to their attribute ``main_grad``, which is float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Any, down: Any, routing: Routing) -> Tensor:
        gate_up_blocks, gate_up_turned = both_ways(gate_up)
        down_blocks, down_turned = both_ways(down)
        x_rows, x_columns = quantize.rows_and_columns(routing.spread(x))
        hidden = grouped(x_rows, gate_up_blocks, routing)
        h_rows, h_columns = quantize.rows_and_columns(hidden, gated=True)  # SwiGLU and the cast in one launch
        out = grouped(h_rows, down_blocks, routing)
        ctx.save_for_backward(weights, hidden, out, *x_columns, *h_columns, *gate_up_turned, *down_turned)
        ctx.routing, ctx.masters = routing, (gate_up, down)
        return (routing.choices(out) * weights[..., None]).sum(1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        weights, hidden, out, *pairs = ctx.saved_tensors
        x_columns, h_columns, gate_up, down = zip(pairs[::2], pairs[1::2], strict=True)
        routing, (d_gate_up, d_down) = ctx.routing, (w.main_grad for w in ctx.masters)
        d_weights = (routing.choices(out) * dy[:, None].float()).sum(2)
        # The router's weight of each row. Rows of padding have none, and are zeros anyway.
        factor = weights.new_zeros(len(hidden)).scatter_(0, routing.rows.flatten(), weights.flatten())
        d_out = (routing.spread(dy) * factor[:, None]).to(dy.dtype)

        rows, columns = quantize.rows_and_columns(d_out)
        d_hidden = swiglu_backward(hidden, grouped(rows, down, routing))
        add_weight_gradient(columns, h_columns, d_down, routing)

        rows, columns = quantize.rows_and_columns(d_hidden)
        dx = routing.choices(grouped(rows, gate_up, routing)).sum(1)
        add_weight_gradient(columns, x_columns, d_gate_up, routing)
        return dx.to(dy.dtype), d_weights, None, None, None


def grouped(rows: Quantized, weights: Quantized, routing: Routing) -> Tensor:
    """The product of each row and its expert's matrix: (capacity, k) times (experts, n, k) is (capacity, n) bfloat16.
    Rows of padding are zeros on the left, hence in the result: this form of the call writes them too."""
    d = torch.empty(len(rows[0]), weights[0].shape[1], dtype=torch.bfloat16, device=rows[0].device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weights, d, routing.labels)
    return d


def add_weight_gradient(a: Quantized, b: Quantized, d: Tensor, routing: Routing) -> None:
    """Add to d (experts, m, n) float32 the product of the columns of a (m, capacity) and of b (n, capacity), for each
    expert over its own rows."""
    deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, routing.sizes, c=d)


def both_ways(w: Tensor) -> tuple[Quantized, Quantized]:
    """w (experts, n, k) and its transpose (experts, k, n) in E4M3, with scales of 128x128: two launches per expert."""
    experts, n, k = w.shape
    blocks = deep_gemm.ceil_div(n, BLOCK), deep_gemm.ceil_div(k, BLOCK)
    values = w.new_empty(experts, n, k, dtype=torch.float8_e4m3fn), w.new_empty(experts, *blocks)
    turned = w.new_empty(experts, k, n, dtype=torch.float8_e4m3fn), w.new_empty(experts, *blocks[::-1])
    for e in range(experts):
        out = (values[0][e], values[1][e]), (turned[0][e], turned[1][e])
        quantize.blocks_and_transpose(w[e], out=out)
    return values, turned


def swiglu_backward(hidden: Tensor, d: Tensor) -> Tensor:
    """The gradient of gate and up (rows, 2 * n), given the gradient d (rows, n) of silu(gate) * up."""
    gate, up = hidden.float().chunk(2, dim=1)
    sigmoid, d = gate.sigmoid(), d.float()
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d * gate * sigmoid], dim=1).to(hidden.dtype)


class MoELayer(nn.Module):
    """A router in float32, and experts. Sizes of the experts' matrices are multiples of 16."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.gate_up: Any = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.down: Any = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def zero_main_grads(self) -> None:
        """Call it before the first of the backward passes whose gradients are to be added."""
        for w in (self.gate_up, self.down):
            w.main_grad = torch.zeros_like(w)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts, (tokens, top_k) float32 and int64."""
        weights, chosen = functional.linear(x.float(), self.router).softmax(1).topk(self.top_k)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are (tokens, width) bfloat16."""
        weights, chosen = self.route(x)
        y: Tensor = Experts.apply(x, weights, self.gate_up, self.down, Routing.of(chosen, len(self.down)))
        return y

    def plain(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The same layer by torch, whose experts compute in ``dtype``, one after the other."""
        weights, chosen = self.route(x)
        y = torch.zeros(x.shape, device=x.device)
        for e, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, choice = (chosen == e).nonzero(as_tuple=True)  # host code reads the number of rows: it must wait
            gate, up = functional.linear(x[token].to(dtype), gate_up.to(dtype)).chunk(2, dim=1)
            out = functional.linear(functional.silu(gate) * up, down.to(dtype))
            y = y.index_add(0, token, out.float() * weights[token, choice, None])
        return y.to(dtype)


def gradients(layer: MoELayer, run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The result of the layer and its gradients. ``run`` is the layer, or the same by torch."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    layer.zero_main_grads()
    y = run(x)
    y.backward(dy.to(y.dtype))
    names, weights = ("d router", "d gate_up", "d down"), (layer.router, layer.gate_up, layer.down)
    # By torch, gradients of weights are in `grad` and `main_grad` is zero. In FP8 the experts have no `grad`.
    found = {name: w.grad if w.grad is not None else w.main_grad for name, w in zip(names, weights, strict=True)}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **found}


def relative_error(x: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the norm of the exact one."""
    difference = (x.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30)
    return difference.item()


def compare(layer: MoELayer, x: Tensor, dy: Tensor) -> dict[str, dict[str, float]]:
    """Relative errors by precision and tensor. Raises AssertionError if FP8's are above the bounds."""
    exact = gradients(layer, lambda x: layer.plain(x.float(), torch.float32), x, dy)
    found = {
        "FP8": gradients(layer, layer, x, dy),
        "BF16": gradients(layer, lambda x: layer.plain(x, torch.bfloat16), x, dy),
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


def print_times(layer: MoELayer, x: Tensor, dy: Tensor) -> None:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "FP8": layer,
        "BF16, expert by expert": lambda x: layer.plain(x, torch.bfloat16),
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
    layer = MoELayer(options.width, options.hidden, options.experts, options.top_k).to(device)
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
