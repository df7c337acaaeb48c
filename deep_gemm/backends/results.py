"""The results of a comparison as plain data: a row for each backend and shape, and rankings of the rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .accuracy import ULP_LABELS, Accuracy
from .profiler import Roof, Timing
from .registry import Dims

Status = Literal["ok", "easier", "wrong", "failed", "skipped", "absent"]
"""ok: right. easier: solves an easier problem, so its result was not checked. wrong: outside the bound. failed: raised
an exception. skipped: cannot run here, or cannot run this shape. absent: not installed. All except the first two have a
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
        """The shape as text, such as "64 x 512 x 256"."""
        return " x ".join(map(str, self.dims))

    @property
    def us(self) -> float:
        """The time; infinite if it was not timed."""
        return self.timing.us if self.timing else math.inf


@dataclass(frozen=True)
class Rank:
    """The ranking of a backend over the shapes of an operation that it ran."""

    backend: str
    of_best: float
    """The geometric mean of the fastest backend's time divided by its own: 1 if it was always the fastest."""
    first: int
    shapes: int
    easier: bool


@dataclass(frozen=True)
class LeftOut:
    """Backends that did not run or are wrong, with their common reason."""

    backends: tuple[str, ...]
    shapes: tuple[str, ...]
    """The shapes; None if the reason does not depend on shapes."""
    why: str

    def __str__(self) -> str:
        where = f" on {', '.join(self.shapes)}" if self.shapes else ""
        return f"{', '.join(self.backends)}{where}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    device: str
    mode: str
    roof: Roof | None
    results: tuple[Result, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.results))

    @property
    def backends(self) -> list[str]:
        """Its backends that ran at least one shape."""
        return list(dict.fromkeys(row.backend for row in self.results if row.timing or row.accuracy))

    @property
    def cases(self) -> list[tuple[str, Dims]]:
        return list(dict.fromkeys((row.op, row.dims) for row in self.results))

    def rows(self, op: str, dims: Dims) -> list[Result]:
        """The rows of one shape: the fastest first, rows without a time last."""
        return sorted((row for row in self.results if (row.op, row.dims) == (op, dims)), key=lambda row: row.us)

    def ranking(self, op: str) -> list[Rank]:
        """Backends with right results, the best first. One with an easier problem does not count as the fastest."""
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
        """By reason. Shapes are not named if a backend ran no shape for the same reason."""
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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Comparison:
        rows = []
        for row in data["results"]:
            timing = Timing(**row["timing"]) if row["timing"] else None
            found = row["accuracy"]
            accuracy = Accuracy(**found | {"ulps": tuple(found["ulps"].values())}) if found else None
            rows.append(Result(**row | {"dims": tuple(row["dims"]), "timing": timing, "accuracy": accuracy}))
        roof = Roof(**data["roof"]) if data["roof"] else None
        return cls(data["device"], data["mode"], roof, tuple(rows), data["environment"])

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.results]
        for row in rows:
            if row["accuracy"]:
                row["accuracy"]["ulps"] = dict(zip(ULP_LABELS, row["accuracy"]["ulps"], strict=True))
        head = {"device": self.device, "mode": self.mode, "environment": self.environment}
        ranking = {op: [asdict(rank) for rank in self.ranking(op)] for op in self.ops}
        return head | {"roof": asdict(self.roof) if self.roof else None, "results": rows, "ranking": ranking}
