"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deep_gemm import quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts
from deep_gemm.nn.grouped_linear import FP8GroupedLinear
from deep_gemm.nn.products import grouped_gradient, grouped_product
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import Options, refuse_unknown
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.tensors import kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def swiglu_backward(hidden: Tensor, d: Tensor) -> Tensor:
    """The gradient of gate and up (rows, 2 * n), given the gradient d (rows, n) of silu(gate) * up."""
    gate, up = hidden.float().chunk(2, dim=1)
    sigmoid, d = gate.sigmoid(), d.float()
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d * gate * sigmoid], dim=1).to(hidden.dtype)


class Experts(torch.autograd.Function):
    """The results of the chosen experts, multiplied by the router's weights and added. SwiGLU is part of a cast.

    x (tokens, width), weights (tokens, top_k) float32; gate_up (experts, 2 * hidden, width) and down (experts, width,
    hidden) take gradients, and the tensors after them are their casts and those of their transposes, or None: see
    `FP8Product`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
        rows, tokens, labels, sizes, main_gate_up, main_down, wgrad_gate_up, wgrad_down, *cast = rest
        routing = Routing(rows, tokens, labels, sizes)
        x_rows, x_columns = casts.tokens(routing.spread(x), casts.BLOCKS[wgrad_gate_up])
        hidden = grouped_product(x_rows, (cast[0], cast[1]), torch.bfloat16, labels)
        h_rows, h_columns = casts.tokens(hidden, casts.BLOCKS[wgrad_down], gated=True)
        out = grouped_product(h_rows, (cast[4], cast[5]), torch.bfloat16, labels)
        turned = gate_up if cast[2] is None else cast[2], cast[3], down if cast[6] is None else cast[6], cast[7]
        ctx.save_for_backward(weights, hidden, out, *x_columns, *h_columns, *turned, rows, tokens, labels, sizes)
        ctx.mains, ctx.wgrads = (main_gate_up, main_down), (wgrad_gate_up, wgrad_down)
        ctx.dtypes = gate_up.dtype, down.dtype
        return (routing.choices(out) * weights[..., None]).sum(1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, hidden, out, x, sfx, h, sfh, gate_up, sf_gate_up, down, sf_down, *places = ctx.saved_tensors
        routing = Routing(*places)
        labels, sizes = routing.labels, routing.sizes
        d_weights = (routing.choices(out) * dy[:, None].float()).sum(2)
        # The router's weight of each row. Rows of padding have none, and are zeros anyway.
        factor = weights.new_zeros(hidden.shape[0]).scatter_(0, routing.rows.flatten(), weights.flatten())
        d_out = (routing.spread(dy) * factor[:, None]).to(dy.dtype)

        rows, columns = casts.gradients(d_out)
        d_hidden = swiglu_backward(
            hidden, grouped_product(rows, casts.transposed(down, sf_down), torch.bfloat16, labels)
        )
        d_down = grouped_gradient(columns, (h, sfh), ctx.dtypes[1], ctx.mains[1], ctx.wgrads[1], sizes)

        rows, columns = casts.gradients(d_hidden)
        dx = grouped_product(rows, casts.transposed(gate_up, sf_gate_up), torch.bfloat16, labels)
        d_gate_up = grouped_gradient(columns, (x, sfx), ctx.dtypes[0], ctx.mains[0], ctx.wgrads[0], sizes)
        dx = routing.choices(dx).sum(1).to(dy.dtype)
        return dx, d_weights, d_gate_up, d_down, *(None,) * 16


class MoE(nn.Module):
    """A mixture of experts with SwiGLU: a router in float32, and experts whose six products are FP8.

    Args:
        width: the size of a token, a multiple of 16.
        hidden: the size inside an expert, a multiple of 16.
        experts: the number of experts.
        top_k: how many experts each token goes to. Their weights are those of a softmax over all experts.
        mode, weight_gradient, recast, fuse_wgrad_accumulation, device, dtype: see `FP8Linear`; the weight of the router
            is float32. Where ``.bfloat16()`` or FSDP2 casts it, scores are products of that dtype.

    ``gate_up`` and ``down`` are `FP8GroupedLinear`. Rows of gate_up's weight are those of gate, and then those of up.
    How many tokens an expert gets stays on the device: the layer never waits for the GPU.

    Raises InvalidInputError, which names the argument.

    >>> moe = deep_gemm.nn.MoE(width=256, hidden=128, experts=4, top_k=2)
    >>> moe(torch.randn(30, 256).bfloat16()).shape
    torch.Size([30, 256])
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int, **options: Unpack[Options]) -> None:
        refuse_unknown(type(self), options)
        for name, size in (("width", width), ("hidden", hidden), ("experts", experts), ("top_k", top_k)):
            check_index(name, size, 1, MAX_SIZE, "a whole number from 1")
        if not 1 <= top_k <= experts:
            raise InvalidInputError(f"top_k must be from 1 to {experts}, the number of experts, but it is {top_k}.")
        super().__init__()
        self.width, self.top_k = width, top_k
        self.exchange: Any = None
        """What sends tokens to the ranks of their experts: see `deep_gemm.nn.parallel.ExpertParallel`."""
        self.watchers: list[Callable[[Tensor, Routing], None]] = []
        """What `deep_gemm.nn.check_spread` has called with the tokens of each call, and their routing."""
        self.router = nn.Linear(width, experts, bias=False, device=options.get("device"), dtype=torch.float32)
        self.gate_up = FP8GroupedLinear(experts, width, 2 * hidden, **options)
        self.down = FP8GroupedLinear(experts, hidden, width, **options)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the experts of tokens x (tokens, width): (tokens, top_k) float32 and int64."""
        with torch.autocast(x.device.type, enabled=False):
            scores = self.router(x.to(self.router.weight.dtype)).float()
            weights, chosen = scores.softmax(1).topk(self.top_k)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are (..., width) bfloat16. Under an autocast to bfloat16, x of another dtype is cast."""
        tokens = casts.as_rows(x, self.width)
        if casts.result_dtype(x) != torch.bfloat16:
            raise InvalidInputError(
                f"x must be a torch.bfloat16 tensor (..., {self.width}), but it is {kind_of(x)}. Call .bfloat16() on "
                "it, or the layer under torch.autocast."
            )
        casts.check_read(tokens)
        tokens = tokens.to(torch.bfloat16)
        weights, chosen = self.route(tokens)
        if self.exchange is None:
            return self._computed(tokens, weights, chosen).view(x.shape)
        rows = self.exchange(tokens, chosen, self.gate_up.num_groups, self._whole)
        return (rows.float() * weights[..., None]).sum(1).to(torch.bfloat16).view(x.shape)

    def _whole(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each row by one expert of this rank, with the weight 1."""
        return self._computed(x, torch.ones_like(chosen, dtype=torch.float32), chosen)

    def _computed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        routing = Routing.from_choices(chosen, self.gate_up.own(self.gate_up.weight).shape[0])
        for watch in self.watchers:
            watch(x, routing)
        if self.gate_up.takes_gradient() or self.down.takes_gradient():
            return self._recorded(x, weights, routing)
        return self._plain(x, weights, routing)

    def hidden(self, x: Tensor, routing: Routing) -> Tensor:
        """Gate and up of the rows of all experts, without gradients: (rows, 2 * hidden) bfloat16."""
        rows = quantize.rows(routing.spread(x.detach()))
        return grouped_product(rows, self.gate_up.plain(), torch.bfloat16, routing.labels)

    def _recorded(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        places = routing.rows, routing.tokens, routing.labels, routing.sizes
        how = self.gate_up.main_grad(), self.down.main_grad(), self.gate_up.weight_gradient, self.down.weight_gradient
        (gate_up, *cast), (down, *more) = self.gate_up.recorded(), self.down.recorded()
        y: Tensor = Experts.apply(x, weights, gate_up, down, *places, *how, *cast, *more)
        return y

    def _plain(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInputError(
                "x requires grad, and the weights of the experts take none: gradients end here. Call the layer under "
                "torch.no_grad(), or build it with mode='training'."
            )
        hidden = self.hidden(x, routing)
        out = grouped_product(quantize.rows(hidden, gated=True), self.down.plain(), torch.bfloat16, routing.labels)
        return (routing.choices(out) * weights[..., None]).sum(1).to(x.dtype)
