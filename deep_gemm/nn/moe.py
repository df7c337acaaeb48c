"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deep_gemm import fp4_moe, fused, moe, quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.kernels.moe_kernels import MOST_EXPERTS
from deep_gemm.nn import casts, expert_names, sums
from deep_gemm.nn.fp4_linear import Activations, FP4GroupedLinear
from deep_gemm.nn.grouped_linear import FP8GroupedLinear
from deep_gemm.nn.products import grouped_gradient, grouped_product
from deep_gemm.nn.router import Router
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import Options, check_word, refuse_unknown
from deep_gemm.ops import moe_chain
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.tensors import kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


Gate: TypeAlias = Literal["swiglu", "swigluoai"]


class Experts(torch.autograd.Function):
    """The results of the chosen experts, multiplied by the router's weights and added. SwiGLU and its gradient, and the
    sending of tokens to experts, are parts of casts.

    x (tokens, width), weights (tokens, top_k) float32; gate_up (experts, 2 * hidden, width) and down (experts, width,
    hidden) take gradients, and the tensors after them are their casts and those of their transposes, or None: see
    `FP8Product`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
        rows, places, index, labels, sizes, main_gate_up, main_down, wgrad_gate_up, wgrad_down, *cast = rest
        x_rows, x_columns = casts.tokens(x, casts.BLOCKS[wgrad_gate_up], rows=index)
        hidden = grouped_product(x_rows, (cast[0], cast[1]), torch.bfloat16, labels)
        h_rows, h_columns = casts.tokens(hidden, casts.BLOCKS[wgrad_down], gated=True)
        out = grouped_product(h_rows, (cast[4], cast[5]), torch.bfloat16, labels)
        turned = gate_up if cast[2] is None else cast[2], cast[3], down if cast[6] is None else cast[6], cast[7]
        ctx.save_for_backward(weights, hidden, out, *x_columns, *h_columns, *turned, rows, places, index, labels, sizes)
        ctx.mains, ctx.wgrads = (main_gate_up, main_down), (wgrad_gate_up, wgrad_down)
        ctx.dtypes = gate_up.dtype, down.dtype
        return sums.added(out, places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, hidden, out, x, sfx, h, sfh, gate_up, sf_gate_up, down, sf_down, *more = ctx.saved_tensors
        (chosen, places, index, labels, sizes), dy = more, casts.row_major(dy)
        d_weights = sums.dots(out, places, dy) if ctx.needs_input_grad[1] else None
        # The router's weight of each row. Rows of padding have none, and are zeros anyway.
        factors = weights.new_zeros(hidden.shape[0], dtype=torch.float32)
        factors.scatter_(0, chosen.flatten(), weights.flatten().float())

        rows, columns = casts.gradients(dy, rows=index, factors=factors)
        d_product = grouped_product(rows, casts.transposed(down, sf_down), torch.bfloat16, labels)
        d_down = grouped_gradient(columns, (h, sfh), ctx.dtypes[1], ctx.mains[1], ctx.wgrads[1], sizes)

        rows, columns = casts.gradients(hidden, gated=True, gradient=d_product)
        dx = grouped_product(rows, casts.transposed(gate_up, sf_gate_up), torch.bfloat16, labels)
        d_gate_up = grouped_gradient(columns, (x, sfx), ctx.dtypes[0], ctx.mains[0], ctx.wgrads[0], sizes)
        return sums.added(dx, places), d_weights, d_gate_up, d_down, *(None,) * 17


class MoE(nn.Module):
    """A mixture of experts with SwiGLU: a router in float32, and experts whose six products are FP8. Or experts with
    MXFP4 weights, for inference.

    Args:
        width: the size of a token, a multiple of 16.
        hidden: the size inside an expert, a multiple of 16.
        experts: the number of experts.
        top_k: how many experts each token goes to. Their weights are those of a softmax over all experts.
        router: a `Router` of these sizes, for other weights; None for that of a softmax.
        weights: "fp8", or "mxfp4" for weights of 4 bits, which `FP4GroupedLinear` describes. Those take
            ``mode="inference"`` and no option of training.
        activations: with "mxfp4": "fp8" or "bf16", what the products read.
        bias: with "mxfp4": whether both layers of an expert have a bias.
        activation: "swiglu", silu(gate) * up, or for ``mode="inference"`` "swigluoai", that of gpt-oss, whose rows of
            gate and up take turns: see `deep_gemm.fused.swigluoai_and_mul`.
        limit: of the activation, for ``mode="inference"``; None for no limit, or for that of gpt-oss, 7.
        mode, weight_gradient, recast, fuse_wgrad_accumulation, device, dtype: see `FP8Linear`; the weight of the router
            is float32. Where ``.bfloat16()`` or FSDP2 casts it, scores are products of that dtype.

    ``gate_up`` and ``down`` are `FP8GroupedLinear` or `FP4GroupedLinear`. Rows of gate_up's weight are those of gate,
    and then those of up. A state dict may have experts as checkpoints of gpt-oss, DeepSeek, Mixtral and Qwen do, in one
    tensor or expert by expert: ``experts.0.gate_proj.weight`` with its scales, ``gate.weight`` for the router.
    How many tokens an expert gets stays on the device: the layer never waits for the GPU.

    Raises InvalidInputError, which names the argument.

    >>> moe = deep_gemm.nn.MoE(width=256, hidden=128, experts=4, top_k=2)
    >>> moe(torch.randn(30, 256).bfloat16()).shape
    torch.Size([30, 256])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        router: Router | None = None,
        weights: Literal["fp8", "mxfp4"] = "fp8",
        activations: Activations | None = None,
        activation: Gate = "swiglu",
        limit: float | None = None,
        bias: bool = False,
        **options: Unpack[Options],
    ) -> None:
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
        self.router = Router(width, experts, top_k, device=options.get("device")) if router is None else router
        if not isinstance(self.router, Router) or (self.router.weight.shape, self.router.top_k) != (
            (experts, width),
            top_k,
        ):
            raise InvalidInputError(
                f"router must be a deep_gemm.nn.Router({width}, {experts}, {top_k}), but it is {self.router!r}."
            )
        check_word("weights", weights, Literal["fp8", "mxfp4"])
        check_word("activation", activation, Gate)
        self.activation: Gate = activation
        self.limit = 7.0 if limit is None and activation == "swigluoai" else limit
        self.gate_up: FP8GroupedLinear | FP4GroupedLinear
        self.down: FP8GroupedLinear | FP4GroupedLinear
        if weights == "fp8":
            if activations is not None or bias:
                raise InvalidInputError("activations and bias are for weights='mxfp4', but weights is 'fp8'.")
            if (activation, limit) != ("swiglu", None) and options.get("mode") != "inference":
                raise InvalidInputError(
                    "activation and limit are for mode='inference': gradients are those of SwiGLU without a limit."
                )
            self.gate_up = FP8GroupedLinear(experts, width, 2 * hidden, **options)
            self.down = FP8GroupedLinear(experts, hidden, width, **options)
            return
        if wrong := [name for name in options if name not in ("device", "dtype", "mode")]:
            raise InvalidInputError(f"{wrong[0]} must be left out with weights='mxfp4', which are not trained.")
        if options.get("mode") != "inference":
            raise InvalidInputError("mode must be 'inference' with weights='mxfp4', which are not trained.")
        more: dict[str, Any] = {"activations": activations or "fp8", "bias": bias, "device": options.get("device")}
        more["dtype"] = options.get("dtype") or torch.bfloat16
        self.gate_up = FP4GroupedLinear(experts, width, 2 * hidden, **more)
        self.down = FP4GroupedLinear(experts, hidden, width, **more)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the experts of tokens x (tokens, width): (tokens, top_k) float32 and int64."""
        return self.router.choose(x)

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
        sent = tokens, chosen, self.gate_up.num_groups, self._whole
        if not moe_chain.runs_on(x.device):
            rows = self.exchange(*sent)
            return (rows * weights[..., None]).sum(1).to(torch.bfloat16).view(x.shape)  # in float32, as weights are
        rows, order = self.exchange.rows(*sent)
        y: Tensor = sums.WeightedSum.apply(rows, weights, order)
        return y.view(x.shape)

    def _whole(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each row by one expert of this rank, with the weight 1."""
        return self._computed(x, torch.ones_like(chosen, dtype=torch.float32), chosen)

    def _computed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if (chain := self._chain(x, weights)) is not None:
            self._refuse_gradient(x)
            how: dict[str, Any] = {"clamp": self.limit}
            if isinstance(self.gate_up, FP4GroupedLinear):
                biases = tuple(each.own(each.bias) for each in (self.gate_up, self.down) if each.bias is not None)
                how |= {"activation": self.activation, "bias": biases or None}
            pairs = self.gate_up.plain(), self.down.plain()
            return chain(x, chosen.contiguous(), weights.contiguous(), *pairs, **how)
        routing = Routing.from_choices(chosen, self.gate_up.local_groups)
        for watch in self.watchers:
            watch(x, routing)
        gate_up, down = self.gate_up, self.down
        is_fp8 = isinstance(gate_up, FP8GroupedLinear) and isinstance(down, FP8GroupedLinear)
        if is_fp8 and (gate_up.takes_gradient() or down.takes_gradient()):
            return _recorded(x, weights, routing, gate_up, down)
        return self._plain(x, weights, routing)

    def hidden(self, x: Tensor, routing: Routing) -> Tensor:
        """Gate and up of the rows of all experts, without bias and gradients: (rows, 2 * hidden) bfloat16."""
        layer: Any = self.gate_up  # whose product takes its operand
        hidden: Tensor = layer.product(layer.operand_of(routing.spread(x.detach())), routing)
        return hidden

    def _chain(self, x: Tensor, weights: Tensor) -> Callable[..., Tensor] | None:
        """What computes the experts in one call. None if nothing does with these weights or on this GPU, if the router
        takes a gradient or rows are watched, and for a bias that is not bfloat16."""
        if self.watchers or (torch.is_grad_enabled() and weights.requires_grad):
            return None
        if self.gate_up.local_groups > MOST_EXPERTS or not moe_chain.runs_on(x.device):
            return None
        layers = self.gate_up, self.down
        if isinstance(self.gate_up, FP4GroupedLinear):
            half = all(each.bias is None or each.bias.dtype == torch.bfloat16 for each in layers)
            return _CHAINS[f"mxfp4 {self.gate_up.activations}"] if half else None
        is_stored = all(each.mode == "inference" for each in layers) and self.activation == "swiglu"
        return _CHAINS["fp8"] if is_stored else None

    @staticmethod
    def _refuse_gradient(x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInputError(
                "x requires grad, and the weights of the experts take none: gradients end here. Call the layer under "
                "torch.no_grad(), or build it with mode='training'."
            )

    def _plain(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        self._refuse_gradient(x)
        layer: Any = self.down
        out = layer.product(self._gated(self.hidden(x, routing), routing), routing)
        chosen = routing.choices(out)
        if isinstance(layer, FP4GroupedLinear) and layer.bias is not None:
            chosen = layer.add_bias(chosen, routing.labels[routing.rows])
        return (chosen * weights[..., None]).sum(1).to(x.dtype)

    def _gated(self, hidden: Tensor, routing: Routing) -> Any:
        """The operand of the second product."""
        bias: dict[str, Any] = {}
        out = torch.float8_e4m3fn
        if isinstance(self.gate_up, FP4GroupedLinear):
            out = torch.float8_e4m3fn if self.gate_up.activations == "fp8" else hidden.dtype
            if self.gate_up.bias is not None:
                bias = {"bias": self.gate_up.own(self.gate_up.bias).to(hidden.dtype), "groups": routing.labels}
        elif (self.activation, self.limit) == ("swiglu", None):
            return quantize.rows(hidden, gated=True)
        if self.activation == "swigluoai":
            return fused.swigluoai_and_mul(hidden, out, limit=self.limit, **bias)
        return fused.silu_and_mul(hidden, out, limit=self.limit, **bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        expert_names.adapt(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *rest)


_CHAINS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "mxfp4 fp8": fp4_moe.fp8_fp4_moe,
        "mxfp4 bf16": fp4_moe.bf16_fp4_moe,
        "fp8": moe.fp8_moe,
    }
)
"""What computes experts in one call, by the format of their weights. `MoE._plain` has the launches of others."""


def _recorded(x: Tensor, weights: Tensor, routing: Routing, gate_up: Any, down: Any) -> Tensor:
    rows, tokens = routing.places, routing.index
    rows, tokens = routing.rows.int() if rows is None else rows, routing.tokens.int() if tokens is None else tokens
    places = routing.rows, rows, tokens, routing.labels, routing.sizes
    how = gate_up.main_grad(), down.main_grad(), gate_up.weight_gradient, down.weight_gradient
    (of_gate_up, *cast), (of_down, *more) = gate_up.recorded(), down.recorded()
    y: Tensor = Experts.apply(x, weights, of_gate_up, of_down, *places, *how, *cast, *more)
    return y
