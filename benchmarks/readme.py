"""Fill the generated parts of README.md and docs/: measured numbers and settings.

    python benchmarks/readme.py          rewrite the files
    python benchmarks/readme.py --check  say whether they are up to date, by the exit status

Numbers there are never typed by hand. It needs a source tree, since a wheel carries neither.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import layers
import phases

from deep_gemm.aot.layers import FP8
from deep_gemm.backends.results import Comparison
from deep_gemm.bench.result_rows import operation_of
from deep_gemm.bench.run import load
from deep_gemm.bench.summary import latest, summary
from deep_gemm.settings import settings

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment_table() -> str:
    """One line for each variable, from `settings.describe()`."""
    lines = ["| variable | what it does |", "|---|---|"]
    for info in settings.describe():
        names = " or ".join(f"`{name}`" for name in info.variable.split(" or "))
        default = (
            "" if info.default in (None, "", ()) else f"`{int(info.default)}`" if info.type == "bool" else info.default
        )
        kind = f"{info.type}; default {default}" if default else info.type
        lines.append(f"| {names} | {info.doc.replace('|', '/')} *{kind}* |")
    return "\n".join(lines)


DRAWN = ("models-h100", "models-h200")
"""Files of rows of products that `layers.draw` drew. Those with an N x K that a survey has since are left out."""
PEER = {FP8: "ratio_tensorwise", "bf16_gemm_nt": "ratio_cublaslt"}
"""Operations, and the field of a row that has their speed beside cuBLASLt."""
HOW = {"graph": "CUDA graphs", "flush": "single calls", "steady": "back to back"}
SPEED = (
    (FP8, "flush", 1, 64),
    (FP8, "flush", 65, 512),
    (FP8, "flush", 513, 8192),
    ("bf16_gemm_nt", "graph", 1, 64),
    ("bf16_gemm_nt", "flush", 65, 8192),
)
"""README's lines of dense products: an operation, a mode, the least and the largest M."""
NAMES = {FP8: "FP8 linear layers, {}", "bf16_gemm_nt": "BF16 linear layers, {}"}
AGAINST_SAME, AGAINST_EASIER = ("ratio_blockwise", "ratio_cublaslt"), ("ratio_tensorwise",)
DEEPGEMM = {"0.1.4.post1": "2.6.1", "2.5.0.post20260424": "2.5.0"}
"""DeepGEMM's own version of a build, as docs/performance.md says."""
README_RECORDS = "readme-h200", "experts-h200", "transformers-h200"
OURS = "nn"
SERVED = {"Transformers": "Transformers' own FP8 layers (Triton)", "BF16": "its BF16 layers (cuBLAS)"}
"""The ways to serve a model that README compares with ours, as `examples/transformers_model.py` names them."""


def speed_table(results: Path = RESULTS) -> str:
    """README's table: lines of `SPEED`, one of experts, two of a model of Transformers, as far as there are rows."""
    lines = [
        "| what is timed | M | the same problem, cuBLASLt or as named | one scale per tensor, cuBLASLt | DeepGEMM |",
        "|---|---|---|---|---|",
    ]
    rows = _drawn(results / "readme-h200.jsonl")
    for op, mode, low, high in SPEED:
        if chosen := _asked(rows, op, mode, low, high):
            cells = [_mean(chosen, *fields) for fields in (AGAINST_SAME, AGAINST_EASIER, ("ratio_deepgemm",))]
            span = f"{chosen[0]['m']} to {chosen[-1]['m']}"
            lines.append(f"| {NAMES[op].format(HOW[mode])} | {span} | {' | '.join(cells)} |")
    if experts := _rows(results / "experts-h200.jsonl"):
        span = f"{experts[0]['m']} to {experts[-1]['m']}"
        what = f"{len(experts)} products of experts, FP8 and BF16, single calls"
        lines.append(f"| {what} | {span} | | | {_mean(experts, 'ratio_deepgemm')} |")
    for way, named in SERVED.items():
        if served := _served(results / "transformers-h200.jsonl", way):
            lines.append(f"| a small FP8 Llama generates, beside {named} | {served} | | |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], *fields: str) -> str:
    """The geometric mean of the first of `fields` that rows have, and the least one in brackets."""
    found = [row[field] for field in fields for row in rows if field in row]
    return f"**{geometric_mean(found):.2f}** ({min(found):.2f})" if found else ""


def _served(path: Path, theirs: str) -> str:
    """The second and third cell of README's line of a model: batches, and our speed relative to that of ``theirs``."""
    rows = [row for row in load(path) if row.get("part") == "serving"] if path.exists() else []
    by_batch: dict[int, dict[str, float]] = {}
    for row in rows:
        by_batch.setdefault(row["batch"], {})[row["way"]] = row["generated_per_s"]
    ratios = {batch: ways[OURS] / ways[theirs] for batch, ways in by_batch.items() if {OURS, theirs} <= ways.keys()}
    if not ratios:
        return ""
    batches = " and ".join(map(str, sorted(ratios)))
    speeds = " and ".join(f"**{ratios[batch]:.2f}**" for batch in sorted(ratios))
    return f"batch {batches} | {speeds}"


FINER = (
    ("graph", 1, 64),
    ("graph", 65, 128),
    ("flush", 65, 128),
    ("flush", 129, 512),
    ("flush", 513, 999),
    ("flush", 1000, 8192),
)


def drawn_table(results: Path = RESULTS) -> str:
    """The table of the page on FP8: all rows of products that were drawn, in narrower ranges of M."""
    lines = ["| | M | shapes | mean | least | not declared | DeepGEMM |", "|---" * 7 + "|"]
    for (op, peer), file in itertools.product(PEER.items(), DRAWN):
        drawn = _drawn(results / f"{file}.jsonl")
        for mode, low, high in FINER:
            rows = _asked(drawn, op, mode, low, high)
            if not rows:
                continue
            means = (
                f"{geometric_mean(found):.2f}" if (found := [row[name] for row in rows if name in row]) else ""
                for name in (f"{peer}_unpromised", "ratio_deepgemm")
            )
            ratios = [row[peer] for row in rows]
            what = f"`{op}`, {_gpu(rows)}, {HOW[mode]}"
            cells = [what, f"{low} to {high}", len(rows), f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}", *means]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", speed_origin(results)])


def speed_origin(results: Path = RESULTS) -> str:
    """What the records of `drawn_table` were measured on, and when."""
    found = [rows for file in DRAWN if (rows := _drawn(results / f"{file}.jsonl"))]
    return f"Records: {'; '.join(map(_origin, found))}." if found else "No run is recorded yet."


def selection_sentence(rows: Sequence[Row]) -> str:
    """How good the selector was on shapes that its calibration did not see."""
    ratios = [row["ratio_best"] for row in rows]
    legal = [row["legal"] for row in rows if "legal" in row]
    of_all = f"all {min(legal)} to {max(legal)} legal ones" if len(legal) == len(rows) else "all that were timed"
    worst = min(rows, key=lambda row: row["ratio_best"])
    shape = f"{worst['m']} x {worst['n']} x {worst['k']}"
    return (
        f"{_origin(rows)}. On {len(rows)} shapes that its calibration did not see, the chosen config ran at "
        f"{geometric_mean(ratios):.3f} of the speed of the best of {of_all}, by geometric mean. The worst was at "
        f"{worst['ratio_best']:.2f} ({shape})."
    )


def deepgemm_sentence(rows: Sequence[Row]) -> str:
    """How often DeepGEMM was faster, where it was timed. Repeats differ by a few percent."""
    worst = min(rows, key=lambda row: row["ratio_deepgemm"])
    behind = sum(row["ratio_deepgemm"] < 1 / 1.03 for row in rows)
    return (
        f"DeepGEMM was timed in {len(rows)} of these products, in the same process. It was faster by more than 3% in "
        f"{behind or 'none'} of them. The worst is {worst['ratio_deepgemm']:.2f} ({worst['m']} x {worst['n']} x "
        f"{worst['k']}, {worst['mode']})."
    )


def numbers(results: Path = RESULTS) -> str:
    """Means of the recorded rows, or a sentence where there are none. Rows themselves are files."""
    rows = _rows(results / "reference.jsonl")
    if not rows:
        return "No run is recorded yet. `make bench` on a machine with a GPU records one and fills this in."
    drawn = _rows(results / "readme-h200.jsonl")
    parts = [f"README's table: {_origin(drawn)} ({', '.join(map(_file, README_RECORDS))})."] if drawn else []
    parts += [
        "### FP8, DeepSeek-V3's N x K",
        f"{_origin(rows)} ({_file('reference')}). Geometric means over ranges of M; above 1 deep_gemm is faster:",
        summary_table(rows),
    ]
    beside = [row for row in rows if "ratio_deepgemm" in row]
    if beside:
        parts.append(deepgemm_sentence(beside))
    random = _rows(results / "random.jsonl")
    if random:
        count = len({(row["m"], row["n"], row["k"]) for row in random})
        origin = f"{count} shapes ({RANDOM}). {_origin(random)} ({_file('random')}):"
        parts += ["### FP8, random shapes", origin, summary_table(random)]
    half = _rows(results / "bf16.jsonl")
    if half:
        parts += ["### BF16, DeepSeek-V3's N x K", f"{_origin(half)} ({_file('bf16')}):", summary_table(half)]
    return "\n\n".join(parts)


def _file(name: str) -> str:
    return f"[records](../benchmarks/results/{name}.jsonl)"


def costs(results: Path = RESULTS) -> str:
    """Tables of what the host, compiling and loading cost."""
    rows, parts = _costs(results / "costs.jsonl"), []
    for title, table, wanted in (
        ("Host, compile and load", cost_table, lambda row: row["mode"] in ("host", "cold")),
        ("The phases of a first build", phase_table, lambda row: row["mode"] == "compile"),
        ("N and K at run time or compiled in", dims_table, lambda row: row["mode"] == "dims"),
        ("How many kernels a model needs", count_table, lambda row: row["mode"] == "kernels"),
    ):
        chosen = [row for row in rows if wanted(row)]
        if chosen:
            parts += [f"## {title}", f"{_origin(chosen)}.", table(chosen)]
    return "\n\n".join(parts)


RANDOM = "M 1..8192, N 64..32768, K 128..16384, log-uniform, N and K multiples of 16, 64 or 128"
"""How `shapes.log_uniform` draws."""


def _drawn(path: Path) -> list[Row]:
    kept = layers.layers(kept_out=True)
    return [row for row in _rows(path) if (row["n"], row["k"]) in kept]


def _asked(rows: Sequence[Row], op: str, mode: str, low: int, high: int) -> list[Row]:
    return [row for row in rows if (row.get("op", FP8), row["mode"]) == (op, mode) and low <= row["m"] <= high]


def _gpu(rows: Sequence[Row]) -> str:
    return str(rows[0]["device"].removeprefix("NVIDIA ").split()[0])


def _rows(path: Path) -> list[Row]:
    rows = latest(load(path)) if path.exists() else []
    return sorted(rows, key=lambda row: row["m"])


def _costs(path: Path) -> list[Row]:
    """The rows of each mode that were measured with its newest sources. Names of kernels change with sources, so older
    rows would stay beside newer ones."""
    rows = load(path) if path.exists() else []
    digests = {row["mode"]: row["source_digest"] for row in rows}
    return latest([row for row in rows if row["source_digest"] == digests[row["mode"]]])


AGAINST = {
    "tensorwise": "cuBLASLt, per-tensor scales = 1 | worst",
    "tensorwise, no promise": "not declared constant",
    "blockwise": "cuBLASLt, block scales = 1",
    "cuBLASLt": "cuBLASLt = 1 | worst",
    "cuBLASLt, no promise": "not declared constant",
    "DeepGEMM": "DeepGEMM = 1",
    "read floor": "read floor / time",
}
"""Headings of the columns of means. The first of a file also has a worst shape."""


def summary_table(rows: Sequence[Row]) -> str:
    """A line for each mode and range of M: our speed relative to each peer, and the read floor over our time."""
    entries: dict[tuple[str, str], dict[str, Row]] = {}
    several = len({operation_of(row) for row in rows}) > 1
    for entry in summary(rows):
        mode = f"{entry['op']}, {entry['mode']}" if several else entry["mode"]
        entries.setdefault((mode, entry["range"]), {})[entry["against"]] = entry
    against = [name for name in AGAINST if any(name in found for found in entries.values())]
    titles = f"mode | M | shapes | {' | '.join(AGAINST[name] for name in against)}"
    lines = [f"| {titles} |", "|---" * (titles.count("|") + 1) + "|"]
    for (mode, span), found in entries.items():
        cells = [mode, span.removeprefix("M "), str(max(entry["shapes"] for entry in found.values()))]
        for name in against:
            mean = f"{found[name]['geomean']:.3f}" if name in found else "-"
            if "worst" in AGAINST[name]:
                cells.append(f"**{mean}**")
                cells.append(f"{found[name]['worst']:.3f} ({found[name]['worst_shape']})" if name in found else "-")
            else:
                cells.append(mean)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row]) -> str:
    """A line for each thing that was timed, and for each kernel and way to build it the times of both compilers."""
    lines, of = ["| what | time | by NVCC | by NVRTC |", "|---|---|---|---|"], dict[str, dict[str, str]]()
    for row in rows:
        what, _, compiler = row["what"].rpartition(", ")
        named = compiler in ("nvcc", "nvrtc")
        of.setdefault(what if named else row["what"], {})[compiler if named else ""] = _time(row["us"])
    lines += [f"| {what} | {' | '.join(us.get(by, '') for by in ('', 'nvcc', 'nvrtc'))} |" for what, us in of.items()]
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
    """A line for each N x K: the time if they are compiled in over that at run time, its mean and range over M."""
    of: dict[str, list[float]] = {}
    for row in rows:
        for what in (row["what"].partition(" x ")[2], "all"):
            of.setdefault(what, []).append(row["ratio_nk"])
    lines = ["| N x K | values of M | speed of N and K at run time | least | most |", "|---|---|---|---|---|"]
    for what in [*(each for each in of if each != "all"), "all"]:
        found = of[what]
        lines.append(f"| {what} | {len(found)} | {geometric_mean(found):.3f} | {min(found):.3f} | {max(found):.3f} |")
    return "\n".join(lines)


def count_table(rows: Sequence[Row]) -> str:
    """A line for each model, and for each weight that has more kernels with its sizes: distinct kernels for every M."""
    lines = ['| for | kernels, sizes at run time | with `compiled_dims="nk"` |', "|---|---|---|"]
    more = (row for row in rows if row["kernels_nk"] != row["kernels"])
    return "\n".join([*lines, *(f"| {row['what']} | {row['kernels']} | {row['kernels_nk']} |" for row in more)])


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _origin(rows: Sequence[Row]) -> str:
    fields = ["device", "driver", "torch", "cuda", "date"]
    values = {field: ", ".join(sorted({str(row[field]) for row in rows if row.get(field)})) for field in fields}
    versions = {DEEPGEMM.get(row["deepgemm"], str(row["deepgemm"])) for row in rows if "deepgemm" in row}
    deepgemm = f", DeepGEMM {', '.join(sorted(versions))}" if versions else ""
    driver = values["driver"] or "none"
    return f"{values['device']}, driver {driver}, torch {values['torch']}{deepgemm}, {values['date']}"


def backends_table(results: Path = RESULTS) -> str:
    """The times of a recorded `deep-gemm compare`: a line for each shape, the shortest of a right result in bold."""
    found = Comparison.from_json(json.loads((results / "compare-h100.json").read_text()))
    names = list(dict.fromkeys(row.backend for row in found.results))
    lines = [f"| operation | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for op, dims in found.cases:
        rows = {row.backend: row for row in found.rows(op, dims)}
        best = min((row for row in rows.values() if row.status == "ok"), key=lambda row: row.us)
        cells = []
        for name in names:
            row = rows.get(name)
            text = _time(row.us) if row is not None and row.timing else ""
            cells.append(f"**{text}**" if row is best else text)
        lines.append(f"| {op} {best.shape} | {' | '.join(cells)} |")
    where = found.environment
    origin = f"{where['device']}, driver {where['driver']}, torch {where['torch']}, {where['date']}, {found.mode} mode"
    return "\n".join([*lines, "", f"Measured on an {origin}."])


def parts(results: Path = RESULTS) -> dict[str, dict[str, str]]:
    """The generated parts of each file."""
    return {
        "README.md": {"speed": speed_table(results)},
        "docs/performance.md": {"numbers": numbers(results)},
        "docs/measurements/costs.md": {"costs": costs(results)},
        "docs/measurements/fp8.md": {"drawn": drawn_table(results)},
        "docs/measurements/tuning.md": {"selector": selection_sentence(_rows(results / "selection.jsonl"))},
        "docs/measurements/backends.md": {"backends": backends_table(results)},
        "docs/settings.md": {"environment": environment_table()},
    }


def fill(text: str, parts: dict[str, str], where: str = "The file") -> str:
    """`text` with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced, for each part."""
    for name, body in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        pieces = pattern.split(text)
        if len(pieces) != 4:
            raise ValueError(f"{where} must have <!-- {name}:begin --> and <!-- {name}:end --> once.")
        before, begin, end, after = pieces
        text = f"{before}{begin}{body}\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    outdated = []
    for name, made in parts().items():
        path = ROOT / name
        if not path.exists():
            print(f"There is no {path}: run this from a source tree with an editable install.")
            return 2
        before = path.read_text()
        after = fill(before, made, name)
        if before != after:
            outdated.append(name)
            if "--check" not in arguments:
                path.write_text(after)
    if "--check" in arguments:
        print(f"{', '.join(outdated)} must be filled: run make readme." if outdated else "All files are up to date.")
        return int(bool(outdated))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
