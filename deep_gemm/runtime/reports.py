"""The formats of a monitor's report: JSON and Prometheus' text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deep_gemm.errors import InvalidInputError
from deep_gemm.settings import TRACE

JSON, PROMETHEUS = ".json", ".prom"
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
    for ending in (PROMETHEUS, JSON):
        if str(path).endswith(ending) and not str(path).endswith(TRACE):
            return ending
    raise InvalidInputError(
        f"path must end in {JSON} (a report) or {PROMETHEUS} (Prometheus' text), but it is {str(path)!r}. For a trace, "
        "set DG_NVTX=1 and run nsys."
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


def _labels(entry: Mapping[str, Any]) -> str:
    return ",".join(f'{name}="{_escaped(str(entry[name]))}"' for name in _LABELS)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
