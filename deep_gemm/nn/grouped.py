"""Linear layers of several groups of rows, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deep_gemm import grouped
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts
from deep_gemm.nn.casts import WeightGradient
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import FP8Weights, Mode, Recast, check_word
from deep_gemm.quantize import Quantized, rows
from deep_gemm.tensors import kind_of


def product(a: Quantized, b: Quantized, labels: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each row of a (rows, K) times the matrix of its group, b (groups, N, K): (rows, N). Rows of padding are zeros on
    the left, hence in the result: this form of the call writes them too."""
    d = torch.empty(a[0].shape[0], b[0].shape[1], dtype=torch.bfloat16, device=a[0].device)
    grouped.m_grouped_fp8_gemm_nt_contiguous(a, b, d, labels)
    return d.to(dtype)


def weight_gradient(
    a: Quantized, b: Quantized, sizes: Tensor, dtype: torch.dtype, main: Tensor | None, wgrad: str
) -> Tensor | None:
    """For each group the product of its columns of a (M, rows) and of b (N, rows): (groups, M, N), added to ``main`` if
    it is a tensor."""
    recipe = casts.RECIPES[wgrad]
    if main is not None:
        grouped.k_grouped_fp8_gemm_nt_padded(a, b, main, sizes, c=main, recipe=recipe)
        return None
    out = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    d = torch.empty(sizes.shape[0], a[0].shape[0], b[0].shape[0], dtype=out, device=a[0].device)
    grouped.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes, recipe=recipe)
    return d.to(dtype)


class GroupedProduct(torch.autograd.Function):
    """Rows of x times the transpose of their group's ``weight``. See `FP8Product`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        values: Tensor,
        scales: Tensor,
        turned: Tensor | None,
        turned_scales: Tensor | None,
        labels: Tensor,
        sizes: Tensor,
        main: Any,
        wgrad: str,
    ) -> Tensor:
        plain, columns = casts.tokens(x, casts.BLOCKS[wgrad])
        ctx.save_for_backward(*columns, weight if turned is None else turned, turned_scales, labels, sizes)
        ctx.main, ctx.wgrad, ctx.dtypes = main, wgrad, (x.dtype, weight.dtype)
        return product(plain, (values, scales), labels, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, sfx, w, sfw, labels, sizes = ctx.saved_tensors
        plain, columns = casts.gradients(dy)
        dx = product(plain, casts.transposed(w, sfw), labels, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(columns, (x, sfx), sizes, ctx.dtypes[1], ctx.main, ctx.wgrad)
        return dx, dw, *(None,) * 8


class FP8GroupedLinear(FP8Weights):
    """Linear layers without bias, one for each group of rows, as FP8 products: the experts of a mixture.

    Args:
        num_groups: the number of groups.
        in_features, out_features: sizes, multiples of 16.
        mode, weight_gradient, recast, fuse_wgrad_accumulation, device, dtype: see `FP8Linear`. ``weight`` is (groups,
            out, in), ``weight_scale_inv`` (groups, ceil(out / 128), ceil(in / 128)). A cast takes one launch a group.

    Raises InvalidInputError, which names the argument.

    >>> layer = deep_gemm.nn.FP8GroupedLinear(4, 256, 128)
    >>> routing = deep_gemm.nn.Routing.from_choices(torch.randint(4, (30, 1)), experts=4)
    >>> layer(routing.spread(torch.randn(30, 256).bfloat16()), routing).shape
    torch.Size([640, 128])
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        mode: Mode = "training",
        weight_gradient: WeightGradient = "1x128",
        recast: Recast = "always",
        fuse_wgrad_accumulation: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_word("weight_gradient", weight_gradient, WeightGradient)
        shape = num_groups, out_features, in_features
        dtype = dtype or torch.get_default_dtype()
        super().__init__(shape, mode, recast, fuse_wgrad_accumulation, device, dtype)
        self.num_groups, self.weight_gradient = num_groups, weight_gradient
        if mode == "training":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights, as those of `torch.nn.Linear`."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x (rows, in_features), in the order of ``routing``, such as ``routing.spread(tokens)``; the result is (rows,
        out_features), in the dtype of x. Rows of padding must be zeros, and are zeros in the result."""
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.in_features:
            came = f"its shape is {tuple(x.shape)}" if isinstance(x, Tensor) else f"it is {kind_of(x)}"
            raise InvalidInputError(f"x must be a tensor (rows, {self.in_features}), but {came}.")
        x = casts.row_major(x)
        if self.takes_gradient():
            places = routing.labels, routing.sizes
            how = self.main_grad(), self.weight_gradient
            return GroupedProduct.apply(x, *self.recorded(), *places, *how)
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInputError(
                "x requires grad, and the weights of this layer take none: gradients end here. Call the layer under "
                "torch.no_grad(), or build it with mode='training'."
            )
        return product(rows(x), self.plain(), routing.labels, x.dtype)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_groups={self.num_groups}, {super().extra_repr()}"
