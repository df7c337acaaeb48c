"""The charts of the documentation, from recorded rows. Needs matplotlib (the `plot` extra).

python benchmarks/doc_charts.py          draw docs/charts/*.svg from benchmarks/results
python benchmarks/doc_charts.py --check  say whether they show today's rows, by the exit status
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deep_gemm.bench import chart
from deep_gemm.bench.rows import operation_of
from deep_gemm.bench.run import load
from deep_gemm.bench.summary import latest

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"

OVERVIEW = "fp8-overview"
EVERY = {OVERVIEW: "reference", "fp8-flush-ratio": "reference", "bf16-flush-ratio": "bf16"}
"""The charts, and their files of rows. They show the first operation of the file, in single calls; the overview shows
graphs too, and of single calls those from `PREFILL` tokens on."""
PREFILL = 128


def rows_of(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows that a chart of `EVERY` shows."""
    rows = latest(load(results / f"{EVERY[name]}.jsonl"))
    rows = [row for row in rows if operation_of(row) == operation_of(rows[0])]
    if name == OVERVIEW:
        return [row for row in rows if row["mode"] == "graph" or (row["mode"] == "flush" and row["m"] >= PREFILL)]
    return [row for row in rows if row["mode"] == "flush"]


def digest(rows: Sequence[Row]) -> str:
    """A digest of a chart's rows. The chart contains it, so that a check for old charts needs no matplotlib."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def svg(rows: Sequence[Row], theme: chart.Theme) -> str:
    """A chart as the text of an SVG file; the same for the same rows and matplotlib."""
    if len({row["mode"] for row in rows}) > 1:
        width, height = chart.PHONE
        figure = chart.new_figure(height, theme, width)
        chart.overview(figure, rows, theme)
    else:
        figure = chart.new_figure(chart.height_of(rows), theme)
        chart.ratio(figure, rows, theme)
    text = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deep_gemm"}):
        metadata = {"Date": None, "Creator": None, "Description": f"rows {digest(rows)}"}
        figure.savefig(text, format="svg", metadata=metadata)
    # A tenth of a pixel is enough, and a browser has fonts of its own.
    shorter = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag[0]), text.getvalue())
    return shorter.replace(" \n", "\n").replace("'DejaVu Sans'", "Helvetica, Arial, 'DejaVu Sans', sans-serif")


def outdated(charts: Path = CHARTS, results: Path = RESULTS) -> list[str]:
    """Files of charts that are missing, or show other rows than `results` holds."""
    found = []
    for name in EVERY:
        said = f"rows {digest(rows_of(name, results))}"
        paths = (charts / f"{name}-{variant}.svg" for variant in chart.THEMES)
        found += [path.name for path in paths if not path.exists() or said not in path.read_text()]
    return found


def main(arguments: Sequence[str]) -> int:
    """Draw all charts, or with --check say which are out of date."""
    if "--check" in arguments:
        print(f"Out of date: {', '.join(outdated())}. Run make readme." if outdated() else "Charts are up to date.")
        return int(bool(outdated()))
    CHARTS.mkdir(parents=True, exist_ok=True)
    for name in EVERY:
        for variant, theme in chart.THEMES.items():
            (CHARTS / f"{name}-{variant}.svg").write_text(svg(rows_of(name), theme))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
