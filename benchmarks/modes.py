"""The names of ways of timing, and which shapes each is about."""

from __future__ import annotations

from deep_gemm.aot.workload import GemmShape
from deep_gemm.benchmarks.shapes import STEADY_MIN_M

LAUNCH_MODES = ("flush", "promised", "unpromised")
SURVEY_MODES = (*LAUNCH_MODES, "steady")
COST_MODES = ("host", "cold", "compile", "dims", "kernels")
"""What surveys and `costs` can time."""

WITHIN = 1.35
"""In 99% of 680 rows that an H200 was surveyed for with this, the model took the best config for at most 1.27 times as
long as the one that it chose."""

GRAPH_MAX_M = 128
"""Graphs of many launches are about decoding; with more tokens the launch no longer matters."""

FLOOR_MAX_M = 64
"""Past it the tokens are no longer small beside the weights, whose reading is all that the read floor counts."""

POWER_LIMITED_FLOPS = 1e11
"""A launch of so many keeps an H200 busy for 70 us, and draws all that it may."""


def why_not(shape: GemmShape, mode: str) -> str | None:
    """Why a shape is not timed in a mode, or None if it is. Any but "flush" and "steady" is of graphs."""
    if mode == "flush":
        return None
    if mode == "steady":
        if shape.m >= STEADY_MIN_M or meets_power_limit(shape):
            return None
        return f"fewer than {STEADY_MIN_M} tokens, and less than {POWER_LIMITED_FLOPS / 1e9:.0f} GFLOP"
    return f"more than {GRAPH_MAX_M} tokens" if shape.m > GRAPH_MAX_M else None


def meets_power_limit(shape: GemmShape) -> bool:
    """Whether launches of it back to back draw all the power that the GPU may."""
    return shape.flops >= POWER_LIMITED_FLOPS
