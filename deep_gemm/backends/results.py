"""What a comparison found, as plain data: a row for each backend and shape, and what the rows come to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .accuracy import ULP_LABELS, Accuracy
from .operations import Dims
from .profiler import Roof, Timing

Status = Literal["ok", "easier", "wrong", "failed", "skipped", "absent"]
"""ok: right. easier: it solves another problem, so that its result was not checked. wrong: outside the bound. failed:
it raised. skipped: it cannot run here, or not this shape. absent: it is not installed. All but the first two have a
`why`."""


@dataclass(frozen=True)
class Result:
    """One backend on one shape of an operation."""

    op: str
    dims: Dims
    backend: str
    status: Status
    why: str = ""
    accuracy: Accuracy | None = None
    timing: Timing | None = None

    @property
    def shape(self) -> str:
        """As "64 x 512 x 256"."""
        return " x ".join(map(str, self.dims))

    @property
    def us(self) -> float:
        """Its time; infinite if it has none."""
        return self.timing.us if self.timing else math.inf


@dataclass(frozen=True)
class Rank:
    """How a backend did over the shapes of an operation that it ran."""

    backend: str
    of_best: float
    """Geometric mean of the fastest's time over its own: 1 if it was always the fastest."""
    first: int
    shapes: int
    easier: bool


@dataclass(frozen=True)
class LeftOut:
    """Backends that did not run, or are wrong, for one reason."""

    backends: tuple[str, ...]
    shapes: tuple[str, ...]
    """None if it is not a matter of shapes."""
    why: str

    def __str__(self) -> str:
        where = f" on {', '.join(self.shapes)}" if self.shapes else ""
        return f"{', '.join(self.backends)}{where}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    """Backends side by side."""

    device: str
    mode: str
    roof: Roof | None
    results: tuple[Result, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ops(self) -> list[str]:
        """Its operations."""
        return list(dict.fromkeys(row.op for row in self.results))

    @property
    def backends(self) -> list[str]:
        """Its backends that ran something."""
        return list(dict.fromkeys(row.backend for row in self.results if row.timing or row.accuracy))

    @property
    def cases(self) -> list[tuple[str, Dims]]:
        """Its operations with a shape each."""
        return list(dict.fromkeys((row.op, row.dims) for row in self.results))

    def rows(self, op: str, dims: Dims) -> list[Result]:
        """Those of one shape, the fastest first, then those that were not timed."""
        return sorted((row for row in self.results if (row.op, row.dims) == (op, dims)), key=lambda row: row.us)

    def ranking(self, op: str) -> list[Rank]:
        """Backends whose results are right, the best first. One with an easier problem is listed, and beats nobody."""
        ratios: dict[str, list[float]] = {}
        easier = set()
        for case in self.cases:
            timed = [row for row in self.rows(*case) if row.op == op and row.timing and row.status in ("ok", "easier")]
            best = min((row.us for row in timed if row.status == "ok"), default=math.inf)
            for row in timed if math.isfinite(best) else ():
                ratios.setdefault(row.backend, []).append(best / row.us)
                easier |= {row.backend} if row.status == "easier" else set()
        ranks = [
            Rank(
                name,
                math.exp(sum(map(math.log, found)) / len(found)),
                0 if name in easier else sum(ratio == 1.0 for ratio in found),
                len(found),
                name in easier,
            )
            for name, found in ratios.items()
        ]
        return sorted(ranks, key=lambda rank: -rank.of_best)

    def left_out(self) -> list[LeftOut]:
        """What did not run or is wrong, by reason. Where a backend ran nothing for one reason, shapes do not matter."""
        asked = Counter(row.backend for row in self.results)
        rows: dict[tuple[str, str], list[Result]] = {}
        for row in self.results:
            if row.why:
                rows.setdefault((row.why, row.backend), []).append(row)
        groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for (why, backend), found in rows.items():
            nothing = len(found) == asked[backend] and all(row.status in ("absent", "skipped") for row in found)
            shapes = () if nothing else tuple(f"{row.op} {row.shape}" for row in found)
            groups.setdefault((why, shapes), []).append(backend)
        return [LeftOut(tuple(backends), shapes, why) for (why, shapes), backends in groups.items()]

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        rows = [asdict(row) for row in self.results]
        for row in rows:
            if row["accuracy"]:
                row["accuracy"]["ulps"] = dict(zip(ULP_LABELS, row["accuracy"]["ulps"], strict=True))
        head = {"device": self.device, "mode": self.mode, "environment": self.environment}
        ranking = {op: [asdict(rank) for rank in self.ranking(op)] for op in self.ops}
        return head | {"roof": asdict(self.roof) if self.roof else None, "results": rows, "ranking": ranking}
