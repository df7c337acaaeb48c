"""MXFP4 (OCP Microscaling Formats 1.0) in plain torch, on any device: two values of E2M1 in a byte, and a power of two
as the scale of 32 values along K.

A tensor (..., N, K) is a pair. ``packed`` is uint8 or int8 (..., N, K / 2), the even k in the low four bits. gpt-oss's
blocks (..., N, K / 32, 16) are the same bytes. ``scales`` (..., N, K / 32) are exponents, float8_e8m0fnu or uint8, or
float32 powers of two. Or four exponents make an int32, (..., N, ceil(K / 128)), the lowest k in the low eight bits. An
exponent e stands for 2^(e - 127), and 255 for NaN: then all 32 values are NaN.
"""

from __future__ import annotations

from itertools import pairwise, product

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.spec import SCALE_BLOCK, ceil_div
from deep_gemm.tensors import check_tensor, described, shape_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the codes 0 to 7."""
VALUES = (*E2M1, *(-value for value in E2M1))
"""The values of the codes 0 to 15."""
MIDDLES = tuple((low + high) / 2 for low, high in pairwise(E2M1))
"""Between each magnitude and the next one."""
BLOCK = 32
"""Values along K that share a scale."""
NAN = 255
PACKED = (torch.uint8, torch.int8)
_BIAS = 127
_EXPONENT_MAX = 2
"""The exponent of E2M1's largest value, 6."""
_E4M3_TOP = 8
"""E4M3 has 2^8 and 1.5 * 2^8, and E2M1's other values below."""


def operand(packed: Tensor, scales: Tensor, names: tuple[str, str] = ("packed", "scales")) -> tuple[Tensor, Tensor]:
    """The pair as uint8: codes (..., N, K / 2) and exponents (..., N, K / 32), views where the form allows."""
    for name, tensor in zip(names, (packed, scales), strict=True):
        check_tensor(name, tensor, by_torch=True)
    x, sf = names
    if packed.dtype not in PACKED:
        raise InvalidInputError(
            f"{x} must be uint8 or int8 with two values of E2M1 in each byte, but it is {described(packed)}."
        )
    if packed.device != scales.device:
        raise InvalidInputError(f"{sf} must be on the device of {x}, {packed.device}, but it is on {scales.device}.")
    if packed.dim() == scales.dim() + 1 and packed.dim() > 2 and packed.shape[-1] == BLOCK // 2:
        packed = packed.flatten(-2)
    if packed.dim() < 2 or packed.shape[-1] % (BLOCK // 2):
        raise InvalidInputError(
            f"{x} must be (..., N, K / 2) with K a multiple of {BLOCK}, or (..., N, K / {BLOCK}, {BLOCK // 2}), but "
            f"it is {shape_of(packed)}."
        )
    return packed.view(torch.uint8), _exponents(packed, scales, x, sf)


def _exponents(packed: Tensor, scales: Tensor, x: str, sf: str) -> Tensor:
    count = packed.shape[-1] * 2 // BLOCK
    four = scales.dtype == torch.int32
    expected = (*packed.shape[:-1], ceil_div(count, 4) if four else count)
    if tuple(scales.shape) != expected:
        raise InvalidInputError(
            f"{sf} must have the shape {expected} for {x} {shape_of(packed)} of MXFP4, one for "
            f"{4 * BLOCK if four else BLOCK} of K, but it has {shape_of(scales)}. If the bytes are E4M3, pass "
            f"{x}.view(torch.float8_e4m3fn)."
        )
    if four:  # their strides may be MN-major's
        return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :count]
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    if scales.dtype != torch.float32:
        raise InvalidInputError(
            f"{sf} must be exponents (float8_e8m0fnu or uint8), float32 powers of two, or int32 with four exponents "
            f"each, but it is {scales.dtype}."
        )
    if scales.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{sf} of float32 cannot be read while a CUDA graph is captured: the host looks whether they are powers of "
            f"two. Pass exponents, {sf}.to(torch.float8_e8m0fnu), or call transform_fp4_weights before the capture."
        )
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    # 2^-127 is a subnormal of float32. NaN has any mantissa and sign.
    right = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents < NAN) | (bits == 0x400000) | scales.isnan()
    if not bool(right.all()):
        raise InvalidInputError(
            f"{sf} must be powers of two from 2^-127 to 2^127, or NaN, but some are not. MXFP4 has no other scales: "
            "cast the weights again, by quantize.mxfp4."
        )
    return torch.where(scales.isnan(), NAN, exponents).to(torch.uint8)


def dequantise(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (..., N, K), see `deep_gemm.dequantise`."""
    codes, exponents = operand(packed, scales, ("x", "sf"))
    return _values(codes, exponents, dtype)


def _values(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = _pairs(codes.device, exact)[codes.int()].view(*exponents.shape, BLOCK)
    return (blocks * factors(exponents, exact).unsqueeze(-1)).flatten(-2).to(dtype)


def factors(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(e - 127), or NaN."""
    bits = exponents.to(torch.int32)
    whole = torch.where(bits == 0, 0x400000, torch.where(bits == NAN, 0x7FC00000, bits << 23))
    return whole.view(torch.float32).to(dtype)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two values of each byte."""
    return torch.tensor([(low, high) for high, low in product(VALUES, VALUES)], dtype=dtype, device=device)


def pack(codes: Tensor) -> Tensor:
    """Two codes in each byte, uint8, those of even columns in the low four bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed values and float8_e8m0fnu scales of x, see `deep_gemm.quantize.mxfp4`."""
    check_tensor("x", x, by_torch=True)
    if not x.is_floating_point() or x.element_size() < 2:
        raise InvalidInputError(
            f"x must be a tensor of bfloat16, float16, float32 or float64, but it is {x.dtype}. Pass x.float()."
        )
    if x.dim() < 2 or x.shape[-1] % BLOCK:
        raise InvalidInputError(f"x must be (..., N, K) with K a multiple of {BLOCK}, but it is {shape_of(x)}.")
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    # The biased exponent of the largest magnitude; 255 for NaN and infinity.
    largest = (blocks.abs().view(torch.int32) >> 23).amax(-1)
    exponents = torch.where(largest == NAN, NAN, (largest - _EXPONENT_MAX).clamp(min=0)).to(torch.uint8)
    inverse = factors(torch.where(exponents == NAN, NAN, 2 * _BIAS - exponents.int()), torch.float32)
    magnitudes = blocks.abs() * inverse.unsqueeze(-1)
    codes = blocks.signbit().to(torch.uint8) << 3
    for code, middle in enumerate(MIDDLES):  # ties go to the even code
        codes += magnitudes >= middle if code % 2 else magnitudes > middle
    return pack(codes.flatten(-2)), exponents.view(torch.float8_e8m0fnu)


def to_fp8(packed: Tensor, scales: Tensor, rounding: bool) -> tuple[Tensor, Tensor]:
    """E4M3 values and 128 x 128 scales, see `deep_gemm.quantize.mxfp4_to_fp8`."""
    if not isinstance(rounding, bool):
        raise InvalidInputError(f"rounding must be True or False, but it is {rounding!r}.")
    codes, exponents = operand(packed, scales)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=codes.device)
    sf = torch.empty((*shape[:-2], *_grid(shape)), dtype=torch.float32, device=codes.device)
    lost = torch.zeros((), dtype=torch.int64, device=codes.device)
    # One matrix after the other: each needs several bytes a value meanwhile.
    for index in product(*map(range, shape[:-2])):
        scaled, sf[index] = _scaled(codes[index], exponents[index])
        values[index] = scaled
        if not rounding:
            lost += _is_rounded(scaled, values[index]).sum()
    if lost > 0:
        raise InvalidInputError(
            f"packed has {int(lost)} of {values.numel()} values that E4M3 with one scale for 128 x 128 would round, "
            "since the exponents of a block span more than 14. quantize.mxfp4_rounded says in which blocks. Pass "
            "rounding=True to round them to the nearest, or multiply in BF16, which is exact: "
            "dequantise(packed, scales, dtype=torch.bfloat16)."
        )
    return values, sf


def rounded(packed: Tensor, scales: Tensor) -> Tensor:
    """How many values of each block of 128 x 128 `to_fp8` rounds."""
    codes, exponents = operand(packed, scales)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    counts = torch.empty((*shape[:-2], *_grid(shape)), dtype=torch.int32, device=codes.device)
    for index in product(*map(range, shape[:-2])):
        scaled, _ = _scaled(codes[index], exponents[index])
        counts[index] = _blocks(_is_rounded(scaled, scaled.to(torch.float8_e4m3fn))).sum((1, 3))
    return counts


def _is_rounded(scaled: Tensor, values: Tensor) -> Tensor:
    return (scaled != values.float()) & ~scaled.isnan()


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    return ceil_div(shape[-2], SCALE_BLOCK), ceil_div(shape[-1], SCALE_BLOCK)


def _blocks(x: Tensor) -> Tensor:
    """(N, K) as (blocks, 128, blocks, 128), with zeros behind."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    return padded.unflatten(0, (-1, SCALE_BLOCK)).unflatten(2, (-1, SCALE_BLOCK))


def _scaled(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (N, K) over the scales of its blocks, not yet rounded, and these scales. Scales are as small as the
    largest value of the block allows, so that small values keep their bits, and at least 2^-126."""
    values = _values(codes, exponents, torch.float64)
    largest = _blocks(values.nan_to_num(0.0).abs()).amax((1, 3))
    exponent = (torch.frexp(largest).exponent - 1 - _E4M3_TOP).clamp(min=1 - _BIAS)
    sf = torch.where(largest > 0, torch.exp2(exponent.double()), 1.0)
    rows, columns = values.shape
    spread = sf.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return (values / spread).float(), sf.float()
