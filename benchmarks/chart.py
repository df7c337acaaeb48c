"""Charts of recorded rows: the ratio to cuBLASLt, and TFLOP/s or GB/s, against M. Needs the `plot` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deep_gemm.benchmarks.rows import operation_of
from deep_gemm.errors import DeepGemmError

Row = dict[str, Any]
MAX_LINES = 12
"""Of more N x K than this, as of random shapes, no line can be followed: they are drawn as points."""

PANELS = (
    ("ratio_tensorwise", "time of cuBLASLt tensorwise / ours"),
    ("ratio_tensorwise_unpromised", "the same, weights not promised constant"),
    ("ratio_cublaslt", "time of cuBLASLt / ours"),
    ("ratio_cublaslt_unpromised", "the same, weights not promised constant"),
    ("floor_fraction", "measured read floor / our time"),
    ("tflops", "TFLOP/s"),
    ("gbps", "GB/s"),
)


def draw(rows: Sequence[Row], path: Path, mode: str) -> None:
    """Write a PNG of one mode's rows with a line for each N x K, or points where there are many.

    Raises DeepGemmError without matplotlib or rows.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DeepGemmError("Charts need matplotlib: pip install 'deep-gemm-jit[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if row["mode"] == mode]
    if not chosen:
        raise DeepGemmError(f"There are no rows of mode {mode} to draw.")
    panels = [(key, label) for key, label in PANELS if any(key in row for row in chosen)]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 4 * len(panels)), sharex=True, squeeze=False)
    axes = axes[:, 0]
    pairs = list(dict.fromkeys((row["n"], row["k"]) for row in chosen))
    for axis, (key, label) in zip(axes, panels, strict=True):
        if len(pairs) > MAX_LINES:
            axis.scatter(*zip(*((r["m"], r[key]) for r in chosen if key in r), strict=True), s=12)
        for n, k in pairs if len(pairs) <= MAX_LINES else ():
            points = sorted((r["m"], r[key]) for r in chosen if (r["n"], r["k"]) == (n, k) and key in r)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{n} x {k}")
        axis.set_xscale("log", base=2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if not key.endswith(("tflops", "gbps")):
            axis.axhline(1.0, color="black", linewidth=0.8)
    if len(pairs) <= MAX_LINES:
        axes[0].legend(title="N x K", fontsize="small", ncols=2)
    axes[-1].set_xlabel("M")
    first = chosen[0]
    measured = f"{first.get('device', 'unknown device')}, {first.get('date', 'no date')}"
    what = ", ".join(dict.fromkeys(operation_of(row) or "FP8 1x128 / 128x128, bf16 out" for row in chosen))
    figure.suptitle(f"{what}, {mode} mode, {measured}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
