"""MXFP4 weights in the order in which kernels read them, in plain torch: see ``templates/include/fp4_weights.cuh``.

A piece is 64 rows by 128 of K: the codes, and then the exponents of their blocks of 32. Codes lie as the tensor core's
fragments of the activations' type need them, so that a thread reads 16 bytes of one row. Pieces of a row of pieces lie
one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.ops import mxfp4
from deep_gemm.spec import ceil_div
from deep_gemm.tensors import shape_of, shown

ROWS, DEPTH = 64, 128
_CODE_BYTES = 4096
_EXPONENT_BYTES = {False: 128, True: 256}
"""With relative exponents of 4 bits, and with absolute ones of 8."""
SPAN = 15
"""Between the largest and the smallest exponent of a row that relative exponents hold."""
_TYPES = {"fp8": torch.uint8, "bf16": torch.int16}
"""Of packed weights, as wide as the activations, so that weights for the others are seen to be wrong."""
_BASE = {"fp8": 129, "bf16": 128}
"""A code decoded with d = 0 is its value / 2^13 in E5M2, and / 2^14 in BF16; d = 15 is the row's largest exponent,
whose bias is 127."""


_Bits: TypeAlias = tuple[tuple[int, int, int, int], ...]


def _fp8_bits() -> _Bits:
    """Codes of K 4q to 4q + 3, and of 16 after: selectors of PRMT, with signs on top of the bytes they belong to."""
    starts = [(16 * half + 4 * i, 8 * i + 7 - 4 * half) for half in (0, 1) for i in range(4)]
    return tuple((at, at + 1, at + 2, sign) for at, sign in starts)


def _bf16_bits() -> _Bits:
    """Codes of K 2q and 2q + 1, and of 8, 16 and 24 after. Rotations by 0, 3 and 6 bring the first three pairs to the
    places of a BF16 number's sign, lowest bits of the exponent and highest bit of the mantissa. The last pair's bits
    are moved there one by one."""
    starts = ((6, 15), (22, 31), (9, 18), (25, 2), (12, 21), (28, 5))
    return (*((at, at + 1, at + 2, sign) for at, sign in starts), (3, 4, 0, 1), (19, 20, 16, 17))


_BITS = {"fp8": _fp8_bits(), "bf16": _bf16_bits()}
"""Where the bits of each of a word's eight codes are, the sign last. Numbers and no tensor: a copy from the host cannot
be captured in a CUDA graph."""


class Fp4Weights(NamedTuple):
    """MXFP4 weights that `transform_fp4_weights` made: ``packed`` (..., ceil(N / 64), ceil(K / 128), 4224 or 4352
    bytes), uint8 for FP8 activations and int16 for BF16, and ``factors`` (..., rows of all pieces) float32."""

    packed: Tensor
    factors: Tensor


def transform(packed: Any, scales: Any, activations: Any, absolute: bool | None = None) -> Fp4Weights:
    """See `deep_gemm.transform_fp4_weights`. ``absolute``: exponents of 8 bits; with None where they are needed."""
    if not isinstance(activations, str) or activations not in _TYPES:
        raise InvalidInputError(f"activations must be 'fp8' or 'bf16', but it is {shown(activations)}.")
    codes, exponents = mxfp4.operand(packed, scales)
    with torch.no_grad():
        wide = not _fits(codes, exponents) if absolute is None else absolute
        (n, k), front = (codes.shape[-2], codes.shape[-1] * 2), codes.shape[:-2]
        pieces, blocks = ceil_div(n, ROWS), ceil_div(k, DEPTH)
        size = _CODE_BYTES + _EXPONENT_BYTES[wide]
        out = torch.empty((*front, pieces, blocks, size), dtype=torch.uint8, device=codes.device)
        factors = torch.ones((*front, pieces * ROWS), dtype=torch.float32, device=codes.device)
        for index in product(
            *map(range, front)
        ):  # one matrix after the other: each needs ten times its memory meanwhile
            _arrange(codes[index], exponents[index], activations, wide, out[index], factors[index])
        return Fp4Weights(out.view(_TYPES[activations]), factors)


def empty(groups: int, n: int, k: int, activations: str, device: Any) -> Fp4Weights:
    """Weights of zeros (groups, n, k), with relative exponents."""
    pieces = ceil_div(n, ROWS)
    shape = groups, pieces, ceil_div(k, DEPTH), _CODE_BYTES + _EXPONENT_BYTES[False]
    packed = torch.zeros(shape, dtype=torch.uint8, device=device).view(_TYPES[activations])
    return Fp4Weights(packed, torch.ones(groups, pieces * ROWS, device=device))


def is_transformed(packed: Any, grouped: bool) -> bool:
    """Whether weights have the form of `transform`, by their shape."""
    if not isinstance(packed, Tensor) or packed.dtype not in tuple(_TYPES.values()) or packed.dim() != 3 + grouped:
        return False
    return packed.shape[-1] * packed.element_size() - _CODE_BYTES in tuple(_EXPONENT_BYTES.values())


def is_absolute(packed: Tensor) -> bool:
    """Whether exponents have 8 bits."""
    return packed.shape[-1] * packed.element_size() == _CODE_BYTES + _EXPONENT_BYTES[True]


def check(
    packed: Tensor, factors: Tensor, activations: str, n: int, k: int, groups: int | None, name: str = "b"
) -> None:
    """Check the types and shapes of transformed weights, the operand ``name`` of a product with N = n and K = k."""
    if packed.dtype != _TYPES[activations]:
        made = next((kind for kind, dtype in _TYPES.items() if dtype == packed.dtype), "")
        raise InvalidInputError(
            f"{name} must be {_TYPES[activations]}, as transform_fp4_weights(..., activations={activations!r}) returns "
            f"it, but it is {packed.dtype}{f', for activations={made!r}' if made else ''}. Transform the weights again."
        )
    front = () if groups is None else (groups,)
    pieces, blocks = ceil_div(n, ROWS), ceil_div(k, DEPTH)
    if tuple(packed.shape[:-1]) != (*front, pieces, blocks) or not is_transformed(packed, groups is not None):
        raise InvalidInputError(
            f"{name} must be the weights (N, K) = {(n, k)} of transform_fp4_weights, of shape "
            f"{(*front, pieces, blocks)} and a piece's size,{' for the N of d and the K of a,' * (name == 'b')} but it "
            f"is {shape_of(packed)}."
        )
    if factors.dtype != torch.float32 or tuple(factors.shape) != (*front, pieces * ROWS):
        raise InvalidInputError(
            f"the factors of {name} must be torch.float32 {(*front, pieces * ROWS)}, as transform_fp4_weights returns "
            f"them, but they are {factors.dtype} {shape_of(factors)}."
        )


def check_contiguous(named: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not contiguous."""
    for name, x in named.items():
        if not x.is_contiguous():
            raise InvalidInputError(
                f"{name} must be contiguous, but it is {shape_of(x)} with strides {x.stride()}. Pass .contiguous()."
            )


def restored(packed: Tensor, factors: Tensor, n: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The values (N, K) of one matrix of `transform`, decoded from what kernels read."""
    activations = next(name for name, each in _TYPES.items() if each == packed.dtype)
    raw, wide = packed.contiguous().view(torch.uint8), is_absolute(packed)
    pieces, blocks = raw.shape[:2]
    words = raw[..., :_CODE_BYTES].contiguous().view(torch.int32).view(pieces, blocks, 4, 2, 8, 4, 4)
    codes = torch.zeros((*words.shape, 8), dtype=torch.int32, device=raw.device)
    for index, places in enumerate(_BITS[activations]):
        for bit, at in enumerate(places):
            codes[..., index] |= (words >> at & 1) << bit
    values = torch.tensor(mxfp4.VALUES, dtype=dtype, device=raw.device)[codes]
    values = _elements(values, activations)
    tail = raw[..., _CODE_BYTES:].contiguous()
    if wide:
        exponents = tail.view(pieces, blocks, ROWS, 4).permute(0, 2, 1, 3).reshape(pieces * ROWS, -1)
        powers = mxfp4.factors(exponents, dtype)
    else:
        relative = tail.view(torch.int32).view(pieces, blocks, 4, 1, 8, 1)
        shift = 16 * torch.arange(2, device=raw.device).view(2, 1, 1) + 4 * torch.arange(4, device=raw.device)
        d = (relative >> shift & 15).permute(0, 2, 3, 4, 1, 5).reshape(pieces * ROWS, -1)
        powers = torch.exp2((d + _BASE[activations] - 127 - SPAN).to(dtype)) * factors.to(dtype).unsqueeze(-1)
    return (values.unflatten(-1, (-1, mxfp4.BLOCK)) * powers.unsqueeze(-1)).flatten(-2)[:n, :k]


def _used(codes: Tensor) -> Tensor:
    """Which blocks of 32 have a value that is not zero."""
    return ((codes & 0x77) != 0).unflatten(-1, (-1, mxfp4.BLOCK // 2)).any(-1)


def _fits(codes: Tensor, exponents: Tensor) -> bool:
    """Whether relative exponents hold all weights. Blocks of zeros have any exponent, but NaN has none."""
    if codes.numel() == 0:
        return True
    wide = exponents.to(torch.int16)
    used = _used(codes)
    span = torch.where(used, wide, -1).amax(-1) - torch.where(used, wide, 256).amin(-1)
    # torch.compile ends a graph at an `if`, but has an error for bool(...).
    if (span > SPAN).any() or (wide == mxfp4.NAN).any():  # noqa: SIM103
        return False
    return True


def _arrange(codes: Tensor, exponents: Tensor, activations: str, wide: bool, out: Tensor, factors: Tensor) -> None:
    """Write the pieces of one matrix, and the factors of its rows."""
    pieces, blocks = out.shape[:2]
    below, right = pieces * ROWS - codes.shape[0], blocks * DEPTH - codes.shape[1] * 2
    codes = torch.nn.functional.pad(codes, (0, right // 2, 0, below))
    exponents = torch.nn.functional.pad(exponents, (0, right // mxfp4.BLOCK, 0, below)).to(torch.int32)
    used = _used(codes)
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int32)
    each = _by_thread(each, activations, pieces, blocks)
    words = torch.zeros(each.shape[:-1], dtype=torch.int32, device=out.device)
    for index, places in enumerate(_BITS[activations]):
        for bit, at in enumerate(places):
            words |= (each[..., index] >> bit & 1) << at
    out[..., :_CODE_BYTES] = words.reshape(pieces, blocks, -1).view(torch.uint8)
    if wide:
        tail = exponents.view(pieces, ROWS, blocks, 4).permute(0, 2, 1, 3).to(torch.uint8)
        out[..., _CODE_BYTES:] = tail.reshape(pieces, blocks, -1)
        return
    top = torch.where(used, exponents, 0).amax(-1, keepdim=True)
    d = torch.where(used, exponents - (top - SPAN), 0).view(pieces, 4, 2, 8, blocks, 4)
    shift = 16 * torch.arange(2, device=out.device).view(2, 1, 1, 1) + 4 * torch.arange(4, device=out.device)
    relative = (d << shift).sum((2, 5), dtype=torch.int32).permute(0, 3, 1, 2)
    out[..., _CODE_BYTES:] = relative.reshape(pieces, blocks, -1).contiguous().view(torch.uint8)
    factors.copy_(torch.exp2(top[:, 0].double() - _BASE[activations]))


def _by_thread(x: Tensor, activations: str, pieces: int, blocks: int) -> Tensor:
    """(N, K) as (pieces, blocks, warp, upper or lower 8 rows, row, thread of 4, block of 32, 8 codes of a word)."""
    if activations == "fp8":
        # half, thread, code
        return x.view(pieces, 4, 2, 8, blocks, 4, 2, 4, 4).permute(0, 4, 1, 2, 3, 7, 5, 6, 8).flatten(-2)
    # pair of 16, half, thread, code
    return x.view(pieces, 4, 2, 8, blocks, 4, 2, 2, 4, 2).permute(0, 4, 1, 2, 3, 8, 5, 6, 7, 9).flatten(-3)


def _elements(x: Tensor, activations: str) -> Tensor:
    """The reverse of `_by_thread`."""
    pieces, blocks = x.shape[:2]
    if activations == "fp8":
        x = x.unflatten(-1, (2, 4)).permute(0, 2, 3, 4, 1, 6, 7, 5, 8)
    else:
        x = x.unflatten(-1, (2, 2, 2)).permute(0, 2, 3, 4, 1, 6, 7, 8, 5, 9)
    return x.reshape(pieces * ROWS, blocks * DEPTH)
