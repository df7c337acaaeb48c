"""The products of linear layers as autograd functions: forward, input gradient and weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deep_gemm import dense, grouped, quantize
from deep_gemm.nn import casts
from deep_gemm.ops import dense as ops
from deep_gemm.quantize import Quantized


def product(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, labels: Tensor | None = None
) -> Tensor:
    """a (M, K) times the transpose of b (N, K), whose scales are of 128 x 128, plus ``bias`` (N,): (M, N). With
    ``labels``, the group of each row, b is (groups, N, K). Rows of padding are zeros in a, and in the result."""
    made = dtype if labels is None else torch.bfloat16
    d = torch.empty(a[0].shape[0], b[0].shape[-2], dtype=made, device=a[0].device)
    if labels is not None:
        grouped.m_grouped_fp8_gemm_nt_contiguous(a, b, d, labels)
        return d.to(dtype)
    if bias is None:
        dense.fp8_gemm_nt(a, b, d)
    else:
        ops.fp8_bias(a, b, d, bias)
    return d


def weight_gradient(
    a: Quantized, b: Quantized, dtype: torch.dtype, main: Tensor | None, wgrad: str, sizes: Tensor | None = None
) -> Tensor | None:
    """a (M, rows) times the transpose of b (N, rows): (M, N), added to ``main`` if that is a tensor. With ``sizes``,
    that of each group's columns: (groups, M, N)."""
    d, m, n = main, a[0].shape[0], b[0].shape[0]
    if sizes is None:
        d = torch.empty(m, n, dtype=dtype, device=a[0].device) if d is None else d
        dense.fp8_gemm_nt(a, b, d, c=main, recipe=casts.RECIPES[wgrad])
    else:
        made = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        d = torch.empty(sizes.shape[0], m, n, dtype=made, device=a[0].device) if d is None else d
        grouped.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes, c=main, recipe=casts.RECIPES[wgrad])
    return d.to(dtype) if main is None else None


class FP8Product(torch.autograd.Function):
    """x (tokens, in) times the transpose of ``weight`` (out, in), plus ``bias`` (out,). ``plain`` and ``turned`` (in,
    out) are casts of the weight. Its gradient is added to ``main``, if that is a tensor. Without ``turned`` backward
    casts the weight again, which FSDP2 has gathered again. With ``labels`` and ``sizes`` there are groups of rows, each
    with a weight of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        plain, sf_plain, turned, sf_turned, labels, sizes, dtype, main, wgrad = rest
        rows, columns = casts.tokens(x, casts.BLOCKS[wgrad])
        ctx.save_for_backward(*columns, weight if turned is None else turned, sf_turned, labels, sizes)
        ctx.main, ctx.wgrad, ctx.dtypes = main, wgrad, (x.dtype, weight.dtype)
        ctx.bias = None if bias is None else bias.dtype
        return product(rows, (plain, sf_plain), dtype, bias, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, sfx, w, sfw, labels, sizes = ctx.saved_tensors
        rows, columns = casts.gradients(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, casts.transposed(w, sfw), ctx.dtypes[0], labels=labels)
        dw = weight_gradient(columns, (x, sfx), ctx.dtypes[1], ctx.main, ctx.wgrad, sizes)
        return dx, dw, bias_gradient(ctx, dy, 2), *(None,) * 9


def bias_gradient(ctx: Any, dy: Tensor, place: int) -> Tensor | None:
    """The gradient of the bias, which is the input number ``place`` and has the dtype ``ctx.bias``."""
    return dy.sum(0, dtype=ctx.bias) if ctx.needs_input_grad[place] else None


class FrozenFP8Product(torch.autograd.Function):
    """x (tokens, in) times the transpose of weights that take no gradient, plus ``bias``, which may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, plain: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(plain, scales)
        ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
        return product(quantize.rows(x), (plain, scales), dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(dy.shape[0], weight[0].shape[1], dtype=ctx.dtype, device=dy.device)
            dy_rows = quantize.rows(casts.row_major(dy), epsilon=0.0)
            dense.fp8_gemm_nn(dy_rows, weight, dx)  # it transposes the weights
        return dx, bias_gradient(ctx, dy, 1), None, None, None


HALVES = {
    torch.bfloat16: (dense.bf16_gemm_nt, dense.bf16_gemm_nn, dense.bf16_gemm_tn),
    torch.float16: (dense.fp16_gemm_nt, dense.fp16_gemm_nn, dense.fp16_gemm_tn),
}
"""The functions of forward, input gradient and weight gradient."""


BIASED = {torch.bfloat16: ops.bf16_bias, torch.float16: ops.fp16_bias}


class HalfProduct(torch.autograd.Function):
    """x (tokens, in) times the transpose of w (out, in), both of one 16-bit dtype, plus ``bias`` (out,). The weight
    gradient is added to ``main``, if that is a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, main: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.main, ctx.bias = main, None if bias is None else bias.dtype
        y = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
        if bias is None:
            HALVES[x.dtype][0](x, w, y)
        else:
            BIASED[x.dtype](x, w, y, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        _, of_input, of_weight = HALVES[x.dtype]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            of_input(dy, w, dx)
        if ctx.main is not None:
            of_weight(dy, x, ctx.main, c=ctx.main)
        elif ctx.needs_input_grad[1]:
            dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
            of_weight(dy, x, dw)
        return dx, dw, bias_gradient(ctx, dy, 2), None
