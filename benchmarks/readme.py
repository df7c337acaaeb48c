"""Fill the generated parts of README.md: measured numbers from recorded rows, environment variables from the settings.

    python -m deep_gemm.benchmarks.readme          rewrite README.md
    python -m deep_gemm.benchmarks.readme --check  say whether it is up to date, by the exit status

Numbers in the README are never typed by hand. It needs a source tree, since a wheel carries no README.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from deep_gemm.benchmarks import phases
from deep_gemm.benchmarks.run import load
from deep_gemm.benchmarks.summary import GEMM_MODES, summary
from deep_gemm.settings import settings

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment_table() -> str:
    """One line for each variable, from `settings.describe()`."""
    lines = ["| variable | kind | default | what it does |", "|---|---|---|---|"]
    for info in settings.describe():
        names = " or ".join(f"`{name}`" for name in info.variable.split(" or "))
        default = (
            "" if info.default in (None, "", ()) else f"`{int(info.default)}`" if info.type == "bool" else info.default
        )
        lines.append(f"| {names} | {info.type} | {default} | {info.doc.replace('|', '/')} |")
    return "\n".join(lines)


def selection_sentence(rows: Sequence[Row]) -> str:
    """How good the selector was on shapes that its calibration did not see."""
    ratios = [row["ratio_best"] for row in rows]
    legal = [row["legal"] for row in rows if "legal" in row]
    of_all = f"all {min(legal)} to {max(legal)} legal ones" if len(legal) == len(rows) else "all that were timed"
    worst = min(rows, key=lambda row: row["ratio_best"])
    shape = f"{worst['m']} x {worst['n']} x {worst['k']}"
    return (
        f"**The selector**, {_origin(rows)}: on {len(rows)} shapes that its calibration did not see, the chosen config "
        f"ran at {geometric_mean(ratios):.3f} of the best of {of_all}, by geometric mean; the worst at "
        f"{worst['ratio_best']:.2f} ({shape})."
    )


def deepgemm_sentence(rows: Sequence[Row]) -> str:
    """How often DeepGEMM was the faster, where it was timed beside us; a few percent are what repeats differ by."""
    worst = min(rows, key=lambda row: row["ratio_deepgemm"])
    behind = sum(row["ratio_deepgemm"] < 1 / 1.03 for row in rows)
    return (
        f"**DeepGEMM** was timed beside us in {len(rows)} of these rows, and was faster by more than 3% in "
        f"{behind or 'none'}; the worst is {worst['ratio_deepgemm']:.2f} ({worst['m']} x {worst['n']} x {worst['k']}, "
        f"{worst['mode']})."
    )


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each mode and shape (or mode and subject): files are appended to."""
    subject = ("mode", "what", "m", "n", "k")
    return list({tuple(row.get(name) for name in subject): row for row in rows}.values())


def numbers(results: Path = RESULTS) -> str:
    """Tables of the recorded rows, or a sentence where there are none."""
    rows = _rows(results / "reference.jsonl")
    if not rows:
        return "No run is recorded yet. `make bench` on a machine with a GPU records one and fills this in."
    parts = [f"**The public list**, {_origin(rows)}. Geometric means over ranges of M:", summary_table(rows)]
    beside = [row for row in rows if "ratio_deepgemm" in row]
    if beside:
        parts.append(deepgemm_sentence(beside))
    random = _rows(results / "random.jsonl")
    if random:
        count = len({(row["m"], row["n"], row["k"]) for row in random})
        parts += [f"**{count} random shapes** ({RANDOM}), {_origin(random)}:", summary_table(random)]
    chosen = _rows(results / "selection.jsonl")
    if chosen:
        parts.append(selection_sentence(chosen))
    for mode in GEMM_MODES:
        chosen = [row for row in rows if row["mode"] == mode]
        if chosen:
            title = f"<details><summary>Each shape in {mode} mode, {_origin(chosen)}</summary>"
            parts += [title, gemm_table(chosen), "</details>"]
    costs = _costs(results / "costs.jsonl")
    for title, table, wanted in (
        ("Host, compile and load", cost_table, lambda row: row["mode"] in ("host", "cold")),
        ("What a first build is made of", phase_table, lambda row: row["mode"] == "compile"),
        ("Sizes given at run time and compiled in", dims_table, lambda row: row["mode"] == "dims"),
        ("How many kernels there are", count_table, lambda row: row["mode"] == "kernels"),
    ):
        chosen = [row for row in costs if wanted(row)]
        if chosen:
            parts += [f"**{title}**, {_origin(chosen)}.", table(chosen)]
    return "\n\n".join(parts)


RANDOM = "M 1..8192, N 64..32768, K 128..16384, log-uniform, N and K multiples of 16, 64 or 128"
"""How `shapes.log_uniform` draws."""


def _rows(path: Path) -> list[Row]:
    rows = latest(load(path)) if path.exists() else []
    return sorted(rows, key=lambda row: row["m"])


def _costs(path: Path) -> list[Row]:
    """The rows of each mode's last sources: names of kernels change with them, and an old one would stay for ever."""
    rows = load(path) if path.exists() else []
    digests = {row["mode"]: row["source_digest"] for row in rows}
    return latest([row for row in rows if row["source_digest"] == digests[row["mode"]]])


AGAINST = {
    "tensorwise": "against tensorwise | worst",
    "tensorwise, no promise": "without promise",
    "blockwise": "against blockwise",
    "DeepGEMM": "against DeepGEMM",
    "read floor": "read floor / us",
}
"""What stands above a mean."""


def summary_table(rows: Sequence[Row]) -> str:
    """A line for each mode and range of M: how fast we are against cuBLASLt, and DeepGEMM if it was timed; and the read
    floor over our time."""
    entries: dict[tuple[str, str], dict[str, Row]] = {}
    for entry in summary(rows):
        entries.setdefault((entry["mode"], entry["range"]), {})[entry["against"]] = entry
    against = [name for name in AGAINST if name != "DeepGEMM" or any(name in found for found in entries.values())]
    titles = f"mode | M | shapes | {' | '.join(AGAINST[name] for name in against)}"
    lines = [f"| {titles} |", "|---" * (titles.count("|") + 1) + "|"]
    for (mode, span), found in entries.items():
        mean = {name: f"{found[name]['geomean']:.3f}" if name in found else "-" for name in against}
        first = found.get("tensorwise")
        worst = f"{first['worst']:.3f} ({first['worst_shape']})" if first else "-"
        cells = [mode, span, str(max(entry["shapes"] for entry in found.values()))]
        cells += [f"**{mean['tensorwise']}**", worst, *(mean[name] for name in against[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gemm_table(rows: Sequence[Row]) -> str:
    """A line for each shape; in graph mode also without the promise, and against the read floor."""
    columns: list[tuple[str, str, int]] = [
        ("us", "us", 1),
        ("tflops", "TFLOP/s", 0),
        ("gbps", "GB/s", 0),
        ("ratio_tensorwise", "speed against tensorwise", 2),
        ("ratio_blockwise", "against blockwise", 2),
        ("ratio_deepgemm", "against DeepGEMM", 2),
        ("us_unpromised", "us without the promise", 1),
        ("ratio_tensorwise_unpromised", "then against tensorwise", 2),
        ("floor_fraction", "read floor / us", 2),
    ]
    columns = columns[:5] + [column for column in columns[5:] if any(column[0] in row for row in rows)]
    lines = [f"| M | N x K | {' | '.join(title for _, title, _ in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [f"{row[key]:.{digits}f}" if key in row else "-" for key, _, digits in columns]
        lines.append(f"| {row['m']} | {row['n']} x {row['k']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row]) -> str:
    """A line for each thing that was timed."""
    lines = ["| what | time |", "|---|---|"]
    lines += [f"| {row['what']} | {_time(row['us'])} |" for row in rows]
    return "\n".join(lines)


def phase_table(rows: Sequence[Row]) -> str:
    """A line for each kernel and compiler: its phases in ms. NVCC's front end is counted with its optimiser."""
    columns = [name for name in phases.COLUMNS if any(name in row for row in rows)]
    titles = ["kernel", *(name.replace("_ms", ", ms") for name in columns), "all, ms"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [f"{row[name]:.1f}" if name in row else "-" for name in columns]
        lines.append(f"| {row['what']} | {' | '.join(cells)} | {row['us'] / 1e3:.1f} |")
    return "\n".join(lines)


def dims_table(rows: Sequence[Row]) -> str:
    """A line for each shape with N and K at run time, and what it is to have them compiled in."""
    mean = geometric_mean(row["ratio_nk"] for row in rows)
    lines = ["| M x N x K | us | with N and K compiled in | their ratio |", "|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['us']:.1f} | {row['us_nk']:.1f} | {row['ratio_nk']:.3f} |" for row in rows]
    return "\n".join([*lines, f"| geometric mean | | | {mean:.3f} |"])


def count_table(rows: Sequence[Row]) -> str:
    """A line for each weight and model: distinct kernels for every M."""
    lines = ['| for | kernels, sizes at run time | with `compiled_dims="nk"` |', "|---|---|---|"]
    lines += [f"| {row['what']} | {row['kernels']} | {row['kernels_nk']} |" for row in rows]
    return "\n".join(lines)


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _origin(rows: Sequence[Row]) -> str:
    fields = ["device", "driver", "torch", "cuda", "date"]
    values = {field: ", ".join(sorted({str(row[field]) for row in rows if row.get(field)})) for field in fields}
    versions = {str(row["deepgemm"]) for row in rows if "deepgemm" in row}
    deepgemm = f", DeepGEMM {', '.join(sorted(versions))}" if versions else ""
    driver = values["driver"] or "none"
    return f"{values['device']}, driver {driver}, torch {values['torch']}{deepgemm}, {values['date']}"


def fill(text: str, parts: dict[str, str]) -> str:
    """`text` with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced, for each part."""
    for name, body in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        pieces = pattern.split(text)
        if len(pieces) != 4:
            raise ValueError(f"README.md must have <!-- {name}:begin --> and <!-- {name}:end --> once.")
        before, begin, end, after = pieces
        text = f"{before}{begin}{body}\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    readme = ROOT / "README.md"
    if not readme.exists():
        print(f"There is no {readme}: run this from a source tree with an editable install.")
        return 2
    before = readme.read_text()
    after = fill(before, {"numbers": numbers(), "environment": environment_table()})
    if "--check" in arguments:
        print("README.md is up to date." if before == after else "README.md is out of date: run make readme.")
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
