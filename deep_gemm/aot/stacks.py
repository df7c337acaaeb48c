"""The routed experts of a checkpoint that keeps all of them in one tensor: (experts, N, K), or (experts, K, N)."""

from __future__ import annotations

from collections.abc import Mapping

from deep_gemm.aot import scales
from deep_gemm.aot.headers import WIDE, Stored
from deep_gemm.aot.layers import BF16_FP4, COLUMN, JOINED, ROW, Weight

FOUR_BITS = "_blocks"
"""How the names of MXFP4 weights end: (experts, N, K / 32, 16), two values a byte."""

_UNCLEAR = "its tensor may be N x K or K x N: neither its other weights nor the model's hidden_size tell."


def is_stack(own: str, stored: Stored) -> bool:
    """Whether the tensor with this last name (without ".weight") holds a weight of all experts."""
    if own.endswith(FOUR_BITS):
        return len(stored.shape) == 4 and 0 not in stored.shape
    return len(stored.shape) == 3 and 0 not in stored.shape and own in COLUMN | ROW


def weights(module: str, found: Mapping[str, Stored], tensors: Mapping[str, Stored], hidden: int) -> dict[str, Weight]:
    """The weights of one expert of `module`, from its stacks by their last names. `hidden` is the model's hidden_size
    or 0. All stacks are N x K or all are K x N; where the sizes do not tell which, `why_not` says so."""
    made: dict[str, Weight] = {}
    plain: dict[str, Stored] = {}
    for own, stored in found.items():
        if own.endswith(FOUR_BITS):
            _, n, blocks, width = stored.shape
            made[own.removesuffix(FOUR_BITS)] = Weight((n,), 2 * blocks * width, op=BF16_FP4)
        else:
            plain[own] = stored
    ways = [way for way in (False, True) if _fits({own: _sizes(x, way) for own, x in plain.items()}, hidden)]
    alike = {tuple(_sizes(x, way) for x in plain.values()) for way in ways}
    for own, stored in plain.items():
        transposed = bool(ways) and ways[0]
        n, k = _sizes(stored, transposed)
        op, why_not = "", ""
        if stored.dtype not in WIDE:
            op, why_not = scales.operation(f"{module}.{own}" if module else own, stored, tensors)
            if not why_not and transposed:
                why_not = "its tensor is K x N, and an FP8 weight must be N x K."
        if not why_not and len(alike) != 1:
            why_not = _UNCLEAR
        halves = own in JOINED and n % 2 == 0
        weight = Weight((n // 2, n // 2) if halves else (n,), k, why_not)
        made[own] = weight if not op else Weight(weight.rows, k, why_not, op=op)
    return made


def _sizes(stored: Stored, transposed: bool) -> tuple[int, int]:
    n, k = stored.shape[1:]
    return (k, n) if transposed else (n, k)


def _fits(sizes: Mapping[str, tuple[int, int]], hidden: int) -> bool:
    """Whether N and K of these weights fit together: what goes up begins where what goes down ends."""
    up = [(n // (2 if own in JOINED else 1), k) for own, (n, k) in sizes.items() if own in COLUMN]
    down = [(k, n) for own, (n, k) in sizes.items() if own in ROW]
    outer = {k for _, k in (*up, *down)} | ({hidden} if hidden else set())
    return len({inner for inner, _ in (*up, *down)}) == 1 and len(outer) == 1
