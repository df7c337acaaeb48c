"""A comparison as one PNG: speed and error by shape, as on the HTML page. Needs the `plot` extra."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeepGemmError
from ..log import duration
from .report import LIGHT, style
from .results import Comparison

BAR, GAP = 0.8, 1.2
"""The height of a bar as a fraction of its row, and the number of empty rows between two shapes."""


def prepare() -> None:
    """Load matplotlib. Raises DeepGemmError without it: call this before the comparison, which takes minutes."""
    try:
        import matplotlib
    except ImportError as error:
        raise DeepGemmError("Charts need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")


def draw(report: Comparison, path: Path) -> None:
    """Write a PNG, or what else ``path`` ends in, with a group of bars for each shape. Raises DeepGemmError without
    matplotlib, or without results."""
    prepare()
    import matplotlib.pyplot as plt

    if not report.backends:
        raise DeepGemmError("There is nothing to draw: no backend ran.")
    ticks: list[tuple[float, str]] = []
    place = 0.0
    groups = []
    for op, dims in report.cases:
        rows = [row for row in report.rows(op, dims) if row.timing or row.accuracy]
        if not rows:
            continue
        groups.append((place, rows))
        ticks += [(place + index, row.backend) for index, row in enumerate(rows)]
        place += len(rows) + GAP
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.3 * place + 1.6), sharey=True, layout="constrained")
    speeds, errors = axes
    for start, rows in groups:
        speeds.text(0, start - 0.7, f"{rows[0].op}  {rows[0].shape}", fontweight="bold", fontsize=9)
        for index, row in enumerate(rows):
            at, colour = start + index, LIGHT[style(row.backend) % len(LIGHT)]
            if row.timing:
                speeds.barh(at, rows[0].us / row.us, BAR, color=colour)
                speeds.text(rows[0].us / row.us + 0.01, at, duration(row.us), va="center", fontsize=8)
            if row.accuracy:
                share = min(row.accuracy.of_allowed, 1.0)
                errors.barh(at, share, BAR, color=colour)
                text = f"{row.accuracy.of_allowed:.0%}" if row.accuracy.right else "wrong"
                errors.text(share + 0.01, at, text, va="center", fontsize=8)
    speeds.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    speeds.set_ylim(place - GAP, -1.3)
    speeds.set_xlabel("the fastest's time / time")
    errors.set_xlabel("largest error / what is allowed")
    for axis in axes:
        axis.set_xlim(0, 1.15)
        axis.spines[["top", "right"]].set_visible(False)
    where = (
        f"{report.device}, {report.mode} mode"
        if report.roof
        else "times are those of the host's CPU, and say nothing about a GPU"
    )
    figure.suptitle(f"{', '.join(report.ops)}: {where}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
