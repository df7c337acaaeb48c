"""The casts of a layer's operands to FP8, each a matrix and its transpose from one pass."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deep_gemm import quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn.gathered import Gathered
from deep_gemm.ops import linear
from deep_gemm.ops import quantize as ops
from deep_gemm.ops.layouts import TMA_BYTES
from deep_gemm.quantize import Quantized
from deep_gemm.spec import AMAX_MIN, Blocks, align
from deep_gemm.tensors import check_tensor, kind_of

WeightGradient: TypeAlias = Literal["1x128", "mixed"]
"""How x is scaled in the weight gradient: by 1 x 128, as in DeepSeek-V3, or "mixed": by 128 x 128. Gradients of the
output are scaled by 1 x 128 in both."""

BLOCKS: dict[str, Blocks] = {"1x128": "column", "mixed": "tile"}
"""The blocks of x that share a scale in the weight gradient."""
RECIPES = {name: linear.RECIPES[blocks] for name, blocks in BLOCKS.items()}


def row_major(x: Tensor, name: str = "x") -> Tensor:
    """x, or a copy whose rows are contiguous. What is copied is checked first, since torch reads it unchecked."""
    if x.stride(-1) == 1:
        return x
    check_tensor(name, x)
    return x.contiguous()


def _refuse_input(x: Any, shape: str) -> NoReturn:
    """Refuse an input of a layer that is no dense tensor of this shape."""
    came = f"it is {kind_of(x)}"
    if isinstance(x, Tensor):
        if x.layout is not torch.strided and not x.is_nested:
            check_tensor("x", x)
        came = "it is a nested tensor" if x.is_nested else f"its shape is {tuple(x.shape)}"
    raise InvalidInputError(f"x must be a tensor {shape}, but {came}.")


def check_read(x: Tensor) -> None:
    """Refuse an x that torch shall read or cast before a kernel's call checks it: without memory, or no number of 16
    bits or more."""
    check_tensor("x", x)
    if not x.is_floating_point() or x.element_size() < 2:
        raise InvalidInputError(
            f"x must be a tensor of torch.bfloat16, float16, float32 or float64, but it is {kind_of(x)}."
        )


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the result of a layer: that of x, or of autocast."""
    kind = x.device.type
    if kind == "meta":
        refuse_meta()
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def refuse_meta() -> NoReturn:
    """Refuse an x on the meta device."""
    raise InvalidInputError(
        "x is a meta tensor, which has a shape and no data. Materialise the layer, by to_empty(), and x; or infer "
        "shapes with torch.compile or under FakeTensorMode."
    )


def as_rows(x: Tensor, width: int) -> Tensor:
    """The input x (..., width) of a layer as a matrix whose rows are contiguous."""
    return row_major(compact(x, width).reshape(-1, width))


def compact(x: Tensor, width: int, is_matrix: bool = False) -> Tensor:
    """The input x (..., width) of a layer, or a matrix of its rows, which are contiguous: what the products of
    `deep_gemm.ops.linear` take. They take any rank, since each view costs the host as much as a launch. Refuses what is
    no dense tensor of this shape, what is no matrix if it must be one, and tensors of transforms."""
    is_dense = isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided
    if not is_dense or x.dim() == 0 or x.shape[-1] != width or (is_matrix and x.dim() != 2):
        _refuse_input(x, f"({'rows' if is_matrix else '...'}, {width})")
    if torch.compiler.is_compiling():
        is_inside = _is_traced_in_transform()
    else:
        is_inside = torch._C._functorch.is_functorch_wrapped_tensor(x) or (
            forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
        )
    if is_inside:
        raise InvalidInputError(
            "x is inside torch.func.vmap or another transform of torch.func, which layers do not take. Call the layer "
            "on plain tensors: they may have any rank, and backward() computes gradients."
        )
    if x.is_contiguous():
        return x
    check_tensor("x", x)  # reshape may copy it
    return row_major(x.reshape(-1, x.shape[-1]))


def _is_traced_in_transform() -> bool:
    """Whether a trace is inside a transform, through which a traced layer would have gradients of zeros."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_is_traced_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tokens(
    x: Tensor,
    blocks: Blocks,
    *,
    gated: bool = False,
    epsilon: float = AMAX_MIN,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    gradient: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """Rows of x, the operand of a product with weights; and columns, that of a weight gradient, with scales of
    ``blocks``. Columns are padded with zeros to a multiple of 16 tokens, which is what kernels read. Of x there are
    ``rows``, times ``factors``, or the gradient of gate and up: see `deep_gemm.ops.quantize.Quantize`."""
    count = x.shape[0] if rows is None else rows.shape[0]
    width = x.shape[1] // 2 if gated and gradient is None else x.shape[1]
    plain = ops.empty_output(count, width, "row", x.device)
    scales = ops.empty_scales(count, width, blocks, x.device, transposed=True)
    if count % TMA_BYTES == 0:
        columns = written = torch.empty((width, count), dtype=torch.float8_e4m3fn, device=x.device)
    else:
        columns = torch.zeros((width, align(count, TMA_BYTES)), dtype=torch.float8_e4m3fn, device=x.device)
        written = columns[:, :count]
    ops.both(x, rows, factors, gradient, plain, (written, scales), "row", blocks, False, epsilon, gated)
    return plain, (columns, scales)


def gradients(dy: Tensor, **how: Any) -> tuple[Quantized, Quantized]:
    """`tokens` of the gradient of an output. The mean over many tokens makes gradients small: none is too small."""
    return tokens(row_major(dy), "column", epsilon=0.0, **how)


def transposed(w: Tensor, scales: Tensor | None) -> Quantized:
    """The transpose of weights in E4M3, with scales of 128 x 128: w itself if it has scales, else that of weights w."""
    if scales is not None:
        return w, scales
    w = w.detach()
    if isinstance(w, Gathered):
        return w.transposed()
    return quantize.blocks_transposed(w)
