"""The scales beside an FP8 weight of a checkpoint: which operation multiplies by such a weight, or why none does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from deep_gemm.aot.headers import Stored
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import BLOCK, FP8, JOINED, ROWWISE
from deep_gemm.aot.quantization import blocks_not

NAMES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv")
"""What a scale's name ends in, after that of its layer."""

DTYPES = frozenset(("F32", "BF16", "F16", "F8_E8M0"))
"""What scales are stored as. Engines make them float32 when they load a checkpoint for Hopper."""

PARTS = {name: len(parts) for name, parts in JOINED.items()}
"""How many weights a joined one is made of."""

_SIDES = (16, 32, 64, 128, 256, 512)


def of_weight(base: str, tensors: Mapping[str, Stored]) -> Stored | None:
    names = (f"{base}{dot}{name}" for name in NAMES for dot in "._")
    return next((tensors[name] for name in names if name in tensors), None)


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
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # ModelOpt's FP8_PB_WO
        shape = shape[::2]
    if shape == (-(-n // BLOCK), -(-k // BLOCK)) and shape != (1, 1):
        static = f"{base}.input_scale" in tensors
        return FP8, "its activations have one scale per tensor." if static else ""
    # For a weight of one 128 x 128 block, a scale per block and a scale per tensor are the same.
    if shape == (1, 1) and max(n, k) <= BLOCK:
        return FP8, ""
    # A weight made of several may have a scale for each.
    if math.prod(shape) in (1, n, PARTS.get(base.rpartition(".")[2], 1)):
        return ROWWISE, ""
    if len(shape) != 2:
        return FP8, f"its scales are {shown(list(shape))}, not one per row or per 128 x 128 block."
    side = [
        next((size for size in _SIDES if -(-all_ // size) == part), 0) for all_, part in zip((n, k), shape, strict=True)
    ]
    return FP8, blocks_not(*side) if all(side) else f"its scales are {shown(list(shape))}, not per 128 x 128 block."
