"""A comparison as one PNG: times and errors by shape. Needs the `plot` extra."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeepGemmError
from .results import Comparison


def draw(report: Comparison, path: Path) -> None:
    """Write a PNG with a group of bars for each shape. Raises DeepGemmError without matplotlib, or without results."""
    try:
        import matplotlib
    except ImportError as error:
        raise DeepGemmError("Charts need matplotlib: pip install 'deep-gemm-jit[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = report.cases
    if not report.backends:
        raise DeepGemmError("There is nothing to draw: no backend ran.")
    height = 0.25 * len(shapes) * (len(report.backends) + 1) + 1.5
    figure, (times, errors) = plt.subplots(1, 2, figsize=(12, height), sharey=True)
    for index, name in enumerate(report.backends):
        rows = {(row.op, row.dims): row for row in report.results if row.backend == name}
        for axis, value in ((times, "timing"), (errors, "accuracy")):
            at, lengths = [], []
            for place, shape in enumerate(shapes):
                found = getattr(rows.get(shape), value, None)
                if found is not None:
                    at.append(place + 0.8 * (index + 0.5) / len(report.backends))
                    lengths.append(found.us if value == "timing" else found.l2_rel)
            axis.barh(at, lengths, 0.7 / len(report.backends), label=name, color=f"C{index}")
    times.set_yticks([place + 0.4 for place in range(len(shapes))])
    times.set_yticklabels([f"{op}\n{' x '.join(map(str, dims))}" for op, dims in shapes])
    times.invert_yaxis()
    times.set_xlabel("median time, us")
    errors.set_xlabel("L2 of the errors / L2 of the exact result")
    for axis in (times, errors):
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="upper center", ncols=len(report.backends), fontsize="small")
    where = f"{report.device}, {report.mode} mode" if report.roof else "times of the host's CPU, no GPU's"
    figure.suptitle(where, y=0.02, fontsize="small")
    figure.tight_layout(rect=(0, 0.04, 1, 1 - 0.4 / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
