"""The charts of the documentation, from recorded rows. Needs matplotlib (the `plot` extra).

python -m deep_gemm.benchmarks.doc_charts          draw docs/charts/*.svg from benchmarks/results
python -m deep_gemm.benchmarks.doc_charts --check  say whether they show today's rows, by the exit status
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deep_gemm.backends.chart import draw
from deep_gemm.backends.results import Comparison
from deep_gemm.benchmarks import chart
from deep_gemm.benchmarks.rows import operation_of
from deep_gemm.benchmarks.run import load
from deep_gemm.benchmarks.summary import latest

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"

EVERY: dict[str, tuple[str, str, Callable[[Any, Sequence[Row], chart.Theme], None]]] = {
    "fp8-flush-ratio": ("reference", "flush", chart.ratio),
    "fp8-flush-tflops": ("reference", "flush", chart.tflops),
    "fp8-graph-ratio": ("reference", "graph", chart.ratio),
    "fp8-steady-ratio": ("reference", "steady", chart.ratio),
    "fp8-roofline": ("reference", "flush", chart.roofline),
    "fp8-decode": ("reference", "graph", chart.decode),
    "fp8-h100-flush-ratio": ("fp8-h100", "flush", chart.ratio),
    "fp8-random": ("random", "flush", chart.ratio),
    "bf16-flush-ratio": ("bf16", "flush", chart.ratio),
    "bf16-decode": ("bf16", "graph", chart.decode),
}
"""Each chart of rows in the documentation: its file, their mode, and what is drawn of them."""
COMPARISON = "compare-h100"
"""The file of a recorded comparison, and its chart."""


def rows_of(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows that a chart of `EVERY` shows: those of one mode, and of the first operation of the file."""
    file, mode, _ = EVERY[name]
    rows = latest(load(results / f"{file}.jsonl"))
    return [row for row in rows if row["mode"] == mode and operation_of(row) == operation_of(rows[0])]


def digest(rows: Sequence[Row]) -> str:
    """A digest of a chart's rows. The chart contains it, so that a check for old charts needs no matplotlib."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def svg(name: str, rows: Sequence[Row], theme: chart.Theme) -> str:
    """A chart of `EVERY` as the text of an SVG file; the same for the same rows and matplotlib."""
    kind = EVERY[name][2]
    height = 4.6 if kind is chart.roofline else 4.0 if kind is chart.decode else chart.height_of(rows)
    figure = chart.new_figure(height, theme)
    kind(figure, rows, theme)
    text = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deep_gemm"}):
        metadata = {"Date": None, "Creator": None, "Description": f"rows {digest(rows)}"}
        figure.savefig(text, format="svg", metadata=metadata)
    # A tenth of a pixel is enough, and a browser has fonts of its own.
    shorter = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag[0]), text.getvalue())
    return shorter.replace(" \n", "\n").replace("'DejaVu Sans'", "Helvetica, Arial, 'DejaVu Sans', sans-serif")


def comparison_svg(results: Path = RESULTS) -> str:
    """The chart of a recorded `deep-gemm compare`, as the text of an SVG file."""
    from matplotlib import style

    found = comparison(results)
    own = {"svg.fonttype": "none", "svg.hashsalt": "deep_gemm"}
    # The themes of other charts leave their colours behind.
    with style.context(["default", own], after_reset=True), TemporaryDirectory() as folder:
        path = Path(folder) / "chart.svg"
        draw(Comparison.from_json(found), path)
        text = re.sub(r"<dc:date>[^<]*</dc:date>", "", path.read_text()).replace(" \n", "\n")
    return text + f"<!-- rows {digest([found])} -->\n"


def comparison(results: Path = RESULTS) -> Row:
    """What `deep-gemm compare --json` printed on an H100."""
    found: Row = json.loads((results / f"{COMPARISON}.json").read_text())
    return found


def outdated(charts: Path = CHARTS, results: Path = RESULTS) -> list[str]:
    """Files of charts that are missing, or show other rows than `results` holds."""
    found = []
    for name in EVERY:
        said = f"rows {digest(rows_of(name, results))}"
        for variant in chart.THEMES:
            path = charts / f"{name}-{variant}.svg"
            if not path.exists() or said not in path.read_text():
                found.append(path.name)
    path = charts / f"{COMPARISON}.svg"
    if not path.exists() or f"rows {digest([comparison(results)])}" not in path.read_text():
        found.append(path.name)
    return found


def main(arguments: Sequence[str]) -> int:
    """Draw all charts, or with --check say which are out of date."""
    if "--check" in arguments:
        print(f"Out of date: {', '.join(outdated())}. Run make readme." if outdated() else "Charts are up to date.")
        return int(bool(outdated()))
    CHARTS.mkdir(parents=True, exist_ok=True)
    for name in EVERY:
        rows = rows_of(name)
        for variant, theme in chart.THEMES.items():
            (CHARTS / f"{name}-{variant}.svg").write_text(svg(name, rows, theme))
    (CHARTS / f"{COMPARISON}.svg").write_text(comparison_svg())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
