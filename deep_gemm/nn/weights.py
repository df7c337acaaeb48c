"""The FP8 weights of a module: a parameter of 16 or 32 bits that is cast, or E4M3 values and their scales."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from deep_gemm import quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts, stored
from deep_gemm.nn.casts import WeightGradient
from deep_gemm.ops.layouts import TMA_BYTES
from deep_gemm.quantize import Quantized
from deep_gemm.tensors import shown

Mode: TypeAlias = Literal["training", "inference"]
Recast: TypeAlias = Literal["always", "when changed"]
MASTERS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that FP8 is cast from."""


def check_word(name: str, value: Any, words: Any) -> None:
    """Refuse what is not one of the words of a Literal type."""
    if value not in get_args(words):
        known = " or ".join(map(repr, get_args(words)))
        raise InvalidInputError(f"{name} must be {known}, but it is {shown(value)}.")


def why_not(in_features: int, out_features: int, dtype: torch.dtype) -> str:
    """Why an FP8 layer cannot have these sizes or this dtype, as the end of a sentence; "" if it can."""
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if not isinstance(size, int) or size < TMA_BYTES or size % TMA_BYTES:
            return f"{name} must be a multiple of {TMA_BYTES}, but it is {shown(size)}"
    if dtype not in MASTERS:
        return f"weights must be {', '.join(map(str, MASTERS[:2]))} or {MASTERS[2]}, but they are {dtype}"
    return ""


class Divisible(nn.Module):
    """A module with a weight, which it loads from values and scales too. Its parameters may be divided among ranks, as
    DTensors: see `deep_gemm.nn.parallel`."""

    weight: nn.Parameter
    mode: Mode = "training"
    is_divided = False

    def own(self, parameter: Any) -> Any:
        """What this rank has of a parameter. Gradients pass through it."""
        return parameter.to_local() if self.is_divided else parameter

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if not isinstance(weight, Tensor) or weight.shape == self.weight.shape:  # else torch says what it should be
            stored.adapt(state_dict, prefix, self.mode, self.weight.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Options(TypedDict, total=False):
    """The keywords of all FP8 layers. Their defaults are in `FP8Weights`."""

    mode: Mode
    weight_gradient: WeightGradient
    recast: Recast
    fuse_wgrad_accumulation: bool
    device: Any
    dtype: torch.dtype | None


def refuse_unknown(layer: type, options: Iterable[str]) -> None:
    """Refuse keywords that no FP8 layer has, as Python does, under the name of the layer that was called."""
    for name in options:
        if name not in Options.__annotations__:
            known = ", ".join(Options.__annotations__)
            raise TypeError(f"{layer.__name__} has no argument {name!r}. Its options are {known}.")


class FP8Weights(Divisible):
    """A module with a weight (out, in), or (groups, out, in). See `deep_gemm.nn.FP8Linear`."""

    weight_scale_inv: nn.Parameter

    def __init__(
        self,
        shape: tuple[int, ...],
        /,
        *,
        mode: Mode = "training",
        weight_gradient: WeightGradient = "1x128",
        recast: Recast = "always",
        fuse_wgrad_accumulation: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        dtype = dtype or torch.get_default_dtype()
        for name, value, words in (
            ("mode", mode, Mode),
            ("weight_gradient", weight_gradient, WeightGradient),
            ("recast", recast, Recast),
        ):
            check_word(name, value, words)
        if wrong := why_not(shape[-1], shape[-2], dtype):
            raise InvalidInputError(f"{wrong}.")
        nn.Module.__init__(self)
        self.is_resharded = False
        """Whether FSDP2 gathers the weight for each pass. It writes to the same memory without counting versions, so
        that no cast is kept; backward makes one of its own, since one that is saved would stay whole in memory."""
        self.out_features, self.in_features = shape[-2:]
        self.mode, self.weight_gradient, self.recast = mode, weight_gradient, recast
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._cast: tuple[Any, Any, tuple[Quantized, Quantized]] | None = None
        if mode == "inference":
            self.set_stored(stored.empty(shape, device))
        else:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        """FSDP2 sets the weight: its gathered one before a pass, and the shard after it. Users may set
        ``weight_gradient``."""
        if name == "weight" and hasattr(value, "to_local"):
            self.is_resharded = True
        if name == "weight_gradient":
            check_word(name, value, WeightGradient)
        super().__setattr__(name, value)

    def set_stored(self, weight: Quantized) -> None:
        """Make E4M3 values and their scales the parameters."""
        for name, tensor in zip(("weight", "weight_scale_inv"), weight, strict=True):
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def reset_stored(self) -> None:
        """Make E4M3 values zeros, and their scales ones."""
        with torch.no_grad():
            self.own(self.weight).view(torch.uint8).zero_()
            self.own(self.weight_scale_inv).fill_(1)

    def takes_gradient(self) -> bool:
        """Whether the weight takes a gradient from what is computed now."""
        return torch.is_grad_enabled() and self.weight.requires_grad

    def plain(self) -> Quantized:
        """The weight in FP8."""
        if self.mode == "inference":
            return self.own(self.weight), self.own(self.weight_scale_inv)
        return self._kept()[0] if self._keeps() else stored.cast(self.own(self.weight))

    def operand(self) -> tuple[Tensor, Tensor | None]:
        """The weight of a product without gradients: in FP8 with its scales, or as it is, and then the product casts
        it."""
        if self.is_divided or self.is_resharded or self._keeps():
            return self.plain()
        if self.mode == "inference":
            return self.weight, self.weight_scale_inv
        return casts.row_major(self.weight, "weight"), None

    def recorded(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The weight that takes the gradient, its cast, and the cast of its transpose: None if backward makes it. A
        matrix whose casts are not kept has none: its product makes both."""
        if self.mode == "inference":
            raise InvalidInputError(
                "weight requires grad, but it is E4M3, which takes none. Call requires_grad_(False) on the layer, or "
                "convert it to mode='training'."
            )
        weight = self.own(self.weight)
        if weight.stride(-1) != 1:  # as `casts.row_major`: a call costs the host as much as this
            weight = weight.contiguous()
        if self.is_resharded:
            return weight, *stored.cast(weight), None, None
        if self._keeps():
            plain, turned = self._kept()
        elif weight.dim() == 2:
            return weight, None, None, None, None
        else:
            plain, turned = quantize.blocks_and_transpose(weight.detach())
        return weight, *plain, *turned

    def _keeps(self) -> bool:
        if self.recast != "when changed" or self.is_resharded:
            return False
        return not (torch.compiler.is_compiling() or self.weight.is_inference())

    def _kept(self) -> tuple[Quantized, Quantized]:
        held = self.weight  # a fresh tensor each time, maybe with the memory of the last one, if it is parametrized
        weight = self.own(held).detach()
        key = held._version, _steps(), weight.data_ptr(), weight.dtype
        if self._cast is None or self._cast[0]() is not held or self._cast[1] != key:
            with torch.inference_mode(False):  # it may be saved for a backward pass later
                self._cast = weakref.ref(held), key, quantize.blocks_and_transpose(casts.row_major(weight, "weight"))
        return self._cast[2]

    def main_grad(self) -> Tensor | None:
        """The tensor to which weight gradients are added; None if they become ``weight.grad``."""
        if not self.fuse_wgrad_accumulation or not self.weight.requires_grad:
            return None
        if self.is_resharded:
            raise InvalidInputError(
                "fuse_wgrad_accumulation must be False for a weight that FSDP2 shards, because it reduces weight.grad "
                "among ranks, but it is True."
            )
        return self.own(find_main_grad(self.weight))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Weights:
        """`to`, `cuda`, `bfloat16` and the like: E4M3 values and their scales move, and keep their dtypes."""
        self._cast = None
        super()._apply(self._moved(fn) if self.mode == "inference" else fn, recurse)
        return self

    def _moved(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``fn`` casts tensors of floating point, and leaves integers alone."""

        def moved(x: Tensor) -> Tensor:
            bits = torch.uint8 if x is self.weight else torch.int32 if x is self.weight_scale_inv else None
            return fn(x) if bits is None else fn(x.detach().view(bits)).view(x.dtype)

        return moved

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cast": None}

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, mode={self.mode!r}"


def _steps() -> int:
    """The steps of torch's optimizers since the first call of this. Fused ones write without counting versions."""
    return _counter()[0]


@functools.cache
def _counter() -> list[int]:
    count = [0]

    def stepped(*_: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(stepped)
    return count


def find_main_grad(weight: Any) -> Tensor:
    """The float32 tensor to which weight gradients are added."""
    found = getattr(weight, "main_grad", None)
    if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.shape != weight.shape:
        raise InvalidInputError(
            f"weight.main_grad must be a torch.float32 tensor of the weight's shape {tuple(weight.shape)}, because the "
            "layer has fuse_wgrad_accumulation=True, but "
            + (f"it is {found.dtype} {tuple(found.shape)}." if isinstance(found, Tensor) else "there is none.")
            + " Set layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)."
        )
    return found
