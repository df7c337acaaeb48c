"""Charts of recorded rows: the ratio to cuBLASLt, and TFLOP/s or GB/s, against M. Needs the `plot` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deep_gemm.errors import DeepGemmError

Row = dict[str, Any]
PANELS = (
    ("ratio_tensorwise", "time of cuBLASLt tensorwise / ours"),
    ("tflops", "TFLOP/s"),
    ("gbps", "GB/s"),
)


def draw(rows: Sequence[Row], path: Path, mode: str) -> None:
    """Write a PNG of one mode's rows with a line for each N x K. Raises DeepGemmError without matplotlib or rows."""
    try:
        import matplotlib
    except ImportError as error:
        raise DeepGemmError("Charts need matplotlib: pip install 'deep-gemm-jit[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if row["mode"] == mode]
    if not chosen:
        raise DeepGemmError(f"There are no rows of mode {mode} to draw.")
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(9, 12), sharex=True)
    for axis, (key, label) in zip(axes, PANELS, strict=True):
        for n, k in dict.fromkeys((row["n"], row["k"]) for row in chosen):
            points = sorted((r["m"], r[key]) for r in chosen if (r["n"], r["k"]) == (n, k) and key in r)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{n} x {k}")
        axis.set_xscale("log", base=2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].legend(title="N x K", fontsize="small", ncols=2)
    axes[-1].set_xlabel("M")
    first = chosen[0]
    figure.suptitle(f"FP8 1x128 / 128x128, bf16 out, {mode} mode, {first['device']}, {first['date']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
