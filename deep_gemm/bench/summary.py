"""Summaries of rows: geometric means over ranges of M, and the worst shape of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from deep_gemm.aot.layers import FP8
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import result_rows as lines
from deep_gemm.bench.modes import FLOOR_MAX_M, GEMM_MODES, meets_power_limit

Row = dict[str, Any]

RANGES = ((1, 64, "M <= 64"), (65, 512, "M 65-512"), (513, 999, "M 513-999"), (1000, 1 << 30, "M >= 1000"))

LONG = "100 GFLOP and more"
"""Label of the steady shapes of 100 GFLOP and more. All of them reach the power limit, and have a line of their own."""

FLOOR = "read floor"

_AGAINST = (
    ("tensorwise", "ratio_tensorwise"),
    ("tensorwise, no promise", "ratio_tensorwise_unpromised"),
    ("blockwise", "ratio_blockwise"),
    ("cuBLASLt", "ratio_cublaslt"),
    ("cuBLASLt, no promise", "ratio_cublaslt_unpromised"),
    ("DeepGEMM", "ratio_deepgemm"),
    (FLOOR, "floor_fraction"),
)


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each mode and shape (or mode and subject): files are appended to."""
    subject = ("mode", "what", "m", "n", "k", "op", "output", "accumulate")
    return list({tuple(row.get(name) for name in subject): row for row in rows}.values())


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; nan of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(rows: Sequence[Row]) -> list[Row]:
    """For each operation, mode and range of M: our speed relative to each peer of `_AGAINST`, by geometric mean, and
    the worst shape. Above 1 we are faster. Entries name the operation where one is not FP8's. The read floor is for M
    <= 64."""
    timed = [row for row in rows if row["mode"] in GEMM_MODES]
    names = dict.fromkeys(map(lines.operation_of, timed))
    if any(names):
        of = {name: [row for row in timed if lines.operation_of(row) == name] for name in names}
        return [{"op": name or FP8} | entry for name in names for entry in _summary(of[name])]
    return _summary(timed)


def _summary(rows: Sequence[Row]) -> list[Row]:
    out = []
    for mode in GEMM_MODES:
        of_mode = [row for row in rows if row["mode"] == mode]
        groups = [(high, label, [row for row in of_mode if low <= row["m"] <= high]) for low, high, label in RANGES]
        if mode == "steady":
            powered = [row for row in of_mode if meets_power_limit(GemmShape(row["m"], row["n"], row["k"]))]
            groups.append((1 << 30, LONG, powered))
        for high, label, chosen in groups:
            for name, key in _AGAINST:
                if name == FLOOR and high > FLOOR_MAX_M:
                    continue
                ratios = {f"{r['m']} x {r['n']} x {r['k']}": r[key] for r in chosen if key in r}
                if ratios:
                    worst = min(ratios, key=ratios.__getitem__)
                    entry = {"mode": mode, "range": label, "against": name, "shapes": len(ratios)}
                    out.append(
                        entry
                        | {"geomean": round(geometric_mean(ratios.values()), 3)}
                        | {"worst": round(ratios[worst], 3), "worst_shape": worst}
                    )
    return out
