"""The products of linear layers as autograd functions: forward, input gradient and weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deep_gemm import dense, grouped, quantize
from deep_gemm.nn import casts
from deep_gemm.ops import dense as of_dense
from deep_gemm.ops import linear as ops
from deep_gemm.quantize import Quantized


def linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x (..., in) times the transpose of ``weight`` (out, in), plus ``bias`` (out,), in ``dtype``. The weight is E4M3
    with ``scales`` of 128 x 128, or without them of 16 or 32 bits."""
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device=x.device)
    ops.forward(x, weight, y, scales, bias, None, "column")
    return y


class FP8Product(torch.autograd.Function):
    """x (..., in) times the transpose of ``weight`` (out, in), plus ``bias`` (out,). The gradient of the weight is
    added to ``main``, if that is a tensor. ``plain`` and ``turned`` (in, out) are casts of the weight; without them it
    is cast here. With the first alone backward casts the weight again, which FSDP2 has gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        plain, sf_plain, turned, sf_turned, dtype, main, wgrad = rest
        out, blocks = weight.shape[0], casts.BLOCKS[wgrad]
        y = torch.empty((*x.shape[:-1], out), dtype=dtype, device=x.device)
        saved = ops.new_saved(x, out if plain is None else 0, blocks)
        ops.forward(x, weight if plain is None else plain, y, sf_plain, bias, saved, blocks)
        again = weight if turned is None and plain is not None else turned
        ctx.save_for_backward(saved, again, sf_turned)
        ctx.main, ctx.blocks, ctx.dtypes, ctx.shapes = main, blocks, (x.dtype, weight.dtype), (x.shape, weight.shape)
        ctx.bias = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, w, sfw = ctx.saved_tensors
        if w is not None:
            w, sfw = casts.transposed(w, sfw)
        main, dx, dw = ctx.main, None, ctx.main
        if ctx.needs_input_grad[0]:
            dx = torch.empty(ctx.shapes[0], dtype=ctx.dtypes[0], device=dy.device)
        if main is None and ctx.needs_input_grad[1]:
            dw = torch.empty(ctx.shapes[1], dtype=ctx.dtypes[1], device=dy.device)
        if dx is not None or dw is not None:
            rows = dy if dy.is_contiguous() else casts.compact(dy, dy.shape[-1])
            ops.backward(rows, saved, w, sfw, dx, dw, main is not None, ctx.blocks)
        return dx, dw if main is None else None, bias_gradient(ctx, dy, 2), *(None,) * 7


class FrozenFP8Product(torch.autograd.Function):
    """x (..., in) times the transpose of weights that take no gradient, plus ``bias``, which may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, plain: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(plain, scales)
        ctx.dtype, ctx.shape, ctx.bias = x.dtype, x.shape, None if bias is None else bias.dtype
        return linear(x, plain, scales, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(ctx.shape, dtype=ctx.dtype, device=dy.device)
            rows = casts.row_major(dy.reshape(-1, dy.shape[-1]))
            # It transposes the weights.
            dense.fp8_gemm_nn(quantize.rows(rows, epsilon=0.0), weight, dx.view(rows.shape[0], ctx.shape[-1]))
        return dx, bias_gradient(ctx, dy, 1), None, None, None


def bias_gradient(ctx: Any, dy: Tensor, place: int) -> Tensor | None:
    """The gradient of the bias, which is the input number ``place`` and has the dtype ``ctx.bias``."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.bias) if ctx.needs_input_grad[place] else None


def grouped_product(a: Quantized, b: Quantized, dtype: torch.dtype, labels: Tensor) -> Tensor:
    """a (M, K) times the transpose of b (groups, N, K), whose scales are of 128 x 128: (M, N). ``labels`` are the
    groups of the rows. Rows of padding are zeros in a, and in the result."""
    d = torch.empty(a[0].shape[0], b[0].shape[-2], dtype=torch.bfloat16, device=a[0].device)
    grouped.m_grouped_fp8_gemm_nt_contiguous(a, b, d, labels)
    return d.to(dtype)


def grouped_gradient(
    a: Quantized, b: Quantized, dtype: torch.dtype, main: Tensor | None, wgrad: str, sizes: Tensor
) -> Tensor | None:
    """a (M, rows) times the transpose of b (N, rows), of the columns of each group: (groups, M, N), added to ``main``
    if that is a tensor. ``sizes`` are the numbers of columns."""
    d, made = main, dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    if d is None:
        d = torch.empty(sizes.shape[0], a[0].shape[0], b[0].shape[0], dtype=made, device=a[0].device)
    grouped.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes, c=main, recipe=casts.RECIPES[wgrad])
    return d.to(dtype) if main is None else None


class GroupedFP8Product(torch.autograd.Function):
    """Groups of rows of x times the transposes of their weights. ``weight`` is (groups, out, in), the rest is as in
    `FP8Product`; ``labels`` and ``sizes`` say which groups there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        plain, sf_plain, turned, sf_turned, labels, sizes, dtype, main, wgrad = rest
        rows, columns = casts.tokens(x, casts.BLOCKS[wgrad])
        ctx.save_for_backward(*columns, weight if turned is None else turned, sf_turned, labels, sizes)
        ctx.main, ctx.wgrad, ctx.dtypes = main, wgrad, (x.dtype, weight.dtype)
        return grouped_product(rows, (plain, sf_plain), dtype, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, sfx, w, sfw, labels, sizes = ctx.saved_tensors
        rows, columns = casts.gradients(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grouped_product(rows, casts.transposed(w, sfw), ctx.dtypes[0], labels)
        dw = grouped_gradient(columns, (x, sfx), ctx.dtypes[1], ctx.main, ctx.wgrad, sizes)
        return dx, dw, *(None,) * 9


HALVES = {
    torch.bfloat16: (dense.bf16_gemm_nt, dense.bf16_gemm_nn, dense.bf16_gemm_tn),
    torch.float16: (dense.fp16_gemm_nt, dense.fp16_gemm_nn, dense.fp16_gemm_tn),
}
"""The functions of forward, input gradient and weight gradient."""


BIASED = {torch.bfloat16: of_dense.bf16_bias, torch.float16: of_dense.fp16_bias}


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
