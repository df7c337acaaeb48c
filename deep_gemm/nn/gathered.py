"""Weights that FSDP2 gathers as FP8: half of the bytes of bfloat16 move between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.quantize import Quantized
from deep_gemm.runtime.sharding import why_not_divided

aten = torch.ops.aten


def why_not_sharded(shape: torch.Size, ranks: int) -> str:
    """Why ``ranks`` shards of a weight cannot be cast one by one, as a sentence without its end; "" if they can. Those
    of experts have whole experts."""
    if len(shape) == 3:
        return why_not_divided("The number of experts", shape[0], ranks, 1)
    return why_not_divided("The number of rows", shape[0], ranks)


class Sharded(Tensor):
    """A weight (out, in) or (groups, out, in) of 16 or 32 bits, of which FSDP2 keeps shards. They are cast to FP8
    before they are gathered.

    FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which is its interface for such tensors.
    """

    part: Tensor

    @staticmethod
    def __new__(cls, part: Tensor) -> Sharded:
        made = Tensor._make_wrapper_subclass(
            cls, part.shape, part.stride(), part.storage_offset(), dtype=part.dtype, device=part.device
        )
        made.part = part
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain, named = tree_map_only(Sharded, lambda x: x.part, (args, kwargs or {}))
        found = func(*plain, **named)
        if args and isinstance(args[0], Sharded) and found is args[0].part:
            return args[0]  # an operation in place
        return tree_map_only(Tensor, Sharded, found) if func in _KEEP_THEIR_CLASS else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded({self.part!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A checkpoint has a plain tensor."""
        return self.part.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What is gathered: E4M3 values of the shard, as bytes, and their scales."""
        from deep_gemm.nn.stored import cast  # here: it imports this module

        if wrong := why_not_sharded(outer_size, mesh.size()):
            raise InvalidInputError(f"{wrong}. Call gather_in_fp8 with the number of ranks of fully_shard.")
        values, scales = cast(self.part)
        return (values.view(torch.uint8), scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight for a pass. From the second one on it is in the memory of the first: nothing is left to do."""
        if out is not None:
            return None
        values, scales = outputs
        return Gathered((values.view(torch.float8_e4m3fn), scales), param_dtype), ()


_KEEP_THEIR_CLASS = {
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}
"""Operations that shard, move and copy weights. Results of others, such as states of an optimizer, are plain."""


class Gathered(Tensor):
    """A whole weight (out, in) or (groups, out, in) in FP8. For autograd it is a tensor of ``dtype``, of which its
    gradient is too."""

    pair: Quantized

    @staticmethod
    def __new__(cls, pair: Quantized, dtype: torch.dtype) -> Gathered:
        values = pair[0]
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        made.pair = pair
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x = args[0]
        if func in (aten.detach.default, aten.alias.default) or (
            func is aten.as_strided.default and tuple(args[1]) == tuple(x.shape)
        ):
            return Gathered(x.pair, x.dtype)
        if func is aten.zeros_like.default:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        raise UnsupportedError(
            f"{func} of a weight that was gathered in FP8: only its layer can read it. Read the parameter outside of "
            "the forward and backward pass, when it is sharded."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def transposed(self) -> Quantized:
        """The transpose, (in, out) or (groups, in, out). Blocks are those of the weight: nothing is rounded again."""
        values, scales = self.pair
        return values.view(torch.uint8).mT.contiguous().view(values.dtype), scales.mT.contiguous()
