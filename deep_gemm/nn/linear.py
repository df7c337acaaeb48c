"""Linear layers whose three products are those of this library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts, products, stored
from deep_gemm.nn.weights import Divisible, FP8Weights, Options, find_main_grad
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.tensors import kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NotByTorch:
    """What `torch.distributed.tensor.distribute_module`, which torch's own styles call, finds where it looks whether a
    layer is divided already. It would divide FP8 values, and fail in the backend or in the forward."""

    def __bool__(self) -> NoReturn:
        raise InvalidInputError(
            "torch's styles and distribute_module cannot divide a linear layer of deep_gemm.nn, whose products take no "
            "DTensors. Give parallelize_module ColwiseParallel or RowwiseParallel of deep_gemm.nn.parallel."
        )


class Linear(Divisible, nn.Linear):
    """What the linear layers share: inputs of any rank, the dtype of the result, and bias. They are `torch.nn.Linear`
    for what looks for that, such as PEFT, and have no weight of its making."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
    shards: tuple[int, int] = 1, 1
    """Among how many ranks the output and the input features are divided: see `deep_gemm.nn.parallel`."""

    _distribute_module_applied = NotByTorch()

    def reset_parameters(self) -> None:
        """Random weights and bias, as those of `torch.nn.Linear`."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def product(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """x (..., in), as `casts.compact` makes it, times the transpose of the weight, plus ``bias``: (..., out), or
        (tokens, out), in ``dtype``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) bfloat16, float16 or float32; the result is (..., out_features), in the dtype of x or of
        autocast."""
        rows = casts.compact(x, self.in_features // self.shards[1])
        # As `casts.result_dtype`: a call of a function, and a device object, cost a microsecond.
        kind = "cuda" if x.is_cuda else x.device.type
        if kind == "meta":
            casts.refuse_meta()
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # A bias of a layer whose input features are divided is added to the sum of all ranks.
        bias = self.bias
        if bias is not None and self.is_divided:
            bias = self.own(bias) if self.shards[1] == 1 else None
        y = self.product(rows, dtype, bias)
        return y if y.dim() == x.dim() else y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def why_not_options(linear: Any, options: Mapping[str, Any]) -> str:
    """Why a layer in the place of ``linear``, whose parameters stay where and what they are, cannot have options, as a
    sentence without its end; "" if it can. Values of FP8 become weights of any dtype."""
    if options.get("device") is not None:
        return "device must not be given, because parameters stay where they are: move the layer"
    own = linear.weight.dtype
    if own != stored.E4M3 and (dtype := options.get("dtype") or own) != own:
        return f"dtype must be that of the weight, which stays as it is, {own}, but it is {dtype}: cast the layer"
    return ""


class FP8Linear(Linear, FP8Weights):
    """A linear layer, ``y = x @ weight^T + bias``, whose products are FP8: `torch.nn.Linear` in its place.

    Args:
        in_features, out_features: sizes, multiples of 16.
        bias: whether there is a bias, which stays in ``dtype``.
        mode: "training": ``weight`` is a parameter of ``dtype``, cast to FP8 with scales of 128 x 128 for each forward
            pass. Gradients are FP8 products too: activations and gradients have scales of 1 x 128, as in DeepSeek-V3.
            "inference": ``weight`` is E4M3, with float32 ``weight_scale_inv`` (ceil(out / 128), ceil(in / 128)). It
            takes half of the memory of bfloat16 and no gradient; gradients of x pass through it.
        weight_gradient: "1x128", or "mixed": x has scales of 128 x 128 in the weight gradient, which is faster, and
            less exact for a channel that is 2^13 or more below another of its 128: `deep_gemm.nn.check_spread` tells.
            The attribute may be set at any time.
        recast: "always", or "when changed": the cast of the last forward pass is kept until an operation or an
            optimizer of torch writes to ``weight``, which saves casts while gradients of several batches are added. It
            takes two bytes a weight, and does not see what is written through ``weight.data``. Compiled layers always
            cast.
        fuse_wgrad_accumulation: the weight gradient is added to ``weight.main_grad`` (float32, of the weight's shape)
            by the kernel. ``weight.grad`` stays None. Zero ``main_grad`` in place: it is the tensor of the forward pass
            that is added to.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    In inference mode ``state_dict()`` has DeepSeek's names and layout: ``weight``, ``weight_scale_inv``, ``bias``. In
    training mode it is that of `torch.nn.Linear`. A layer loads either: it casts, or multiplies values by their scales.
    It also loads E4M3 with scales that are called ``weight_scale``, ``scale`` or ``scale_inv``, of blocks, of rows or
    one for the tensor, as compressed-tensors, ModelOpt and DeepSeek-V4 store them. In inference mode values are cast
    again, which rounds once more, unless 128 x 128 blocks can have these scales. Values without scales, scales without
    values and other dtypes are an InvalidInputError.

    Raises InvalidInputError, which names the argument.

    >>> layer = deep_gemm.nn.FP8Linear(256, 128)
    >>> layer(torch.randn(2, 30, 256).bfloat16()).sum().backward()
    >>> layer.weight.grad.shape
    torch.Size([128, 256])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        FP8Weights.__init__(self, (out_features, in_features), **options)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.bias = nn.Parameter(torch.zeros(out_features, **place)) if bias else None
        if self.mode == "training":
            self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Module, **options: Any) -> FP8Linear:
        """A layer with the weight and bias of ``linear``: a `torch.nn.Linear`, or an `FP8Linear`, whose mode may be the
        other one. ``options`` are keywords of `FP8Linear`, without ``device``. In training mode the parameters are the
        same objects: an optimizer that has them goes on. ``dtype`` says what weights become that were FP8.

        >>> deep_gemm.nn.FP8Linear.from_linear(torch.nn.Linear(256, 512), mode="inference").weight.dtype
        torch.float8_e4m3fn
        """
        if not isinstance(linear, nn.Linear):
            raise InvalidInputError(f"linear must be a torch.nn.Linear or an FP8Linear, but it is {kind_of(linear)}.")
        if wrong := why_not_options(linear, options):
            raise InvalidInputError(f"{wrong}.")
        weight: Any = linear.weight
        scales = linear.weight_scale_inv if isinstance(linear, FP8Linear) and linear.mode == "inference" else None
        dtype = weight.dtype if scales is None else options.get("dtype") or torch.bfloat16
        sizes = linear.in_features, linear.out_features
        layer = cls(*sizes, False, **{**options, "dtype": dtype, "device": "meta"})
        if layer.mode == "inference":
            layer.set_stored(stored.cast(weight) if scales is None else (weight, scales))
        else:
            layer.weight = weight if scales is None else nn.Parameter(stored.plain(weight, scales, dtype))
        layer.bias = linear.bias
        return layer.train(linear.training)

    def reset_parameters(self) -> None:
        """Random weights and bias, as those of `torch.nn.Linear`; in inference mode zeros, as those of a new layer."""
        if self.mode == "training":
            super().reset_parameters()
            return
        self.reset_stored()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def product(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """See `Linear.product`."""
        if torch.is_grad_enabled():
            if self.weight.requires_grad:
                weight, *cast = self.recorded()
                how = dtype, self.main_grad(), self.weight_gradient
                return products.FP8Product.apply(x, weight, bias, *cast, *how)
            if x.requires_grad or (bias is not None and bias.requires_grad):
                return products.FrozenFP8Product.apply(x, bias, *self.plain(), dtype)
        return products.linear(x, *self.operand(), bias, dtype)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class BF16Linear(Linear):
    """A linear layer, ``y = x @ weight^T + bias``, by this library's 16-bit products: `torch.nn.Linear` in its place.

    Args:
        in_features, out_features: sizes.
        bias: whether there is a bias.
        fuse_wgrad_accumulation: the weight gradient is added to ``weight.main_grad`` (float32, of the weight's shape)
            by the kernel. ``weight.grad`` stays None.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Products are those of the result's dtype, bfloat16 or float16: that of x, or of autocast. A weight of another dtype
    is cast. Raises InvalidInputError for a result in float32. It loads what an `FP8Linear` does: values of E4M3 are
    multiplied by their scales.

    >>> layer = deep_gemm.nn.BF16Linear(256, 128, dtype=torch.bfloat16)
    >>> layer(torch.randn(2, 30, 256).bfloat16()).shape
    torch.Size([2, 30, 128])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fuse_wgrad_accumulation: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_index(name, size, 1, MAX_SIZE, "a whole number from 1")
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **place))
        self.bias = nn.Parameter(torch.empty(out_features, **place)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Module, **options: Any) -> BF16Linear:
        """A layer with the parameters of ``linear``, which are the same objects. ``options`` are keywords of
        `BF16Linear`.

        >>> linear = torch.nn.Linear(256, 512).bfloat16()
        >>> deep_gemm.nn.BF16Linear.from_linear(linear).weight is linear.weight
        True
        """
        if not isinstance(linear, nn.Linear):
            raise InvalidInputError(f"linear must be a torch.nn.Linear, but it is {kind_of(linear)}.")
        if wrong := why_not_options(linear, options):
            raise InvalidInputError(f"{wrong}.")
        if linear.weight.dtype.itemsize < 2:
            raise InvalidInputError(
                f"linear must have a weight of 16 or 32 bits, but it is {linear.weight.dtype}, and its scales would be "
                "lost. Use FP8Linear."
            )
        layer = cls(linear.in_features, linear.out_features, False, **{**options, "device": "meta"})
        weight: Any = linear.weight
        layer.weight, layer.bias = weight, linear.bias
        return layer.train(linear.training)

    def product(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """See `Linear.product`."""
        if dtype not in products.HALVES:
            raise InvalidInputError(
                f"x must be torch.bfloat16 or torch.float16, but it is {dtype}. Cast it, or call the layer under "
                "torch.autocast."
            )
        fused = self.fuse_wgrad_accumulation and self.weight.requires_grad and torch.is_grad_enabled()
        main = self.own(find_main_grad(self.weight)) if fused else None
        if x.dtype != dtype:
            casts.check_read(x)
        rows = x.to(dtype).reshape(-1, x.shape[-1])
        return products.HalfProduct.apply(rows, self.own(self.weight).to(dtype), bias, main)
