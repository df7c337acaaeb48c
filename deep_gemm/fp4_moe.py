"""Mixtures of experts with MXFP4 weights as one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidInputError
from .ops import checks, fp4, fp4_moe_chain
from .ops.fp4_weights import is_transformed


def fp8_fp4_moe(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    y: Tensor | None = None,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A mixture of experts with MXFP4 weights and activations in FP8, without its router: `fp8_moe` with::

        gate, up = split(x @ gate_up[e]^T + bias[0][e])
        silu(min(gate, clamp)) * min(max(up, -clamp), clamp) @ down[e]^T + bias[1][e]

    Five launches: tokens are cast, and written once for each of their experts; a grouped product, the activation of the
    rows that tokens have, a second product, and the sums. One CUDA graph serves all choices.

    Args:
        x, topk_idx, topk_weights: see `fp8_moe`. width is a multiple of 32.
        gate_up: (experts, 2 * inner, width), a pair of `transform_fp4_weights` for "fp8", or MXFP4 as it takes it,
            which is transformed in each call. inner is a multiple of 32; up to 2048 experts.
        down: (experts, width, inner), another pair.
        y: see `fp8_moe`.
        activation: "swiglu", whose gate_up has rows of gate and then rows of up; or "swigluoai", that of gpt-oss,
            ``gate * sigmoid(1.702 * gate) * (up + 1)``, where rows of gate and up take turns.
        clamp: the limit of gate, and of up on both sides. None: 7 for "swigluoai", otherwise none.
        bias: None, or two contiguous tensors of bfloat16: (experts, 2 * inner) in the order of gate_up's rows, and
            (experts, width).

    Returns y.

    Gate and up are rounded to bfloat16. The bias is added to them in float32; the result of the activation is cast to
    E4M3 with scales of 1 x 128. Each expert's row is rounded to bfloat16, its bias is added in float32, and what
    follows is as in `fp8_moe`. Results repeat bit for bit. The order of a product's sums depends on how many rows each
    expert has, so a token's bits may change with other tokens, unless `set_batch_invariant` forbids that.

    Memory is taken as in `fp8_moe`: about 3 * width + 5 * inner bytes for each row.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError, NotWarmError, CompileError, DriverError: see `fp8_moe`.

    >>> def weights(n, k):
    ...     return deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.randn(2, n, k)))
    >>> x, chosen = torch.randn(3, 256).bfloat16(), torch.tensor([[0, 1], [1, -1], [1, 0]])
    >>> deep_gemm.fp8_fp4_moe(x, chosen, torch.ones(3, 2), weights(256, 256), weights(256, 128)).shape
    torch.Size([3, 256])
    """
    values, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    if y is None:
        checks.check_tensor("x", values, (2,))
        y = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    weights, options = _weights("fp8", gate_up, down), _options(activation, clamp, bias)
    fp4_moe_chain.fp8(values, topk_idx, topk_weights, *weights, y, scales, *options)
    return y


def bf16_fp4_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    y: Tensor | None = None,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`fp8_fp4_moe` with activations in bfloat16: tokens are copied to their rows, the result of the activation is
    rounded to bfloat16, and weights are decoded exactly. What gpt-oss expects.

    gate_up and down are pairs of `transform_fp4_weights` for "bf16". Memory is about 4 * width + 6 * inner bytes for
    each row. Everything else is as in `fp8_fp4_moe`.

    >>> def weights(n, k):
    ...     return deep_gemm.transform_fp4_weights(*deep_gemm.quantize.mxfp4(torch.randn(2, n, k)), "bf16")
    >>> x, chosen = torch.randn(3, 96).bfloat16(), torch.tensor([[0, 1], [1, -1], [1, 0]])
    >>> given = weights(192, 96), weights(96, 96)
    >>> deep_gemm.bf16_fp4_moe(x, chosen, torch.ones(3, 2), *given, activation="swigluoai").shape
    torch.Size([3, 96])
    """
    if y is None:
        checks.check_tensor("x", x, (2,))
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    weights, options = _weights("bf16", gate_up, down), _options(activation, clamp, bias)
    fp4_moe_chain.bf16(x, topk_idx, topk_weights, *weights, y, *options)
    return y


def _weights(kind: str, gate_up: Any, down: Any) -> tuple[Tensor, ...]:
    """Both pairs, one after the other, as `transform_fp4_weights` returns them."""
    found: tuple[Tensor, ...] = ()
    for name, pair in (("gate_up", gate_up), ("down", down)):
        is_ready = isinstance(pair, (tuple, list)) and len(pair) == 2 and is_transformed(pair[0], grouped=True)
        found += tuple(pair if is_ready else fp4.prepared(pair, kind, grouped=True, name=name))
    return found


def _options(activation: Any, clamp: Any, bias: Any) -> tuple[Any, ...]:
    """The biases, the activation and its limit."""
    if bias is not None and not (isinstance(bias, (tuple, list)) and len(bias) == 2):
        raise InvalidInputError(
            f"bias must be None or two tensors, of gate_up and of down, but it is {checks.shown(bias)}."
        )
    if clamp is None:
        clamp = fp4_moe_chain.OAI_LIMIT if activation == "swigluoai" else math.inf
    return *((None, None) if bias is None else bias), activation, clamp
