"""The scales beside an FP8 weight of a checkpoint: which operation multiplies by such a weight, or why none does."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from deep_gemm.aot.headers import Stored
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import BLOCK, FP8, JOINED, ROWWISE
from deep_gemm.aot.quantization import blocks_not

NAMES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv")
"""What a scale's name ends in, after that of its layer."""

OF_INPUTS = "input_scale"
"""The scale of a layer's activations, if it is one that calibration has found."""

DTYPES = frozenset(("F32", "BF16", "F16", "F8_E8M0"))
"""What scales are stored as. Engines make them float32 when they load a checkpoint for Hopper."""

PARTS = {name: len(parts) for name, parts in JOINED.items()}
"""How many weights a joined one is made of."""

_SIDES = (128, 16, 32, 64, 256, 512)
"""Rows or columns of a block. The first that fits: of a side without a second block, 128 says the same as others."""


def name_of(tensors: Container[str], *prefixes: str) -> str | None:
    """The name of a layer's scales among those of `tensors`. Prefixes are its name, and what joins it to theirs."""
    names = (f"{prefix}{name}" for name in NAMES for prefix in prefixes)
    return next((name for name in names if name in tensors), None)


def of_weight(base: str, tensors: Mapping[str, Stored]) -> Stored | None:
    name = name_of(tensors, f"{base}.", f"{base}_")
    return None if name is None else tensors[name]


def granularity(n: int, k: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """How many rows and columns of a weight n x k share each of its scales; None if their shape does not tell. Scales
    may be those of blocks, (N / 128, K / 128) or ModelOpt's (N / 128, 1, K / 128, 1), of rows, or one."""
    if math.prod(shape) == 1:
        return n, k
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        shape = shape[::2]
    if shape in ((n,), (n, 1)):
        return 1, k
    if len(shape) != 2:
        return None
    rows, columns = (
        next((size for size in _SIDES if -(-all_ // size) == part), 0) for all_, part in zip((n, k), shape, strict=True)
    )
    return (rows, columns) if rows and columns else None


def operation(base: str, stored: Stored, tensors: Mapping[str, Stored]) -> tuple[str, str]:
    """The operation that multiplies by `stored`, and why none does. Of three dimensions it is a weight for each
    expert."""
    *experts, n, k = stored.shape
    if stored.dtype != "F8_E4M3":
        return FP8, f"its weights are {stored.dtype}, not E4M3."
    scale = of_weight(base, tensors)
    if scale is None:
        return FP8, "it has no scales."
    if scale.dtype not in DTYPES:
        return FP8, f"its scales are {scale.dtype}."
    shape = scale.shape
    if experts and shape[:1] == tuple(experts):
        shape = shape[1:]
    # For a weight of one 128 x 128 block, a scale per block and a scale per tensor are the same.
    if shape == (1, 1) and max(n, k) <= BLOCK:
        return FP8, ""
    size = granularity(n, k, shape)
    # A weight made of several may have a scale for each.
    parts = size != (BLOCK, BLOCK) and math.prod(shape) == PARTS.get(base.rpartition(".")[2])
    if parts or size in ((1, k), (n, k)):
        return ROWWISE, ""
    if size is None:
        return FP8, f"its scales are {shown(list(shape))}, not per row, and not per 128 x 128 block."
    static = f"{base}.{OF_INPUTS}" in tensors
    return FP8, blocks_not(*size) or ("its activations have one scale per tensor." if static else "")
