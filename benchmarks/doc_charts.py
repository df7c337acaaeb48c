"""The charts of the documentation, from recorded rows. Needs matplotlib (the `docs` extra).

python benchmarks/doc_charts.py          draw README's chart in docs/charts from benchmarks/results
python benchmarks/doc_charts.py --check  say whether it shows today's rows, by the exit status

All others are drawn when `make docs` builds the pages.

Ours is drawn in one strong colour. All others have muted colours, and differ in lightness, dash and marker too, so that
colour is never the only difference. Each chart has a light and a dark variant.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from deep_gemm.bench.result_rows import operation_of
from deep_gemm.bench.run import load
from deep_gemm.bench.summary import latest

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"

OVERVIEW = "fp8-overview"
MODEL = "transformers-model"
LOSSES = "train-linear"
EVERY = {
    OVERVIEW: "reference",
    LOSSES: "train-linear-h200",
    "fp8-flush-ratio": "reference",
    "bf16-flush-ratio": "bf16",
    MODEL: "transformers-h200",
}
"""The charts, and their files of rows. They show the first operation of the file, in single calls; the overview shows
graphs too, and of single calls those from `PREFILL` tokens on. Those of losses show all rows."""
PREFILL = 128

WIDTH = 8.4
"""Inches: some 800 pixels in a browser."""
PHONE = (4.2, 5.2)
"""Width and height that a phone shows without making them smaller, for `overview`."""


@dataclass(frozen=True)
class Theme:
    """Colours of one variant; ``peers`` are those that `Series.peer` counts."""

    ours: str
    text: str
    grid: str
    background: str
    peers: tuple[str, str, str]


THEMES = {
    "light": Theme("#0060a8", "#24292f", "#d8dee4", "#ffffff", ("#8c959f", "#b08a4f", "#6e5a7e")),
    "dark": Theme("#58b4ff", "#e6edf3", "#30363d", "#0d1117", ("#8b949e", "#b5935a", "#a58fb8")),
}


@dataclass(frozen=True)
class Series:
    """One library's times: the field of a row, and how its line looks. ``peer`` is -1 for ours."""

    field: str
    label: str
    marker: str
    dash: str
    peer: int = -1

    def colour(self, theme: Theme) -> str:
        """In ``theme``."""
        return theme.ours if self.peer < 0 else theme.peers[self.peer]


SERIES = (
    Series("us_tensorwise", "cuBLASLt, one scale per tensor", "s", "-", 0),
    Series("us_cublaslt", "cuBLASLt", "s", "-", 0),
    Series("us_blockwise", "cuBLASLt, block scales", "^", ":", 1),
    Series("us_deepgemm", "DeepGEMM", "D", "--", 2),
    Series("us_unpromised", "deep_gemm, weights not declared constant", "o", ":"),
    Series("us", "deep_gemm", "o", "-"),
)
"""In the order in which they are drawn: ours comes last, on top."""

WAYS = {
    "BF16": ("bfloat16, cuBLAS", 0),
    "Transformers": ("FP8, Transformers with Triton", 1),
    "compat": ("FP8, Transformers with deep_gemm", 2),
    "nn": ("FP8, deep_gemm.nn", -1),
}
"""How `examples/transformers_model.py` serves a model: what the chart calls each way, and its `Series.peer`."""

BASES = ("us_tensorwise", "us_cublaslt")
"""What ratios are relative to."""

FINE = (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8)
"""Ticks of ratios that differ little."""


def rows_of(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows that a chart of `EVERY` shows."""
    rows = load(results / f"{EVERY[name]}.jsonl")
    if "losses" in rows[0]:  # of a model
        return rows
    rows = latest(rows)
    rows = [row for row in rows if operation_of(row) == operation_of(rows[0])]
    if name == OVERVIEW:
        return [row for row in rows if row["mode"] == "graph" or (row["mode"] == "flush" and row["m"] >= PREFILL)]
    return [row for row in rows if row["mode"] == "flush"]


def digest(rows: Sequence[Row]) -> str:
    """A digest of a chart's rows. The chart contains it, so that a check for old charts needs no matplotlib."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def svg(rows: Sequence[Row], theme: Theme) -> str:
    """A chart as the text of an SVG file; the same for the same rows and matplotlib."""
    if "part" in rows[0]:
        figure = new_figure(theme, WIDTH, 3.6)
        model(figure, rows, theme)
    elif "losses" in rows[0]:
        figure = new_figure(theme, WIDTH, 3.6)
        losses(figure, rows, theme)
    elif len({row["mode"] for row in rows}) > 1:
        figure = new_figure(theme, *PHONE)
        overview(figure, rows, theme)
    else:
        figure = new_figure(theme, WIDTH, 1.2 + 1.7 * -(-len(_pairs(rows)) // 4))
        ratio(figure, rows, theme)
    text = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deep_gemm"}):
        metadata = {"Date": None, "Creator": None, "Description": f"rows {digest(rows)}"}
        figure.savefig(text, format="svg", metadata=metadata)
    # A tenth of a pixel is enough, and a browser has fonts of its own.
    shorter = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag[0]), text.getvalue())
    return shorter.replace(" \n", "\n").replace("'DejaVu Sans'", "Helvetica, Arial, 'DejaVu Sans', sans-serif")


def ratio(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    """Speed relative to cuBLASLt against M, one panel for each N x K."""
    base = next(series for series in SERIES if series.field in BASES and any(series.field in row for row in rows))
    lines = [series for series in SERIES if series is not base]
    for axis in _panels(figure, rows, lines, base, theme):
        axis.axhline(1.0, color=base.colour(theme), linewidth=1.2, zorder=1.5)
        low, high = axis.get_ylim()
        _log_ticks(axis.yaxis, FINE if high / low < 2 else (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6))
    figure.supylabel("speed, cuBLASLt = 1", fontsize=9, color=theme.text)
    _legend(figure, [base, *lines], rows, theme)
    _caption(figure, rows, theme)


def overview(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    """Two panels that a phone can show: decode in CUDA graphs, and prefill in single calls. Speed relative to cuBLASLt
    by geometric mean over all N x K, and for ours the range that these span."""
    base, *lines = [series for series in SERIES if series.field in ("us_tensorwise", "us_deepgemm", "us")]
    panels = {"graph": "Decode: calls in a CUDA graph", "flush": "Prefill: single calls"}
    for axis, (mode, title) in zip(figure.subplots(len(panels), 1, sharey=True), panels.items(), strict=True):
        chosen = [row for row in rows if row["mode"] == mode]
        sizes = sorted({row["m"] for row in chosen})
        for series in lines:
            found = [[row[base.field] / row[series.field] for row in chosen if row["m"] == m] for m in sizes]
            axis.plot(sizes, list(map(geometric_mean, found)), **_look(series, theme))
            if series.peer < 0:
                low, high = (list(map(each, found)) for each in (min, max))
                axis.fill_between(sizes, low, high, color=series.colour(theme), alpha=0.2, linewidth=0)
        axis.axhline(1.0, color=base.colour(theme), linewidth=1.2, zorder=1.5)
        axis.set(xscale="log", yscale="log")
        axis.grid(color=theme.grid, linewidth=0.7)
        axis.set_title(title, fontsize=10, color=theme.text, pad=4)
        _log_ticks(axis.xaxis, [m for m in sizes if m & (m - 1) == 0 or m > 512])
        _log_ticks(axis.yaxis, (0.8, 1, 1.2, 1.5, 2, 2.5, 3))
    figure.supylabel("speed, cuBLASLt = 1", fontsize=9, color=theme.text)
    _legend(figure, [base, *lines], rows, theme, 1)
    cards, dates = ({str(row[field]) for row in rows} for field in ("device", "date"))
    shapes = len({(row["n"], row["k"]) for row in rows})
    said = f"fp8_gemm_nt. {', '.join(sorted(cards))}, {', '.join(sorted(dates))}. Higher is faster.\n"
    said += f"Lines: geometric means over {shapes} N x K. Band: all of these."
    figure.supxlabel(f"M (tokens)\n{said}", fontsize=8.5, color=theme.text, linespacing=1.5)


def model(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    """The losses of a model that is trained in two ways, and how fast it is served, relative to the default way."""
    losses, speeds = figure.subplots(1, 2, width_ratios=(2, 3))
    trained = {row["way"]: row["losses"] for row in rows if row["part"] == "training"}
    for way, peer in (("BF16", 0), ("FP8", -1)):
        losses.plot(trained[way], color=Series("", "", "", "", peer).colour(theme), linewidth=1.6)
    losses.set_title("Training: loss at each step", fontsize=10, color=theme.text, pad=4)
    served = {(row["way"], row["batch"]): row for row in rows if row["part"] == "serving"}
    batches = sorted({batch for _, batch in served})
    groups = [(field, batch) for field in ("prefill_per_s", "generated_per_s") for batch in batches]
    for at, (way, (name, peer)) in enumerate(WAYS.items()):
        colour = Series("", "", "", "", peer).colour(theme)
        found = [served[way, batch][field] / served["Transformers", batch][field] for field, batch in groups]
        places = [index + (at - (len(WAYS) - 1) / 2) / (len(WAYS) + 1) for index in range(len(groups))]
        speeds.bar(places, found, 1 / (len(WAYS) + 1), label=name, color=colour)
    labels = [f"{field.partition('_')[0]},\nbatch {batch}" for field, batch in groups]
    speeds.set_xticks(range(len(groups)), [label.replace("generated", "generation") for label in labels])
    speeds.set_title("Serving: tokens a second, Triton = 1", fontsize=10, color=theme.text, pad=4)
    figure.legend(*speeds.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8.5)
    for axis in (losses, speeds):
        axis.grid(color=theme.grid, linewidth=0.7, axis="y")
    cards, dates = ({str(row[field]) for row in rows} for field in ("device", "date"))
    said = f"{', '.join(sorted(cards))}, {', '.join(sorted(dates))}. Lower losses are better; higher speeds are faster."
    figure.supxlabel(said, fontsize=8.5, color=theme.text)


def losses(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    """The losses of `examples/train_linear.py`: means over the seeds of each way, and the range of the BF16 runs."""
    axis = figure.subplots()
    looks = {
        "BF16": ("bfloat16", 0, "-"),
        "FP8": ("FP8", -1, "-"),
        "FP8 mixed": ("FP8, mixed weight gradients", -1, ":"),
    }
    for way, (label, peer, dash) in looks.items():
        runs = [row["losses"] for row in rows if row["way"] == way]
        colour = Series("", "", "", "", peer).colour(theme)
        every = rows[0]["every"]
        steps = [every * (point + 0.5) for point in range(len(runs[0]))]
        axis.plot(steps, [sum(point) / len(runs) for point in zip(*runs, strict=True)], dash, label=label, color=colour)
        if peer == 0:
            low, high = ([pick(point) for point in zip(*runs, strict=True)] for pick in (min, max))
            axis.fill_between(steps, low, high, color=colour, alpha=0.3, linewidth=0)
    axis.grid(color=theme.grid, linewidth=0.7)
    axis.set_title("Training a transformer block: loss", fontsize=10, color=theme.text, pad=4)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8.5)
    cards, dates = ({str(row[field]) for row in rows} for field in ("device", "date"))
    seeds = len({row["seed"] for row in rows})
    said = f"{', '.join(sorted(cards))}, {', '.join(sorted(dates))}. Means of {seeds} seeds; band: those of bfloat16."
    figure.supxlabel(f"step\n{said}", fontsize=8.5, color=theme.text, linespacing=1.5)


def new_figure(theme: Theme, width: float, height: float) -> Any:
    """A figure of ``width`` x ``height`` inches."""
    import matplotlib
    from matplotlib.figure import Figure

    # Read when an artist is made, and so for as long as the process lives: nothing else of it draws.
    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what browsers take
            "font.size": 8.5,
            "axes.edgecolor": theme.grid,
            "axes.facecolor": "none",
            "axes.labelcolor": theme.text,
            "axes.axisbelow": True,
            "xtick.color": theme.text,
            "ytick.color": theme.text,
            "text.color": theme.text,
            "legend.frameon": False,
        }
    )
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.background)


def _pairs(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """N x K of the panels."""
    return sorted({(row["n"], row["k"]) for row in rows}, key=math.prod)


def _panels(figure: Any, rows: Sequence[Row], lines: Iterable[Series], base: Series, theme: Theme) -> list[Any]:
    """A panel with lines for each N x K."""
    pairs = _pairs(rows)
    columns = min(4, len(pairs))
    axes = list(figure.subplots(-(-len(pairs) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    for spare in axes[len(pairs) :]:
        spare.remove()
    low, top = min(row["m"] for row in rows), max(row["m"] for row in rows)
    ticks = (1024, 2048, 4096, 8192) if low > 512 else [m for m in (1, 8, 64, 512, 4096) if m <= top]
    for index, (axis, pair) in enumerate(zip(axes, pairs, strict=False)):
        chosen = [row for row in rows if (row["n"], row["k"]) == pair]
        for series in lines:
            field = series.field
            points = sorted((row["m"], row[base.field] / row[field]) for row in chosen if field in row)
            if points:
                axis.plot(*zip(*points, strict=True), **_look(series, theme))
        axis.set(xscale="log", yscale="log")
        axis.margins(x=0.06, y=0.08)
        axis.grid(color=theme.grid, linewidth=0.7)
        axis.tick_params(labelbottom=index + columns >= len(pairs))
        _log_ticks(axis.xaxis, ticks)
        axis.set_title("{} x {}".format(*pair), fontsize=9, color=theme.text, pad=4)
    return axes[: len(pairs)]


def _look(series: Series, theme: Theme) -> dict[str, Any]:
    ours = series.field == "us"
    return {
        "color": series.colour(theme),
        "marker": series.marker,
        "markersize": 4.2 if ours else 3.4,
        "markeredgewidth": 0,
        "linestyle": series.dash,
        "linewidth": 2.0 if ours else 1.2,
        "zorder": 3 if ours else 2,
    }


def _log_ticks(axis: Any, ticks: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _legend(figure: Any, lines: Iterable[Series], rows: Sequence[Row], theme: Theme, columns: int = 0) -> None:
    """Above the panels."""
    from matplotlib.lines import Line2D

    shown = [series for series in reversed(list(lines)) if any(series.field in row for row in rows)]
    handles = [Line2D([], [], label=series.label, **_look(series, theme)) for series in shown]
    columns = columns or (len(handles) if len(handles) <= 4 else 3)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, fontsize=8.5)


def _caption(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    """Below the panels: the axis' label, then what was timed, how, on which card and when."""
    what = ", ".join(dict.fromkeys(operation_of(row) or "FP8, 1x128 / 128x128 scales" for row in rows))
    cards, dates = ({str(row.get(field, "?")) for row in rows} for field in ("device", "date"))
    how = f"{what}. Single calls, L2 flushed before each. {', '.join(sorted(cards))}, {', '.join(sorted(dates))}."
    text = f"M (tokens); one panel for each N x K\n{how}\nHigher is faster."
    figure.supxlabel(text, fontsize=8.5, color=theme.text, linespacing=1.5)


def outdated(charts: Path = CHARTS, results: Path = RESULTS) -> list[str]:
    """Files of README's chart that are missing, or show other rows than `results` holds."""
    said = f"rows {digest(rows_of(OVERVIEW, results))}"
    paths = (charts / f"{OVERVIEW}-{variant}.svg" for variant in THEMES)
    return [path.name for path in paths if not path.exists() or said not in path.read_text()]


def draw(folder: Path, names: Iterable[str] = tuple(name for name in EVERY if name != OVERVIEW)) -> None:
    """Draw charts, in both variants. By default those that the repository does not hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows = rows_of(name)
        for variant, theme in THEMES.items():
            (folder / f"{name}-{variant}.svg").write_text(svg(rows, theme))


def main(arguments: Sequence[str]) -> int:
    """Draw README's chart, or with --check say whether it is out of date."""
    if "--check" in arguments:
        print(f"Out of date: {', '.join(outdated())}. Run make readme." if outdated() else "The chart is up to date.")
        return int(bool(outdated()))
    draw(CHARTS, [OVERVIEW])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
