"""The names of the timing modes, and the shapes that each is for."""

from __future__ import annotations

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench.shapes import STEADY_MIN_M

GEMM_MODES = ("flush", "graph", "steady")
"""What `deep-gemm bench` times."""
LAUNCH_MODES = ("flush", "promised", "unpromised")
SURVEY_MODES = (*LAUNCH_MODES, "steady")
"""Cold single calls; for small M, graphs of many calls with and without the weight promise; and, for shapes that power
limits, calls back to back."""

WITHIN = 1.35
"""Surveys time configs up to this factor of the best prediction. In 99% of 680 rows of an H200 survey, the model
predicted at most 1.27 times the time of its choice for the config that was best."""

GRAPH_MAX_M = 128
"""Graph mode is for decoding: for larger M the launch no longer matters."""

FLOOR_MAX_M = 64
"""For larger M, tokens are no longer small beside the weights, and the read floor counts only weights."""

POWER_LIMITED_FLOPS = 1e11
"""Launches of this many FLOPs (70 us on an H200) reach the power limit."""


def why_not(shape: GemmShape, mode: str) -> str | None:
    """Why a shape is not timed in a mode, or None if it is. Modes other than "flush" and "steady" use graphs."""
    if mode == "flush":
        return None
    if mode == "steady":
        if shape.m >= STEADY_MIN_M or meets_power_limit(shape):
            return None
        return f"fewer than {STEADY_MIN_M} tokens, and less than {POWER_LIMITED_FLOPS / 1e9:.0f} GFLOP"
    return f"more than {GRAPH_MAX_M} tokens" if shape.m > GRAPH_MAX_M else None


def meets_power_limit(shape: GemmShape) -> bool:
    """Whether launches of this shape back to back reach the GPU's power limit."""
    return shape.flops >= POWER_LIMITED_FLOPS
