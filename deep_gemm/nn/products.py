"""The products of linear layers as autograd functions: forward, input gradient and weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deep_gemm import dense, quantize
from deep_gemm.nn import casts
from deep_gemm.quantize import Quantized


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a (M, K) times the transpose of b (N, K), whose scales are of 128 x 128: (M, N)."""
    d = torch.empty(a[0].shape[0], b[0].shape[0], dtype=dtype, device=a[0].device)
    dense.fp8_gemm_nt(a, b, d)
    return d


class FP8Product(torch.autograd.Function):
    """x (tokens, in) times the transpose of ``weight`` (out, in), of which ``values`` and ``turned`` (in, out) are
    casts. The gradient of ``weight`` is added to ``main``, if that is a tensor. Without ``turned`` backward casts the
    weight again, which FSDP2 has gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        values: Tensor,
        scales: Tensor,
        turned: Tensor | None,
        turned_scales: Tensor | None,
        dtype: torch.dtype,
        main: Any,
        wgrad: str,
    ) -> Tensor:
        rows, columns = casts.tokens(x, casts.BLOCKS[wgrad])
        ctx.save_for_backward(*columns, weight if turned is None else turned, turned_scales)
        ctx.main, ctx.wgrad, ctx.dtypes = main, wgrad, (x.dtype, weight.dtype)
        return product(rows, (values, scales), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, sfx, w, sfw = ctx.saved_tensors
        rows, columns = casts.gradients(dy)
        dx = product(rows, casts.transposed(w, sfw), ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.main is not None:
            dense.fp8_gemm_nt(columns, (x, sfx), ctx.main, c=ctx.main, recipe=casts.RECIPES[ctx.wgrad])
        else:
            dw = torch.empty(columns[0].shape[0], x.shape[0], dtype=ctx.dtypes[1], device=x.device)
            dense.fp8_gemm_nt(columns, (x, sfx), dw, recipe=casts.RECIPES[ctx.wgrad])
        return dx, dw, *(None,) * 7


class FrozenFP8Product(torch.autograd.Function):
    """x (tokens, in) times the transpose of weights that take no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.dtype = x.dtype
        return product(quantize.rows(x), (values, scales), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        dx = torch.empty(dy.shape[0], values.shape[1], dtype=ctx.dtype, device=dy.device)
        dense.fp8_gemm_nn(
            quantize.rows(casts.row_major(dy), epsilon=0.0), (values, scales), dx
        )  # it transposes the weights
        return dx, None, None, None


HALVES = {
    torch.bfloat16: (dense.bf16_gemm_nt, dense.bf16_gemm_nn, dense.bf16_gemm_tn),
    torch.float16: (dense.fp16_gemm_nt, dense.fp16_gemm_nn, dense.fp16_gemm_tn),
}
"""The functions of forward, input gradient and weight gradient."""


class HalfProduct(torch.autograd.Function):
    """x (tokens, in) times the transpose of w (out, in), both of one 16-bit dtype. The weight gradient is added to
    ``main``, if that is a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, main: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.main = main
        y = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
        HALVES[x.dtype][0](x, w, y)
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
        return dx, dw, None
