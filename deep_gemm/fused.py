"""Functions that stand before and after GEMMs, each one launch: norms, add + GELU, mul + add, gates + mul. They take
the time of reading their inputs once and of writing the result once.

Common to all:

- Inputs are bfloat16 or float16, all of one dtype, and contiguous along their last dimension. Rows may have any
  stride. Rows that begin at multiples of 16 bytes, with a multiple of 8 columns, are fast; others are correct.
- ``out`` says what is written, and is returned: a tensor (M, N) of the inputs' dtype or of float32; or a pair (values,
  scales), E4M3 (M, N) and float32 (M, ceil(N / 128)). It may be a dtype, for a fresh tensor of it:
  ``torch.float8_e4m3fn`` for a pair that `fp8_gemm_nt` takes as it is. None stands for the inputs' dtype.
- Arithmetic is float32, and the result is rounded once. A pair has the bytes that `deep_gemm.quantize.rows` makes of
  the float32 result: the rounding to 16 bits in between is left out. ``use_ue8m0``: its scales are powers of two.
- A row's bits do not depend on the other rows or their number, and repeat.
- NaN and infinities pass through as in torch's functions. CPU tensors run a reference, in float64.
- Nothing is recorded for autograd.

Raises InvalidInputError, which names the argument, and UnsupportedError on a GPU without kernels.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deep_gemm.ops import checks, quantize, row_functions

__all__ = ["Out", "add_gelu", "layer_norm", "mul_add", "rms_norm", "silu_and_mul", "swigluoai_and_mul"]

Out: TypeAlias = "Tensor | tuple[Tensor, Tensor] | torch.dtype | None"
"""A tensor, a pair (values, scales), or the dtype of a fresh one."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Out = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    use_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = x / sqrt(mean(x^2) + eps) * weight, for each row.

    Args:
        x: (M, N). ``out`` may be x itself.
        weight: (N).
        eps: from 0 on.
        residual: (M, N). It is replaced by x + residual, rounded to its dtype, and that sum is normalised in place of
            x, as if it had been read back.

    >>> x, weight = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> deep_gemm.fused.rms_norm(x, weight).shape
    torch.Size([4, 64])
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["rms_norm"](x, weight, residual, out, eps, use_ue8m0)
    return out


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Out = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    use_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, for each row. The variance is the mean square of
    x - mean(x).

    Args:
        x: (M, N). ``out`` may be x itself.
        weight, bias: (N). Without a bias nothing is added.
        eps, residual: as in `rms_norm`.

    >>> x, weight = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> deep_gemm.fused.layer_norm(x, weight, None).shape
    torch.Size([4, 64])
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["layer_norm"](x, weight, residual, bias, out, eps, use_ue8m0)
    return out


def add_gelu(
    x: Tensor, y: Tensor, out: Out = None, *, approximate: str = "none", use_ue8m0: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """out = gelu(x + y).

    Args:
        x: (M, N). ``out`` may be x itself.
        y: (M, N), or a bias (N).
        approximate: "none" for x (1 + erf(x / sqrt(2))) / 2, "tanh" for its approximation, as in torch. Both keep
            their relative accuracy for negative x, where 1 + erf cancels.

    >>> x, bias = torch.ones(4, 64).bfloat16(), torch.zeros(64).bfloat16()
    >>> deep_gemm.fused.add_gelu(x, bias).shape
    torch.Size([4, 64])
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["add_gelu"](x, y, out, approximate, use_ue8m0)
    return out


def mul_add(
    x: Tensor, y: Tensor, z: Tensor, out: Out = None, *, use_ue8m0: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """out = x * y + z, a fused multiply-add.

    Args:
        x: (M, N).
        y, z: (M, N) or (N). ``out`` may be z itself.

    >>> x, y = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> deep_gemm.fused.mul_add(x, y, y)[0, 0].item()
    2.0
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["mul_add"](x, y, z, out, use_ue8m0)
    return out


def silu_and_mul(
    x: Tensor,
    out: Out = None,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
    groups: Tensor | None = None,
    use_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = silu(gate) * up, the activation between the two products of a gated MLP.

    Args:
        x: (M, 2 N): gate in the left half and up in the right one; gate, up, gate, up if ``interleaved``.
        limit: gate is capped at it, and up is held between -limit and limit, before. From 0 on; None for no limit.
        factors: float32 (M), contiguous, such as a router's weights: row i of the result is multiplied by
            ``factors[i]`` before it is rounded. `quantize.rows` multiplies the stored scales instead.
        bias, groups: (G, 2 N) of x's dtype and int32 (M), contiguous, both or none: ``bias[groups[i]]`` is added to row
            i of x before everything else, and nothing if ``groups[i]`` is -1, as the labels of a grouped product are.
            Columns are in the order of x's. On a GPU only DG_CHECK=1 refuses other groups; kernels read past the bias.

    >>> values, scales = deep_gemm.fused.silu_and_mul(torch.ones(4, 64).bfloat16(), torch.float8_e4m3fn)
    >>> values.shape
    torch.Size([4, 32])
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out, halved=True)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["silu_and_mul"](x, factors, bias, groups, out, interleaved, math.inf if limit is None else limit, use_ue8m0)
    return out


def swigluoai_and_mul(
    x: Tensor,
    out: Out = None,
    *,
    limit: float | None = 7.0,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
    groups: Tensor | None = None,
    use_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = gate * sigmoid(1.702 * gate) * (up + 1), the activation of gpt-oss's experts.

    Args:
        x: (M, 2 N): gate, up, gate, up.
        limit, factors, bias, groups: as in `silu_and_mul`.

    >>> deep_gemm.fused.swigluoai_and_mul(torch.ones(4, 64).bfloat16()).shape
    torch.Size([4, 32])
    """
    out = out if isinstance(out, (Tensor, tuple, list)) else _fresh(x, out, halved=True)
    compute = row_functions.TENSOR if isinstance(out, Tensor) else row_functions.PAIR
    compute["swigluoai_and_mul"](x, factors, bias, groups, out, math.inf if limit is None else limit, use_ue8m0)
    return out


def _fresh(x: Tensor, out: Any, halved: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """A fresh result of the dtype ``out``, or of that of x."""
    if out is not None and not isinstance(out, torch.dtype):
        checks.check_tensor("out", out)  # which says what it is instead
    checks.check_tensor("x", x, (2,))
    m, n = x.shape
    n = n // 2 if halved else n
    if out == torch.float8_e4m3fn:
        return quantize.empty_output(m, n, "row", x.device)
    return torch.empty((m, n), dtype=out or x.dtype, device=x.device)
