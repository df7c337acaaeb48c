"""Casting to FP4 (E2M1) and back, in plain torch, as DeepGEMM's tests do.

Two values lie in a byte, the even column in the low four bits: int8 (M, N / 2). A scale belongs to ``gran_k`` columns
of a row. It is their largest magnitude / 6, and magnitudes below 1e-4 count as 1e-4; with ``use_ue8m0`` it is rounded
up to a power of two. Values are the input times 1 / scale, rounded to nearest, and ties go to the smaller magnitude.
There is no negative zero. See `deep_gemm.quantize.mxfp4` for the rules of OCP's MXFP4, which are others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.ops import checks
from deep_gemm.ops.cast_reference import ceil_to_ue8m0, check_packing, pack_scales, unpack_ue8m0_from_int
from deep_gemm.ops.mxfp4 import E2M1, MIDDLES, PACKED, VALUES, pack
from deep_gemm.spec import AMAX_MIN, SCALE_BLOCK, ceil_div
from deep_gemm.tensors import check_tensor, described, shape_of


def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast x (m, n) to FP4 with one scale per row per ``gran_k`` columns: int8 (m, n / 2), float32 (m, ceil(n /
    gran_k)). n is even.

    ``use_packed_ue8m0``, together with ``use_ue8m0``: scales are exponents, four to an int32; missing ones are those of
    1.0. Raises InvalidInputError.

    >>> packed, scales = deep_gemm.per_token_cast_to_fp4(torch.ones(16, 256), use_ue8m0=True, gran_k=32)
    >>> packed.shape, scales.shape
    (torch.Size([16, 128]), torch.Size([16, 8]))
    """
    _check(gran_k, use_packed_ue8m0)
    check_packing(use_ue8m0, use_packed_ue8m0)
    check_tensor("x", x, (2,), by_torch=True)
    rows, columns = x.shape
    if not x.is_floating_point() or columns % 2:
        raise InvalidInputError(f"x must be floating-point with an even number of columns, but it is {described(x)}.")
    gran_k = max(1, min(gran_k, columns))
    count = ceil_div(columns, gran_k)
    padded = torch.nn.functional.pad(x.detach().float(), (0, count * gran_k - columns))
    blocks = padded.view(rows, count, gran_k)
    scales = blocks.abs().amax(2).clamp(min=AMAX_MIN) / E2M1[-1]
    scales = ceil_to_ue8m0(scales) if use_ue8m0 else scales
    scaled = (blocks * (1.0 / scales)[:, :, None]).flatten(1)[:, :columns]
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=x.device)
    for middle in MIDDLES:
        codes += scaled.abs() > middle
    codes |= ((scaled < 0) & (codes > 0)).to(torch.uint8) << 3
    return pack(codes).view(torch.int8), pack_scales(scales) if use_packed_ue8m0 else scales


def cast_back_from_fp4(packed: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False) -> Tensor:
    """The values (m, n) float32 of FP4: int8 or uint8 (m, n / 2), with scales float32 (m, ceil(n / gran_k)), or as
    `per_token_cast_to_fp4` packs them. Raises InvalidInputError.

    >>> deep_gemm.cast_back_from_fp4(*deep_gemm.per_token_cast_to_fp4(torch.full((1, 4), -3.0), use_ue8m0=False))
    tensor([[-3., -3., -3., -3.]])
    """
    _check(gran_k, use_packed_ue8m0)
    codes = _codes("packed", packed)
    check_tensor("sf", sf, (2,), by_torch=True)
    rows, columns = codes.shape
    count = ceil_div(columns, gran_k)
    dtype, shape = (torch.int32, (rows, ceil_div(count, 4))) if use_packed_ue8m0 else (torch.float32, (rows, count))
    if sf.dtype != dtype or tuple(sf.shape) != shape or sf.device != packed.device:
        raise InvalidInputError(
            f"sf must be {dtype} {shape} on {packed.device} for packed {shape_of(packed)} and gran_k = {gran_k}, but "
            f"it is {described(sf)} on {sf.device}."
        )
    scales = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    known = torch.tensor(VALUES, dtype=torch.float32, device=packed.device)
    of_columns = torch.arange(columns, device=packed.device) // gran_k
    return known[codes.int()] * scales[:, of_columns]


def transpose_packed_fp4(a: Tensor) -> Tensor:
    """The transpose of FP4 values: int8 or uint8 (m, n / 2) to (n, m / 2), contiguous. m is even. Raises
    InvalidInputError.

    >>> deep_gemm.transpose_packed_fp4(torch.zeros(16, 4, dtype=torch.int8)).shape
    torch.Size([8, 8])
    """
    codes = _codes("a", a)
    if codes.shape[0] % 2:
        raise InvalidInputError(f"a must have an even number of rows, but it is {described(a)}. Pad it with a row.")
    return pack(codes.t()).contiguous().view(a.dtype)


def _check(gran_k: Any, use_packed_ue8m0: Any) -> None:
    checks.check_index("gran_k", gran_k, 1, checks.MAX_SIZE, "an integer from 1, the columns that share a scale")
    checks.check_bool("use_packed_ue8m0", use_packed_ue8m0)


def _codes(name: str, packed: Tensor) -> Tensor:
    """The codes (m, n) of values, uint8."""
    check_tensor(name, packed, (2,), by_torch=True)
    if packed.dtype not in PACKED:
        raise InvalidInputError(
            f"{name} must be torch.int8 or torch.uint8, two values a byte, but it is {described(packed)}."
        )
    both = packed.view(torch.uint8)
    return torch.stack((both & 15, both >> 4), 2).flatten(1)
