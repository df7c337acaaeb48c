"""Casting to FP8 with scales, and back, in plain torch: the reference of the kernels in ``quantize.py``.

Every cast returns (tensor, scales): E4M3 values of the input's shape, and float32 scales. Value times scale is the
input, rounded. A scale is the block's largest magnitude / 448 (the largest E4M3 value). Magnitudes below 1e-4 count as
1e-4, so that a block of zeros has a scale above 0. With ``use_ue8m0`` the scale is rounded up to a power of two. Values
are the input times 1 / scale; each step is a float32 operation. Scales below 2^-128, except for 0, count as that. Sizes
need not be multiples of the block: the last block is then smaller. Casts have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.spec import AMAX_MIN, SCALE_BLOCK, align, ceil_div
from deep_gemm.tensors import check_tensor, described, shown

E4M3_MAX = 448.0
SCALE_MIN = 2.0**-128
"""The least scale above 0: the reciprocal of a smaller one is more than a float32 can hold."""


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast x (m, k) with one scale per row per ``gran_k`` columns: (m, k) E4M3, (m, ceil(k / gran_k)) float32.

    ``use_packed_ue8m0``, together with ``use_ue8m0``: scales are exponents, as `pack_scales` packs them.
    """
    check_packing(use_ue8m0, use_packed_ue8m0)
    values, sf = cast_blocks(x, 1, gran_k, use_ue8m0)
    return values, pack_scales(sf) if use_packed_ue8m0 else sf


def check_packing(use_ue8m0: object, use_packed_ue8m0: object) -> None:
    """Refuse what is no bool, and packed scales that are no powers of two."""
    _check_bool("use_packed_ue8m0", use_packed_ue8m0)
    _check_bool("use_ue8m0", use_ue8m0)
    if use_packed_ue8m0 and not use_ue8m0:
        raise InvalidInputError("use_ue8m0 must be True with use_packed_ue8m0: only powers of two are exponents alone.")


def pack_scales(sf: Tensor) -> Tensor:
    """`pack_ue8m0_to_int` of scales (m, any number); missing ones are those of 1.0."""
    return pack_ue8m0_to_int(torch.nn.functional.pad(sf, (0, -sf.shape[1] % 4), value=1.0))


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> tuple[Tensor, Tensor]:
    """Cast x (k, n) with one scale per column per ``gran_k`` rows: (k, n) E4M3, (ceil(k / gran_k), n) float32."""
    return cast_blocks(x, gran_k, 1, use_ue8m0)


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> tuple[Tensor, Tensor]:
    """Cast x (n, k) with one scale per square block of side ``gran_k``.

    Returns (n, k) E4M3 and (ceil(n / gran_k), ceil(k / gran_k)) float32.
    """
    return cast_blocks(x, gran_k, gran_k, use_ue8m0)


def per_custom_dims_cast_to_fp8(x: Tensor, dims: Sequence[int], use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Cast x of any rank with one scale for each index of the dimensions ``dims``, shared along all the others.

    Returns E4M3 of x's shape, and float32 whose shape is that of ``dims``, in the order of x.

    >>> values, scales = deep_gemm.per_custom_dims_cast_to_fp8(torch.ones(4, 8), dims=(0,), use_ue8m0=False)
    """
    _check_input("x", x)
    _check_bool("use_ue8m0", use_ue8m0)
    named = tuple(dims) if isinstance(dims, Iterable) else (dims,)
    if not all(_is_whole(dim) and -x.dim() <= dim < x.dim() for dim in named):
        raise InvalidInputError(f"dims must name dimensions of x, which has {x.dim()}, but it is {dims!r}.")
    kept = {dim % x.dim() for dim in named}
    shared = [dim for dim in range(x.dim()) if dim not in kept]
    values = x.detach().float()
    if x.numel():
        magnitude = values.abs().amax(dim=shared, keepdim=True) if shared else values.abs()
    else:  # an empty tensor has no largest magnitude: scales are those of zeros
        magnitude = values.new_zeros([size if dim in kept else 1 for dim, size in enumerate(x.shape)])
    sf = _scale(magnitude, use_ue8m0)
    return (values * inverse(sf)).to(torch.float8_e4m3fn), sf.reshape(
        [size for dim, size in enumerate(x.shape) if dim in kept]
    )


def dequantise(
    x: Tensor, sf: Tensor, granularity: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values that an FP8 or MXFP4 tensor and its scales stand for.

    Args:
        x: (rows, columns), E4M3 or E5M2. Or MXFP4: uint8 or int8 (..., N, K / 2), the even k in the low four bits, or
            gpt-oss's blocks (..., N, K / 32, 16).
        sf: (ceil(rows / granularity[0]), ceil(columns / granularity[1])), float32, of any strides. Of MXFP4
            (..., N, K / 32): float8_e8m0fnu, uint8 exponents or float32 powers of two. Or (..., N, ceil(K / 128)):
            int32 with four exponents each.
        granularity: the size of the block that shares a scale: (1, 128) unless given, and (1, 32) for MXFP4.
        dtype: the type of the result, and for FP8 of the multiplication. MXFP4 is exact in float64, and in float32 and
            bfloat16 too, except that values from 2^128 on are infinite.

    Raises InvalidInputError, which names the argument.

    >>> values, scales = deep_gemm.quantize.blocks(torch.ones(16, 256))
    >>> deep_gemm.dequantise(values, scales, (128, 128))[0, 0].item()
    1.0
    """
    is_mxfp4 = isinstance(x, Tensor) and x.dtype in (torch.uint8, torch.int8)
    for name, tensor in (("x", x), ("sf", sf)):
        check_tensor(name, tensor, None if is_mxfp4 else (2,), by_torch=True)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidInputError(f"dtype must be torch.bfloat16, float16, float32 or float64, but it is {dtype!r}.")
    if is_mxfp4:
        from deep_gemm.ops import mxfp4  # here: a first product imports this module, and needs no MXFP4

        if granularity not in (None, (1, mxfp4.BLOCK)):
            raise InvalidInputError(
                f"granularity must be (1, {mxfp4.BLOCK}) or None for MXFP4, but it is {granularity!r}."
            )
        return mxfp4.dequantise(x, sf, dtype)
    granularity = (1, SCALE_BLOCK) if granularity is None else granularity
    swapped = (x.dtype, sf.dtype) == (torch.float32, torch.float8_e4m3fn)
    for name, tensor, wanted, instead in (
        ("x", x, (torch.float8_e4m3fn, torch.float8_e5m2), "Only values of FP8 have scales."),
        ("sf", sf, (torch.float32,), "Call .float() on it."),
    ):
        if tensor.dtype not in wanted:
            instead = "Swap the two: values come first, then their scales." if swapped else instead
            listed = " or ".join(map(str, wanted))
            raise InvalidInputError(f"{name} must be a tensor of {listed}, but it is {described(tensor)}. {instead}")
    if x.device != sf.device:
        raise InvalidInputError(f"sf must be on the device of x, {x.device}, but it is on {sf.device}.")
    if not (isinstance(granularity, Sequence) and len(granularity) == 2 and all(_is_whole(g, 1) for g in granularity)):
        raise InvalidInputError(f"granularity must be two whole numbers from 1, but it is {granularity!r}.")
    rows, columns = x.shape
    expected = _of_blocks(rows, columns, granularity)
    if tuple(sf.shape) != expected:
        known = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK), (SCALE_BLOCK, 1), (1, columns), (rows, columns))
        fits = next((each for each in known if 0 not in each and sf.shape == _of_blocks(rows, columns, each)), None)
        raise InvalidInputError(
            f"sf must have the shape {expected} for x {tuple(x.shape)} in blocks of {granularity}, but it has "
            f"{tuple(sf.shape)}.{f' They fit granularity={fits}.' if fits else ''}"
        )
    scales = sf.to(dtype)
    if granularity[0] > 1:
        scales = scales.repeat_interleave(min(granularity[0], rows), dim=0)[:rows]
    if granularity[1] > 1:
        scales = scales.repeat_interleave(min(granularity[1], columns), dim=1)[:, :columns]
    return x.to(dtype) * scales


def _of_blocks(rows: int, columns: int, granularity: Sequence[int]) -> tuple[int, int]:
    return ceil_div(rows, granularity[0]), ceil_div(columns, granularity[1])


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Each positive float32 rounded up to a power of two; infinity and NaN stay.

    >>> deep_gemm.ceil_to_ue8m0(torch.tensor([0.3, 1.0, 3.0])).tolist()
    [0.5, 1.0, 4.0]
    """
    check_tensor("x", x, by_torch=True)
    if x.dtype != torch.float32:
        raise InvalidInputError(f"x must be torch.float32, but it is {described(x)}.")
    exponent_mask, mantissa_mask = 0x7F800000, 0x007FFFFF
    rounded = ((x.view(torch.int32) + mantissa_mask) & exponent_mask).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """The exponents of float32 powers of two, four to an int32: (..., k) to (..., k / 4). Other bits are dropped.

    >>> hex(deep_gemm.pack_ue8m0_to_int(torch.tensor([1.0, 2.0, 4.0, 0.5])).item())
    '0x7e81807f'
    """
    check_tensor("x", x, by_torch=True)
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] % 4:
        raise InvalidInputError(f"x must be float32 with a multiple of four columns, but it is {described(x)}.")
    return pack_exponents(x)


def pack_exponents(x: Tensor) -> Tensor:
    """`pack_ue8m0_to_int` of float32 with a multiple of four columns, on any device."""
    if not x.numel():  # a view may not have its strides
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 4), dtype=torch.int32)
    exponents = (x.view(torch.int32) >> 23).to(torch.uint8)  # the sign is 0
    return exponents.clone(memory_format=torch.contiguous_format).view(torch.int32)


def unpack_ue8m0_from_int(packed: Tensor) -> Tensor:
    """The powers of two that `pack_ue8m0_to_int` packed: (..., k / 4) int32 to (..., k) float32."""
    check_tensor("packed", packed, by_torch=True)
    if packed.dtype != torch.int32 or packed.dim() == 0:
        raise InvalidInputError(
            f"packed must be an int32 tensor of one dimension or more, but it is {described(packed)}."
        )
    # Not .contiguous(), which does not change the strides of a single element.
    exponents = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def cast_blocks(
    x: Tensor, block_rows: int, block_columns: int, use_ue8m0: bool, epsilon: float = AMAX_MIN
) -> tuple[Tensor, Tensor]:
    """Cast x (rows, columns) with one scale for each block. Magnitudes below ``epsilon`` count as ``epsilon``."""
    _check_input("x", x, 2)
    _check_bool("use_ue8m0", use_ue8m0)
    if not (_is_whole(block_rows, 1) and _is_whole(block_columns, 1)):
        wrong = block_columns if _is_whole(block_rows, 1) else block_rows
        raise InvalidInputError(f"gran_k must be a whole number from 1, but it is {wrong!r}.")
    rows, columns = x.shape
    block_rows, block_columns = min(block_rows, max(1, rows)), min(block_columns, max(1, columns))
    padded = x.new_zeros(align(rows, block_rows), align(columns, block_columns), dtype=torch.float32)
    padded[:rows, :columns] = x.detach()
    blocks = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns)
    sf = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True), use_ue8m0, epsilon)
    cast = (blocks * inverse(sf)).to(torch.float8_e4m3fn).view_as(padded)[:rows, :columns]
    return cast.contiguous(), sf.view(blocks.shape[0], blocks.shape[2])


def inverse(sf: Tensor) -> Tensor:
    """The factor for values: 1 / scale, or the largest float32 for 2^-128, the least scale above 0. A scale of zero has
    the factor zero, so that blocks of zeros stay zeros."""
    largest = torch.finfo(torch.float32).max
    return torch.where(sf == 0, torch.zeros_like(sf), (1.0 / sf).clamp(max=largest))


def _scale(amax: Tensor, use_ue8m0: bool, epsilon: float = AMAX_MIN) -> Tensor:
    # By a tensor: by a number, torch would multiply by its reciprocal on a GPU, which is another float32 now and then.
    sf = amax.clamp(min=epsilon) / amax.new_full((), E4M3_MAX)
    sf = torch.where(sf == 0, sf, sf.clamp(min=SCALE_MIN))
    return ceil_to_ue8m0(sf) if use_ue8m0 else sf


def _check_input(name: str, x: Tensor, rank: int | None = None) -> None:
    check_tensor(name, x, None if rank is None else (rank,), by_torch=True)
    if not x.is_floating_point() or x.element_size() < 2:
        raise InvalidInputError(
            f"{name} must be a tensor of bfloat16, float16, float32 or float64, but it is {described(x)}. Pass "
            f"{name}.float()."
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be True or False, but it is {shown(value)}.")


def _is_whole(value: object, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
