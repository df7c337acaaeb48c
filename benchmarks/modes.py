"""Which shapes a way of timing is about."""

from __future__ import annotations

from deep_gemm.select.heuristic import POWER_LIMITED_FLOPS
from deep_gemm.workload import GemmShape

GRAPH_MAX_M = 128
"""Graphs of many launches are about decoding; with more tokens the launch no longer matters."""


def why_not(shape: GemmShape, mode: str) -> str | None:
    """Why a shape is not timed in a mode, or None if it is. Any but "flush" and "steady" is of graphs."""
    if mode == "flush":
        return None
    if mode == "steady":
        # Shorter ones wait for the host rather than for power: its time would be told as the GPU's.
        if shape.flops >= POWER_LIMITED_FLOPS:
            return None
        return f"less than {POWER_LIMITED_FLOPS / 1e9:.0f} GFLOP, which does not meet the limit of power"
    return f"more than {GRAPH_MAX_M} tokens" if shape.m > GRAPH_MAX_M else None
