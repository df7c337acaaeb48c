"""Linear layers of several groups of rows, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts
from deep_gemm.nn.products import GroupedFP8Product, grouped_product
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import FP8Weights, Options
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.quantize import Quantized, rows
from deep_gemm.tensors import kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        **options: Unpack[Options],
    ) -> None:
        check_index("num_groups", num_groups, 0, MAX_SIZE, "a whole number from 0")
        super().__init__((num_groups, out_features, in_features), **options)
        self.num_groups = num_groups
        if self.mode == "training":
            self.reset_parameters()

    @property
    def local_groups(self) -> int:
        """The groups that this rank has."""
        return int(self.own(self.weight).shape[0])

    def operand_of(self, x: Tensor) -> Quantized:
        """What `product` takes of rows of 16 or 32 bits."""
        return rows(x)

    def product(self, x: Quantized, routing: Routing) -> Tensor:
        """The product of rows that are cast, in the order of ``routing``, without gradients."""
        return grouped_product(x, self.plain(), torch.bfloat16, routing.labels)

    def reset_parameters(self) -> None:
        """Random weights, as those of `torch.nn.Linear`; in inference mode zeros, as those of a new layer."""
        if self.mode == "inference":
            self.reset_stored()
            return
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x (rows, in_features), in the order of ``routing``, such as ``routing.spread(tokens)``; the result is (rows,
        out_features), in the dtype of x or of autocast. Rows of padding must be zeros, and are zeros in the
        result."""
        x = casts.row_major(casts.compact(x, self.in_features, is_matrix=True))
        if not isinstance(routing, Routing):
            raise InvalidInputError(f"routing must be a deep_gemm.nn.Routing, but it is {kind_of(routing)}.")
        dtype = casts.result_dtype(x)
        if self.takes_gradient():
            groups = routing.labels, routing.sizes
            how = dtype, self.main_grad(), self.weight_gradient
            y: Tensor = GroupedFP8Product.apply(x, *self.recorded(), *groups, *how)
            return y
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInputError(
                "x requires grad, and the weights of this layer take none: gradients end here. Call the layer under "
                "torch.no_grad(), or build it with mode='training'."
            )
        return grouped_product(rows(x), self.plain(), dtype, routing.labels)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_groups={self.num_groups}, {super().extra_repr()}"
