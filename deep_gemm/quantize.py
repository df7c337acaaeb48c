"""Casts to FP8 (E4M3) on the GPU, one launch each, on the current stream and without synchronising. And casts of MXFP4
weights, which are made once, by torch.

Each function returns (values, scales), or writes them into such a pair ``out``. A value times its scale is the input,
rounded. A scale is the largest magnitude of its block / 448. Magnitudes below ``epsilon`` count as ``epsilon``. With
``use_ue8m0`` the scale is rounded up to a power of two, so that no value saturates. Values are the input times
1 / scale; each step is an IEEE float32 operation. A block with a NaN or an infinity has that as its scale, and its
values are NaN or zero.

Common arguments:

- ``x``: bfloat16, float16 or float32, row-major, with any row stride: (M, K), or (M, 2 K) if ``gated``. It is copied
  first if it is expanded along its rows, as the gradient of a sum is. On the CPU torch computes the same bytes.
- ``out``: values and scales to write, with the shapes and dtypes of fresh ones. Values are row-major; scales are
  contiguous along one dimension. The rows of fresh values begin at multiples of 16 bytes.
- ``use_ue8m0``: scales are powers of two.
- ``epsilon``: the least magnitude from which a scale is computed. With 0, blocks of zeros have the scale 0. Other
  scales are 2^-128 at least, so that 1 / scale is a float32: blocks below 1.3e-36 have values below 448.
- ``gated``: cast silu(left half of x) * right half, computed in float32, instead of x.
- ``rows``: int32, contiguous, of any length R, on the device of x. Row i of the result is row ``rows[i]`` of x, as in
  ``rows(x[rows])``, but x is read once and not copied: tokens go to their experts and become FP8 in one pass. A number
  that is no row of x, such as -1, gives a row of zeros: padding. Only the function `rows` gathers.
- ``factors``: float32, contiguous, one for each row of the result, on the device of x. Row i stands for the row times
  ``factors[i]``, and so does row i of a GEMM's result: a router's weights cost no launch. Only the stored scales are
  multiplied, each by one float32 operation; values have the same bytes as without. Not with ``use_ue8m0``. Only the
  function `rows` has factors.
- ``row_major``: fresh scales of 1 x 128 are row-major. Otherwise they are MN-major, and GEMMs read them without a
  further launch.

Inside CUDA-graph capture the kernel must have been loaded by an earlier call. Raises InvalidInputError, which names the
argument, and UnsupportedError on a GPU without kernels.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch
from torch import Tensor

from deep_gemm import arch, kernels
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops import cast_reference, checks
from deep_gemm.ops import mxfp4 as mx
from deep_gemm.ops import quantize as ops
from deep_gemm.spec import AMAX_MIN, SCALE_BLOCK, Blocks

Quantized: TypeAlias = tuple[Tensor, Tensor]
"""Values and scales."""


def rows(
    x: Tensor,
    *,
    out: Quantized | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
    gated: bool = False,
    row_major: bool = False,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
) -> Quantized:
    """One scale for each row per 128 columns: values (M, K), scales (M, ceil(K / 128)). Operand A of `fp8_gemm_nt`.
    With ``rows``, M is its length.

    >>> values, scales = deep_gemm.quantize.rows(torch.ones(16, 256))
    >>> values.shape, scales.shape
    (torch.Size([16, 256]), torch.Size([16, 2]))
    """
    out = out if out is not None else _empty(x, "row", gated, row_major=row_major, index=rows)
    ops.plain(x, rows, factors, out, "row", use_ue8m0, epsilon, gated)
    return out


def columns(
    x: Tensor,
    *,
    out: Quantized | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
    gated: bool = False,
    row_major: bool = False,
) -> Quantized:
    """`rows` of the transpose of x: values (K, M), scales (K, ceil(M / 128)). An operand of a weight gradient, whose K
    is the number of tokens.

    >>> values, scales = deep_gemm.quantize.columns(torch.ones(16, 256))
    >>> values.shape, scales.shape
    (torch.Size([256, 16]), torch.Size([256, 1]))
    """
    out = out if out is not None else _empty(x, "column", gated, transposed=True, row_major=row_major)
    ops.transposed(x, out, "column", use_ue8m0, epsilon, gated)
    return out


def rows_and_columns(
    x: Tensor,
    *,
    out: tuple[Quantized, Quantized] | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
    gated: bool = False,
    row_major: bool = False,
) -> tuple[Quantized, Quantized]:
    """The results of `rows` and `columns`, from one pass over x.

    >>> rows, columns = deep_gemm.quantize.rows_and_columns(torch.ones(16, 256))
    """
    return _both(x, "row", "column", out, use_ue8m0, epsilon, gated, row_major)


def blocks(
    x: Tensor,
    *,
    out: Quantized | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
) -> Quantized:
    """One scale for each 128 x 128: values (M, K), scales (ceil(M / 128), ceil(K / 128)). B of `fp8_gemm_nt`.
    Several matrices (G, M, K), such as experts, are cast at once, each as if it were alone, here and in
    `blocks_transposed` and `blocks_and_transpose`.

    >>> values, scales = deep_gemm.quantize.blocks(torch.ones(16, 256))
    >>> values.shape, scales.shape
    (torch.Size([16, 256]), torch.Size([1, 2]))
    """
    out = out if out is not None else _empty(x, "tile")
    ops.plain(x, None, None, out, "tile", use_ue8m0, epsilon, False)
    return out


def blocks_transposed(
    x: Tensor,
    *,
    out: Quantized | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
) -> Quantized:
    """`blocks` of the transpose of x: values (K, M), scales (ceil(K / 128), ceil(M / 128)). Weights for the gradient of
    a layer's input.

    >>> values, scales = deep_gemm.quantize.blocks_transposed(torch.ones(16, 256))
    >>> values.shape, scales.shape
    (torch.Size([256, 16]), torch.Size([2, 1]))
    """
    out = out if out is not None else _empty(x, "tile", transposed=True)
    ops.transposed(x, out, "tile", use_ue8m0, epsilon, False)
    return out


def blocks_and_transpose(
    x: Tensor,
    *,
    out: tuple[Quantized, Quantized] | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
) -> tuple[Quantized, Quantized]:
    """The results of `blocks` and `blocks_transposed`, from one pass over x.

    >>> blocks, transposed = deep_gemm.quantize.blocks_and_transpose(torch.ones(16, 256))
    """
    return _both(x, "tile", "tile", out, use_ue8m0, epsilon)


def rows_and_blocks_transposed(
    x: Tensor,
    *,
    out: tuple[Quantized, Quantized] | None = None,
    use_ue8m0: bool = False,
    epsilon: float = AMAX_MIN,
    gated: bool = False,
    row_major: bool = False,
) -> tuple[Quantized, Quantized]:
    """The results of `rows` and `blocks_transposed`, from one pass over x: the input of a linear layer for its forward
    product, and for a weight gradient of the mixed recipe, (1, 128, 128).

    >>> rows, transposed = deep_gemm.quantize.rows_and_blocks_transposed(torch.ones(16, 256))
    >>> [scales.shape for _, scales in (rows, transposed)]
    [torch.Size([16, 2]), torch.Size([2, 1])]
    """
    return _both(x, "row", "tile", out, use_ue8m0, epsilon, gated, row_major)


def spread(x: Tensor) -> Tensor:
    """How far apart the columns of x are in each block of 128 x 128: (ceil(M / 128), ceil(K / 128)) float32.

    It is the largest magnitude of the block over the least of its columns' largest magnitudes. Columns of zeros do not
    count, and a block of zeros has 1. One scale for a block costs no accuracy up to 2^12. At 2^13 the relative error of
    the smallest column is 3.4% instead of 2.65%, at 2^14 it is 5.6%, and at 2^16 it is 24%: then give the operand of a
    weight gradient 1 x 128 scales (`columns`), or compute that gradient in BF16. Computed by torch, on any device.

    Raises InvalidInputError unless x is a matrix of floating-point values.

    >>> deep_gemm.quantize.spread(torch.ones(128, 256)).shape
    torch.Size([1, 2])
    """
    checks.check_tensor("x", x, (2,))
    if not x.dtype.is_floating_point:
        raise InvalidInputError(f"x must have floating-point values, but it is {x.dtype}. Pass x.float().")
    rows, columns = x.shape
    block = (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float().abs(), block)
    each = padded.unflatten(0, (-1, SCALE_BLOCK)).amax(1).unflatten(1, (-1, SCALE_BLOCK))
    least = torch.where(each == 0, torch.inf, each).amin(-1)
    return torch.where(each.amax(-1) == 0, 1.0, each.amax(-1) / least)


def mxfp4(x: Tensor) -> Quantized:
    """Cast x (..., N, K) to MXFP4: packed uint8 (..., N, K / 2) and float8_e8m0fnu (..., N, K / 32).

    K is a multiple of 32. Values are E2M1, rounded to nearest even; the even k is in the low four bits. The scale of 32
    values is the largest power of two up to their largest magnitude, over 4, and at least 2^-127: the rule of OCP's
    Microscaling Formats. So values of more than 6 times the scale become 6. A NaN or an infinity makes the scale NaN.
    Computed by torch, on any device. Raises InvalidInputError, which names the argument.

    >>> packed, scales = deep_gemm.quantize.mxfp4(torch.ones(16, 256))
    >>> packed.shape, scales.shape, deep_gemm.dequantise(packed, scales)[0, 0].item()
    (torch.Size([16, 128]), torch.Size([16, 8]), 1.0)
    """
    return mx.cast(x)


def mxfp4_to_fp8(packed: Tensor, scales: Tensor, *, rounding: bool = False) -> Quantized:
    """MXFP4 weights as E4M3 (..., N, K) with float32 scales of 128 x 128 (..., ceil(N / 128), ceil(K / 128)): the B of
    FP8 products. For products of many rows, where FP8 weights are read no slower than they are multiplied.

    Exact while the exponents of a block span at most 14, and farther where its values allow. Otherwise an
    InvalidInputError, or with ``rounding`` values are rounded to the nearest: `mxfp4_rounded` counts them. Each NaN
    scale gives 32 NaN. ``packed`` and ``scales`` as `dequantise` takes them. Computed by torch, on any device.

    >>> values, scales = deep_gemm.quantize.mxfp4_to_fp8(*deep_gemm.quantize.mxfp4(torch.ones(16, 256)))
    >>> deep_gemm.dequantise(values, scales, (128, 128))[0, 0].item()
    1.0
    """
    return mx.to_fp8(packed, scales, rounding)


def mxfp4_rounded(packed: Tensor, scales: Tensor) -> Tensor:
    """How many values of each block of 128 x 128 E4M3 rounds: int32 (..., ceil(N / 128), ceil(K / 128)).

    They are those that `mxfp4_to_fp8` refuses. The sum over all weights says whether FP8 holds a checkpoint exactly.

    >>> deep_gemm.quantize.mxfp4_rounded(*deep_gemm.quantize.mxfp4(torch.ones(16, 256))).sum().item()
    0
    """
    return mx.rounded(packed, scales)


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> Quantized:
    """Cast x (m, k) with one scale per row per ``gran_k`` columns: (m, k) E4M3, (m, ceil(k / gran_k)) float32.

    ``use_packed_ue8m0``, together with ``use_ue8m0``: scales are exponents, four to an int32; missing ones are those of
    1.0. They are for GPUs other than Hopper.

    >>> values, scales = deep_gemm.per_token_cast_to_fp8(torch.ones(16, 256), use_ue8m0=False)
    >>> scales.shape
    torch.Size([16, 2])
    """
    cast_reference.check_packing(use_ue8m0, use_packed_ue8m0)
    if not _has_kernel(x, gran_k):
        return cast_reference.per_token_cast_to_fp8(x, use_ue8m0, gran_k, use_packed_ue8m0)
    values, sf = _dense(x, "row")
    ops.plain(x, None, None, (values, sf), "row", use_ue8m0, AMAX_MIN, False)
    return values, cast_reference.pack_scales(sf) if use_packed_ue8m0 else sf


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> Quantized:
    """Cast x (k, n) with one scale per column per ``gran_k`` rows: (k, n) E4M3, (ceil(k / gran_k), n) float32.

    >>> values, scales = deep_gemm.per_channel_cast_to_fp8(torch.ones(16, 256), use_ue8m0=False)
    >>> scales.shape
    torch.Size([1, 256])
    """
    if _has_kernel(x, gran_k):
        out = _dense(x, "column")
        ops.plain(x, None, None, out, "column", use_ue8m0, AMAX_MIN, False)
        return out
    return cast_reference.per_channel_cast_to_fp8(x, use_ue8m0, gran_k)


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> Quantized:
    """Cast x (n, k) with one scale per square block of side ``gran_k``.

    Returns (n, k) E4M3 and (ceil(n / gran_k), ceil(k / gran_k)) float32.

    >>> values, scales = deep_gemm.per_block_cast_to_fp8(torch.ones(16, 256), use_ue8m0=False)
    >>> scales.shape
    torch.Size([1, 2])
    """
    if _has_kernel(x, gran_k):
        out = _dense(x, "tile")
        ops.plain(x, None, None, out, "tile", use_ue8m0, AMAX_MIN, False)
        return out
    return cast_reference.per_block_cast_to_fp8(x, use_ue8m0, gran_k)


def _both(
    x: Tensor,
    plain: Blocks,
    transposed: Blocks,
    out: tuple[Quantized, Quantized] | None,
    use_ue8m0: bool,
    epsilon: float,
    gated: bool = False,
    row_major: bool = False,
) -> tuple[Quantized, Quantized]:
    """The casts of x and of its transpose, from one pass. Scales of "tile" are row-major whatever is asked."""
    if out is not None:
        first, second = _two(out)
    else:
        first, second = (
            _empty(x, blocks, gated, turned, row_major if blocks != "tile" else False)
            for blocks, turned in ((plain, False), (transposed, True))
        )
    ops.both(x, None, None, None, first, second, plain, transposed, use_ue8m0, epsilon, gated)
    return first, second


def _two(out: object) -> tuple[Quantized, Quantized]:
    """The outputs of a cast that has two."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        kind = f"has {len(out)} elements" if isinstance(out, (tuple, list)) else f"is {checks.kind_of(out)}"
        raise InvalidInputError(
            f"out must be two pairs of values and scales, ((values, scales), (values, scales)), but it {kind}."
        )
    return out[0], out[1]


def _empty(
    x: Tensor,
    blocks: Blocks,
    gated: bool = False,
    transposed: bool = False,
    row_major: bool = False,
    index: Tensor | None = None,
) -> Quantized:
    """Fresh outputs for a cast of x, or of several matrices where all scales are of tiles."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested or x.dim() != 2:
        checks.check_tensor("x", x, (2, 3) if blocks == "tile" else (2,))  # the operation checks what else may be wrong
    if not isinstance(gated, bool) or not isinstance(row_major, bool):
        raise InvalidInputError(f"gated and row_major must be True or False, not {gated!r} and {row_major!r}.")
    *groups, rows, columns = x.shape
    if index is not None:
        checks.check_tensor("rows", index, (1,))
        rows = index.shape[0]
    if groups:
        height, width = (columns, rows) if transposed else (rows, columns)
        of_scales = ops.scales_shape(rows, columns, blocks, transposed)
        values = torch.empty((*groups, height, width), dtype=torch.float8_e4m3fn, device=x.device)
        return values, torch.empty((*groups, *of_scales), dtype=torch.float32, device=x.device)
    return ops.empty_output(rows, columns // 2 if gated else columns, blocks, x.device, transposed, row_major)


def _dense(x: Tensor, blocks: Blocks) -> Quantized:
    """Fresh outputs as torch would make them: contiguous."""
    rows, columns = x.shape
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty(ops.scales_shape(rows, columns, blocks), dtype=torch.float32, device=x.device)


def _has_kernel(x: object, gran_k: object) -> bool:
    """Whether a kernel can do this cast of x. Torch casts tensors on other devices, of other types, or that are not
    row-major. Its checks refuse everything else."""
    return (
        isinstance(x, Tensor)
        and x.is_cuda
        and x.dim() == 2
        and x.dtype in ops.INPUTS
        and isinstance(gran_k, int)
        and gran_k == SCALE_BLOCK
        and _casts_on(x.get_device())
        and (x.shape[1] <= 1 or x.stride(1) <= 1)
    )


@functools.cache
def _casts_on(device: int) -> bool:
    """Whether the cast kernel can be built for this CUDA device."""
    try:
        return arch.for_device(device).name in kernels.get("quantize").archs
    except UnsupportedError:
        return False
