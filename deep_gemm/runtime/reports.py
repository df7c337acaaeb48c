"""The formats of a monitor's report: JSON, Prometheus' text, and a chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deep_gemm.errors import InvalidInputError

JSON, PROMETHEUS, TRACE = ".json", ".prom", ".trace.json"
_LABELS = ("operation", "shape", "config", "kernel", "device")
_COUNTERS = {
    "calls": "Calls that were made.",
    "bytes": "Bytes of the operands of the calls that were made.",
    "flops": "Floating-point operations of the calls that were made.",
}


def place(path: str | Path) -> Path:
    """``path`` with this process's id in place of ``%p``."""
    return Path(str(path).replace("%p", str(os.getpid())))


def kind(path: str | Path) -> str:
    """The format for the ending of a file's name. Raises InvalidInputError for an unknown ending."""
    for ending in (TRACE, PROMETHEUS, JSON):  # TRACE first, because it ends in JSON
        if str(path).endswith(ending):
            return ending
    raise InvalidInputError(
        f"path must end in {JSON} (a report), {PROMETHEUS} (Prometheus' text) or {TRACE} (a chrome trace), but it is "
        f"{str(path)!r}."
    )


def as_json(report: Mapping[str, Any]) -> str:
    """A report as text."""
    return json.dumps(report, indent=1) + "\n"


def as_prometheus(report: Mapping[str, Any]) -> str:
    """A report in the text format that Prometheus scrapes. Times are those of the timed calls."""
    lines = []
    for name, text in _COUNTERS.items():
        lines += [f"# HELP deep_gemm_{name}_total {text}", f"# TYPE deep_gemm_{name}_total counter"]
        for entry in report["calls"]:
            value = entry["calls"] * (1 if name == "calls" else entry[name])
            lines.append(f"deep_gemm_{name}_total{{{_labels(entry)}}} {value}")
    lines.append("# HELP deep_gemm_call_seconds Time of a call, from the calls that were timed.")
    lines.append("# TYPE deep_gemm_call_seconds summary")
    for entry in report["calls"]:
        if "us" in entry:
            labels, us = _labels(entry), entry["us"]
            for name, value in us.items():
                if name[1:].isdigit():  # p50 and others
                    at = f'{labels},quantile="{int(name[1:]) / 100}"'
                    lines.append(f"deep_gemm_call_seconds{{{at}}} {value / 1e6:.9g}")
            lines.append(f"deep_gemm_call_seconds_sum{{{labels}}} {us['sum'] / 1e6:.9g}")
            lines.append(f"deep_gemm_call_seconds_count{{{labels}}} {entry['timed']}")
    return "\n".join(lines) + "\n"


def as_trace(samples: Iterable[tuple[Mapping[str, str], float, float]]) -> str:
    """The events of a chrome trace from labels, start and duration (us) of calls; each device has a row."""
    events = [
        {
            "name": f"{labels['operation']} {labels['shape']}",
            "ph": "X",
            "ts": start,
            "dur": us,
            "pid": os.getpid(),
            "tid": labels["device"],
            "args": {name: labels[name] for name in ("config", "kernel")},
        }
        for labels, start, us in samples
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _labels(entry: Mapping[str, Any]) -> str:
    return ",".join(f'{name}="{_escaped(str(entry[name]))}"' for name in _LABELS)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
