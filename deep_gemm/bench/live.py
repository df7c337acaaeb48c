"""A table that grows: each row is a line of text as soon as it is measured, on a terminal and in a pipe alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deep_gemm.bench import phases, rows
from deep_gemm.bench.summary import GEMM_MODES

Row = dict[str, Any]

NONE = "-"
"""The cell of a value that was not measured."""

EXPLAINED = {
    **dict.fromkeys(GEMM_MODES, ": our time in us; under a backend its time over ours (above 1: ours is faster)"),
    "dims": ": N and K given at run time, against compiled in",
}
"""What the numbers of a mode's table mean, where their headings do not say it."""


class Column(NamedTuple):
    """A column `width` characters wide at least, aligned to the right; `cell` gives the text of one row."""

    title: str
    width: int
    cell: Callable[[Row], str]


def number(title: str, key: str, digits: int, width: int = 0) -> Column:
    """A column of the numbers under `key`, with `digits` digits after the point."""
    return Column(title, width, lambda row: f"{row[key]:.{digits}f}" if key in row else NONE)


class LiveTable:
    """Gives rows as lines, with a heading wherever the mode or the columns change."""

    def __init__(self, others: Sequence[str] = ()) -> None:
        """`others` are the backends that ours may be compared with, in the order of their columns."""
        self._others = tuple(others)
        self._heading = ""
        self._refusals: set[str] = set()

    def add(self, row: Row, done: int = 0, total: int = 0) -> str:
        """The row as text, after a heading if it needs a new one. `done`/`total` comes first, if there is a total.

        A backend that refuses a shape has a dash; its reason follows in a line of its own, once.
        """
        columns = self._columns(row)
        if total:
            columns.insert(0, Column("", len(f"{total}/{total}"), lambda _: f"{done}/{total}"))
        timed = row["mode"] in GEMM_MODES
        heading = _line([column.title for column in columns], columns, "" if timed else "what")
        heading = f"{row['mode']}{EXPLAINED.get(row['mode'], '')}\n{heading}"
        lines = [_line([column.cell(row) for column in columns], columns, _name(row))]
        if heading != self._heading:
            lines = [*([""] if self._heading else []), heading, *lines]
            self._heading = heading
        refusals = {f"{name} is not timed: {row[key]}" for name in self._others if (key := f"refused_{name}") in row}
        lines += sorted(refusals - self._refusals)
        self._refusals |= refusals
        return "\n".join(lines)

    def _columns(self, row: Row) -> list[Column]:
        if row["mode"] in GEMM_MODES:
            return self._gemm_columns(row)
        if row["mode"] == "kernels":
            return [number("kernels", "kernels", 0), number("with N, K compiled in", "kernels_nk", 0)]
        if row["mode"] == "dims":
            return [number("us", "us", 2, 9), number("N, K compiled in", "us_nk", 2), number("ratio", "ratio_nk", 3)]
        if row["mode"] == "compile":
            every = Column("all ms", 8, lambda row: f"{row['us'] / 1e3:.1f}")
            return [every, *(number(name[:-3], name, 1, 6) for name in phases.COLUMNS)]
        return [number("us", "us", 1, 12)]

    def _gemm_columns(self, row: Row) -> list[Column]:
        columns = [number(name.upper(), name, 0, 6) for name in ("m", "n", "k")]
        columns += [number("us", "us", 2, 9), number("TFLOP/s", "tflops", 1), number("GB/s", "gbps", 0, 6)]
        there = [name for name in self._others if f"ratio_{name}" in row or f"refused_{name}" in row]
        columns += [number(name, f"ratio_{name}", 3) for name in there]
        if row["mode"] == "graph":
            columns += [number("us, no promise", "us_unpromised", 2), number("of floor", "floor_fraction", 2)]
        return columns


def _name(row: Row) -> str:
    return rows.operation_of(row) if row["mode"] in GEMM_MODES else str(row["what"])


def _line(cells: Sequence[str], columns: Sequence[Column], last: str) -> str:
    padded = [cell.rjust(max(column.width, len(column.title))) for cell, column in zip(cells, columns, strict=True)]
    return "  ".join([*padded, last]).rstrip()
