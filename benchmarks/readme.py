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
from typing import Any

from deep_gemm.benchmarks.run import GEMM_MODES, geometric_mean, load
from deep_gemm.settings import settings

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_AGAINST = ("tensorwise", "blockwise")


def environment_table() -> str:
    """One line for each variable, from `settings.describe()`."""
    lines = ["| variable | kind | default | what it does |", "|---|---|---|---|"]
    for info in settings.describe():
        names = " or ".join(f"`{name}`" for name in info.variable.split(" or "))
        default = (
            "" if info.default in (None, "") else f"`{int(info.default)}`" if info.type == "bool" else info.default
        )
        lines.append(f"| {names} | {info.type} | {default} | {info.doc.replace('|', '/')} |")
    return "\n".join(lines)


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each mode and shape (or mode and subject): files are appended to."""
    found = {(row["mode"], row.get("what"), row.get("m"), row.get("n"), row.get("k")): row for row in rows}
    return list(found.values())


def numbers(results: Path = RESULTS) -> str:
    """Tables of the recorded rows, or a sentence where there are none."""
    path = results / "reference.jsonl"
    rows = latest(load(path)) if path.exists() else []
    if not rows:
        return "No run is recorded yet. `make bench` on a machine with a GPU records one and fills this in."
    parts = []
    for mode in GEMM_MODES:
        chosen = [row for row in rows if row["mode"] == mode]
        if chosen:
            parts += [f"**{mode} mode**, {_origin(chosen)}.", gemm_table(chosen)]
    path = results / "costs.jsonl"
    costs = load(path) if path.exists() else []
    if costs:
        # Names of kernels change with the sources, so what another version cost would stay for ever.
        costs = latest([row for row in costs if row["source_digest"] == costs[-1]["source_digest"]])
        parts += [f"**Host, compile and load**, {_origin(costs)}.", cost_table(costs)]
    return "\n\n".join(parts)


def gemm_table(rows: Sequence[Row]) -> str:
    """A line for each shape, and the geometric means of the ratios for each M."""
    lines = [
        "| M | N x K | us | TFLOP/s | GB/s | speed against cuBLASLt tensorwise | against cuBLASLt blockwise |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in sorted({row["m"] for row in rows}):
        chosen = [row for row in rows if row["m"] == m]
        for row in chosen:
            ratios = [f"{row[key]:.2f}" if (key := f"ratio_{name}") in row else "-" for name in _AGAINST]
            cells = [
                str(m),
                f"{row['n']} x {row['k']}",
                f"{row['us']:.1f}",
                f"{row['tflops']:.0f}",
                f"{row['gbps']:.0f}",
            ]
            lines.append(f"| {' | '.join(cells + ratios)} |")
        means = []
        for name in _AGAINST:
            values = [row[key] for row in chosen if (key := f"ratio_{name}") in row]
            means.append(f"**{geometric_mean(values):.2f}**" if values else "-")
        lines.append(f"| **{m}** | **geometric mean** | | | | {' | '.join(means)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row]) -> str:
    """A line for each thing that was timed."""
    lines = ["| what | time |", "|---|---|"]
    lines += [f"| {row['what']} | {_time(row['us'])} |" for row in rows]
    return "\n".join(lines)


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _origin(rows: Sequence[Row]) -> str:
    fields = ["device", "driver", "torch", "cuda", "date"]
    values = {field: ", ".join(sorted({str(row[field]) for row in rows if row.get(field)})) for field in fields}
    return f"{values['device']}, driver {values['driver'] or 'none'}, torch {values['torch']}, {values['date']}"


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
