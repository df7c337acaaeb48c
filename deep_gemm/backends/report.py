"""A comparison as one self-contained HTML page: no script, no network, a light and a dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..log import duration, rate
from .accuracy import ULP_LABELS
from .registry import Rate, get_operation, names
from .results import Comparison, Result

MARKERS = ("M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", "M-4.6-4.6h9.2v9.2h-9.2z", "M0-6.4 6.4 0 0 6.4-6.4 0z")
"""Outlines of a point around the origin: a circle, a square, a diamond. Each backend has its own pair of marker and
colour."""
LEFT = 78
"""Pixels of the plot's left margin, for the labels of its axis."""
LIGHT = ("#2a6fd0", "#d9581f", "#6d55c6", "#14936a", "#b97f00", "#c2407c", "#5b6670")
DARK = ("#5b9bf0", "#f0834f", "#a391f0", "#3bbd90", "#dca533", "#e878ab", "#9aa6b0")
"""Colours on light and on dark background, the last for variants."""


def style(backend: str) -> int:
    """The index of a backend's colour and marker, the same in every report."""
    known = names()
    return known.index(backend) if backend in known else len(known)


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis over whole decades, from a first to a last pixel."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """An axis that contains all values, which must be above 0."""
        low, high = math.floor(math.log10(min(values) / 1.3)), math.ceil(math.log10(max(values)))
        return cls(low, max(high, low + 1), start, end)

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        return [(self.at(10.0**power), f"{10.0**power:g}") for power in range(self.low, self.high + 1)]


@dataclass(frozen=True)
class Roofline:
    """The plot of TFLOP/s over operations per byte: the roofs of this GPU, and a point for each result."""

    x: Axis
    y: Axis
    roofs: list[tuple[str, str, float, float]] = field(default_factory=list)
    """The path of each roof, its label, and the end of the label."""
    points: list[tuple[float, float, Result]] = field(default_factory=list)

    WIDTH, HEIGHT = 720, 420

    @classmethod
    def of(cls, report: Comparison) -> Roofline | None:
        timed = [row for row in report.results if row.timing]
        if not timed:
            return None
        ops = {row.op: get_operation(row.op) for row in timed}
        intensity = [ops[row.op].flops(row.dims) / ops[row.op].bytes_moved(row.dims) for row in timed]
        speeds = [row.timing.tflops for row in timed if row.timing]
        peaks: dict[Rate, float] = {}
        if report.roof is not None:
            peaks = {op.rate: report.roof.tflops[op.rate] for op in ops.values()}
            bandwidth = report.roof.gb_per_s / 1e3
            ridges = [peak / bandwidth for peak in peaks.values()]
            x = Axis.over([*intensity, *ridges, *(2 * ridge for ridge in ridges)], LEFT, cls.WIDTH - 28)
            y = Axis.over([*speeds, *peaks.values(), bandwidth * 10.0**x.low], cls.HEIGHT - 48, 16)
        else:
            x, y = Axis.over(intensity, LEFT, cls.WIDTH - 28), Axis.over(speeds, cls.HEIGHT - 48, 16)
        plot = cls(x, y)
        for kind, peak in peaks.items():
            ridge = peak / bandwidth
            corners = [(10.0**x.low, bandwidth * 10.0**x.low), (ridge, peak), (10.0**x.high, peak)]
            path = "M" + " ".join(f"{x.at(a)} {y.at(b)}" for a, b in corners)
            plot.roofs.append((path, f"{kind} {rate(peak)} TFLOP/s", x.end, y.at(peak)))
        plot.points.extend((x.at(a), y.at(b), row) for a, b, row in zip(intensity, speeds, timed, strict=True))
        return plot


def render(report: Comparison) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("deep_gemm.backends", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "rate": rate, "scientific": lambda x: f"{x:.1e}"}
    known: dict[str, Any] = {
        "report": report,
        "roofline": Roofline.of(report),
        "style": style,
        "light": LIGHT,
        "dark": DARK,
        "markers": MARKERS,
        "ulps": ULP_LABELS,
        "get_operation": get_operation,
    }
    return environment.get_template("report.html.jinja").render(known)
