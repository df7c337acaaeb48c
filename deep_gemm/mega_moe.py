"""DeepGEMM's fused mixture-of-experts layer for Hopper: its names, buffers and semantics, by the launches of
`deep_gemm.fp8_moe`, and for several ranks by those of `ops.moe_ranks` beside them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import quantize
from .errors import InvalidInputError, UnsupportedError
from .ops import chain, checks, moe_chain, moe_ranks
from .ops.checks import MAX_SIZE, check_index, shown
from .parts import EIGHT
from .quantize import Quantized
from .spec import SCALE_BLOCK, align

__all__ = [
    "SymmBuffer",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "transform_weights_for_mega_moe_sm90",
]

TOKEN_ALIGNMENT = 128
"""Of the most tokens of a rank."""


class SymmBuffer:
    """What a rank gives to the layer: see `get_symm_buffer_for_sm90_mega_moe`. One serves all layers of these sizes.

    Attributes: ``x`` (rows, hidden) E4M3, ``x_sf`` (rows, hidden / 128) float32, ``topk_idx`` (rows, topk) int64,
    ``topk_weights`` (rows, topk) float32, ``num_max_tokens_per_rank``, which is rows, and ``group``.

    >>> buffer = deep_gemm.SymmBuffer(None, 8, 100, 2, 256, 128)
    >>> buffer.x_sf.shape, buffer.topk_idx.unique().tolist()
    (torch.Size([128, 2]), [-1])
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
    ) -> None:
        self.ranks: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()
        if self.ranks > moe_ranks.MOST_RANKS:
            raise UnsupportedError(f"group has {self.ranks} ranks, but at most {moe_ranks.MOST_RANKS} are supported.")
        for name, size in (("num_experts", num_experts), ("num_max_tokens_per_rank", num_max_tokens_per_rank)):
            check_index(name, size, 1, MAX_SIZE, "a whole number from 1")
        if num_experts % self.ranks:
            raise InvalidInputError(
                f"num_experts must be a multiple of the {self.ranks} ranks of group, but it is {num_experts}."
            )
        check_index("num_topk", num_topk, 1, num_experts, f"from 1 to {num_experts}, the number of experts")
        for name, size in (("hidden", hidden), ("intermediate_hidden", intermediate_hidden)):
            check_index(name, size, 1, MAX_SIZE, "a whole number from 1")
            if size % SCALE_BLOCK:
                raise InvalidInputError(f"{name} must be a multiple of {SCALE_BLOCK}, but it is {size}.")
        self.group, self.num_experts, self.num_topk = group, num_experts, num_topk
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.num_max_tokens_per_rank = rows = align(num_max_tokens_per_rank, TOKEN_ALIGNMENT)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.epochs: Tensor | None = None
        fields = chain.Layout().add_tensor("x", (rows, hidden), torch.float8_e4m3fn)
        fields.add_tensor("x_sf", (rows, hidden // SCALE_BLOCK), torch.float32)
        fields.add_tensor("topk_idx", (rows, num_topk), torch.int64)
        fields.add_tensor("topk_weights", (rows, num_topk), torch.float32)
        if self.ranks > 1:
            fields.add_tensor("slots", (rows * num_topk, hidden), torch.bfloat16)
            fields.add_tensor("flags", (2 * self.ranks,), torch.int32)
            buffer, addresses = shared_buffer(fields.bytes, group, device)
            places = [fields.places[name].offset for name in moe_ranks.FIELDS]
            self.peers = torch.tensor([[base + place for place in places] for base in addresses], device=device)
            self.epochs = torch.zeros(2, dtype=torch.int32, device=device)
            self.slots = fields.places["slots"].of(buffer)
        else:
            buffer = torch.zeros(fields.bytes, dtype=torch.uint8, device=device)
        self.x, self.x_sf, self.topk_idx, self.topk_weights = (
            fields.places[name].of(buffer) for name in moe_ranks.FIELDS[:4]
        )
        self.topk_idx.fill_(-1)

    def destroy(self) -> None:
        """Free the memory. The buffer is of no use then. With several ranks all must have ended their calls."""
        for name in ("x", "x_sf", "topk_idx", "topk_weights", "slots"):
            setattr(self, name, None)


def shared_buffer(size: int, group: Any, device: str) -> tuple[Tensor, list[int]]:
    """Memory of this rank, ``size`` bytes of zeros, and the address of each rank's, by torch's symmetric memory.
    Returns when all ranks' are zeros."""
    if device == "cpu":
        raise UnsupportedError("several ranks need GPUs, which no driver was found for. Pass None for one rank.")
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device(device, torch.cuda.current_device()))
    addresses = [int(address) for address in symmetric.rendezvous(buffer, group).buffer_ptrs]
    buffer.zero_()
    torch.cuda.synchronize()
    dist.barrier(group)
    return buffer, addresses


def get_symm_buffer_for_sm90_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
) -> SymmBuffer:
    """The buffer of a rank, on the current CUDA device, or on the CPU if there is none.

    Args:
        group: a group of torch.distributed, or None for one rank. Several ranks are on GPUs of one host that read each
            other's memory.
        num_experts: experts of all ranks.
        num_max_tokens_per_rank: the most tokens of a call, rounded up to a multiple of 128.
        num_topk: experts of each token.
        hidden, intermediate_hidden: sizes of a token and inside an expert, multiples of 128.
        use_fp8_dispatch: True.
        activation: "swiglu".

    Raises InvalidInputError, which names the argument, and UnsupportedError for more than 32 ranks and other options.

    >>> deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 8, 100, 2, 256, 128).num_max_tokens_per_rank
    128
    """
    if use_fp8_dispatch is not True:
        raise UnsupportedError(
            f"use_fp8_dispatch must be True, since tokens are FP8 here, but it is {use_fp8_dispatch}."
        )
    _check_activation(activation)
    return SymmBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """`get_symm_buffer_for_sm90_mega_moe`. ``num_shared_experts`` must be 0; ``mma_type`` has no effect on Hopper.

    >>> deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 100, 2, 256, 128).x.shape
    torch.Size([128, 256])
    """
    if num_shared_experts != 0:
        raise UnsupportedError(
            f"num_shared_experts must be 0, but it is {shown(num_shared_experts)}. Compute shared experts by products "
            "of their own."
        )
    fp8 = True if use_fp8_dispatch is None else use_fp8_dispatch
    sizes = num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden
    return get_symm_buffer_for_sm90_mega_moe(group, *sizes, fp8, activation)


def transform_weights_for_mega_moe_sm90(l1: Quantized, l2: Quantized) -> tuple[Quantized, Quantized]:
    """Weights as `fp8_mega_moe` takes them.

    Args:
        l1: (experts, 2 * inner, hidden) E4M3, rows of gate and then rows of up, and their scales of 128 x 128.
        l2: (experts, hidden, inner) E4M3, and its scales.

    Returns l1 with 8 rows of gate and 8 rows of up in turn, a copy, and its scales as they were; and l2.

    >>> values = torch.cat([torch.arange(16), -torch.arange(16)]).view(1, 32, 1).to(torch.float8_e4m3fn)
    >>> (turned, _), _ = deep_gemm.transform_weights_for_mega_moe_sm90((values, None), (None, None))
    >>> turned[0, :, 0].int().tolist()[4:12]
    [4, 5, 6, 7, 0, -1, -2, -3]
    """
    (values, scales), w2 = checks.pair("l1", l1), checks.pair("l2", l2)
    checks.check_tensor("the values of l1", values, (3,))
    if values.shape[1] % (2 * EIGHT):
        raise InvalidInputError(
            f"l1 must have a multiple of {2 * EIGHT} rows, gate's and then up's, but it is {tuple(values.shape)}."
        )
    halves = values.view(torch.uint8).unflatten(1, (2, -1, EIGHT))
    return (halves.transpose(1, 2).reshape(values.shape).view(values.dtype), scales), w2


def mega_moe_pre_dispatch_sm90(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int = SCALE_BLOCK,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Write tokens and their choices into a rank's buffer.

    Args:
        x: (tokens, hidden) bfloat16, with contiguous rows, at least ``num_tokens`` of them.
        topk_idx: (tokens, topk) int32 or int64: experts, or -1 for none.
        topk_weights: (tokens, topk) float32.
        buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights: those of a `SymmBuffer`. x is cast with scales of 1 x 128, and
            weights are multiplied by ``routed_scaling_factor``. Rows of choices from ``num_tokens`` on become -1, and
            of weights 0.
        group_size: 128.

    Raises InvalidInputError, which names the argument, and UnsupportedError for another group_size.

    >>> buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 8, 100, 2, 256, 128)
    >>> own = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    >>> x, chosen = torch.ones(3, 256).bfloat16(), torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    >>> deep_gemm.mega_moe_pre_dispatch_sm90(x, chosen, torch.ones(3, 2), *own, num_tokens=3)
    >>> buffer.topk_idx[2:4].tolist()
    [[0, 1], [-1, -1]]
    """
    if group_size != SCALE_BLOCK:
        raise UnsupportedError(f"group_size must be {SCALE_BLOCK} on Hopper, but it is {shown(group_size)}.")
    named = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "buf_x": buf_x, "buf_x_sf": buf_x_sf}
    named |= {"buf_topk_idx": buf_topk_idx, "buf_topk_weights": buf_topk_weights}
    checks.check_tensors("mega_moe_pre_dispatch_sm90", named, {}, (2,), ())
    most = min(x.shape[0], topk_idx.shape[0], topk_weights.shape[0], buf_x.shape[0])
    check_index("num_tokens", num_tokens, 0, most, f"from 0 to {most}, the rows of x, of choices and of the buffer")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"topk_idx must be torch.int32 or torch.int64, but it is {topk_idx.dtype}.")
    if x.dtype != torch.bfloat16 or topk_weights.dtype != torch.float32:
        raise InvalidInputError(
            f"x must be torch.bfloat16 and topk_weights torch.float32, but they are {x.dtype} and {topk_weights.dtype}."
        )
    rows = slice(num_tokens)
    quantize.rows(x.detach()[rows], out=(buf_x[rows], buf_x_sf[rows]))  # `check_tensors` says where gradients end
    with torch.inference_mode():  # inference tensors are written outside of that mode too
        buf_topk_idx[rows].copy_(topk_idx[rows])
        torch.mul(topk_weights[rows], routed_scaling_factor, out=buf_topk_weights[rows])
        buf_topk_idx[num_tokens:].fill_(-1)
        buf_topk_weights[num_tokens:].zero_()


def fp8_mega_moe(
    y: Tensor,
    l1_weights: Quantized,
    l2_weights: Quantized,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
) -> None:
    """The experts of a layer, for the tokens of a buffer.

    ``silu(min(gate, clamp)) * min(max(up, -clamp), clamp) * weight`` is cast to E4M3 with scales of 1 x 128. The row of
    each expert is rounded to bfloat16, and a token's rows are added in the order of its choices, in float32.

    Args:
        y: (tokens, hidden) bfloat16. The first ``tokens`` rows of the buffer are computed. There may be none.
        l1_weights, l2_weights: of `transform_weights_for_mega_moe_sm90`.
        sym_buffer: of `get_symm_buffer_for_sm90_mega_moe`, filled by `mega_moe_pre_dispatch_sm90`.
        cumulative_local_expert_recv_stats: None, or int32 (experts,), to which the number of tokens of each expert is
            added.
        recipe: (128, 128, 128).
        activation: "swiglu".
        activation_clamp: None, or the limit.
        fast_math: no effect.
        num_tokens_bound: None, or a number of tokens that no rank exceeds, from ``tokens`` to what the buffer has room
            for, the same on all ranks. It changes no bit; without it, several ranks look at all rows of their buffers.

    With several ranks each passes the weights of its own experts, and all make the same calls in the same order. A rank
    waits for the others on the device, about a minute at most; then the kernel traps. Results are those of one rank.

    Results repeat bit for bit. Weights are read as they are. Raises InvalidInputError, which names the argument, and
    UnsupportedError for other options.

    >>> buffer, y = deep_gemm.get_symm_buffer_for_mega_moe(None, 2, 100, 2, 256, 128), torch.ones(3, 256).bfloat16()
    >>> w13 = torch.zeros(2, 256, 256).to(torch.float8_e4m3fn), torch.ones(2, 2, 2)
    >>> w2 = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), torch.ones(2, 2, 1)
    >>> deep_gemm.fp8_mega_moe(y, *deep_gemm.transform_weights_for_mega_moe_sm90(w13, w2), buffer)
    >>> y.abs().max().item()
    0.0
    """
    if tuple(recipe) != (SCALE_BLOCK,) * 3:
        raise UnsupportedError(f"recipe must be (128, 128, 128), but it is {shown(recipe)}.")
    _check_activation(activation)
    if not isinstance(sym_buffer, SymmBuffer) or sym_buffer.x is None:
        raise InvalidInputError(
            "sym_buffer must be a buffer of get_symm_buffer_for_mega_moe that was not destroyed, but it is "
            f"{'destroyed' if isinstance(sym_buffer, SymmBuffer) else shown(sym_buffer)}."
        )
    checks.check_tensor("y", y, (2,))
    tokens, most = y.shape[0], sym_buffer.num_max_tokens_per_rank
    if tokens > most:
        raise InvalidInputError(f"y has {tokens} tokens, but sym_buffer has room for {most}.")
    if num_tokens_bound is not None:
        check_index("num_tokens_bound", num_tokens_bound, tokens, most, f"None or from {tokens} to {most}")
    rows, weights = slice(tokens), (*checks.pair("l1_weights", l1_weights), *checks.pair("l2_weights", l2_weights))
    wanted = sym_buffer.num_experts // sym_buffer.ranks, 2 * sym_buffer.intermediate_hidden, sym_buffer.hidden
    checks.check_tensor("the values of l1_weights", weights[0], (3,))
    if tuple(weights[0].shape) != wanted:
        raise InvalidInputError(
            f"the values of l1_weights must have the shape {wanted}, as sym_buffer has experts of a rank and sizes, "
            f"but it is {tuple(weights[0].shape)}."
        )
    limit = math.inf if activation_clamp is None else activation_clamp
    stats = cumulative_local_expert_recv_stats
    if sym_buffer.ranks > 1:
        bound = most if num_tokens_bound is None else num_tokens_bound
        slots = sym_buffer.slots[: bound * sym_buffer.num_topk]
        of_ranks = sym_buffer.peers, sym_buffer.epochs, slots
        moe_ranks.experts(*of_ranks, *weights, y, stats, sym_buffer.rank, bound, limit)
        return
    own = sym_buffer.x[rows], sym_buffer.topk_idx[rows], sym_buffer.topk_weights[rows]
    moe_chain.experts(*own, *weights, y, sym_buffer.x_sf[rows], stats, limit, True)


def _check_activation(activation: Any) -> None:
    if activation != "swiglu":
        raise UnsupportedError(f"activation must be 'swiglu', but it is {shown(activation)}.")
