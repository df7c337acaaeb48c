"""Files of results: one JSON object a line, checked when they are read, since a user can name any file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deep_gemm.aot import inputs
from deep_gemm.aot.layers import FP8
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench.shapes import Problem, posed
from deep_gemm.errors import InvalidInputError

Row = dict[str, Any]

PACKED = "packed"
"""The mode of a line that is no row, see `Packed`."""


def read(path: Path, check: Callable[[Row, str], None]) -> list[Row]:
    """The rows of a file, each passed to `check` with its place. Raises InvalidInputError for a line that is no row."""
    found = []
    for number, text in enumerate(inputs.read_text(path).splitlines(), 1):
        if text.strip():
            where = f"line {number} of {path}"
            row = inputs.parse_json(text, where)
            if not isinstance(row, dict) or not isinstance(row.get("mode"), str):
                raise InvalidInputError(f"{where} must be a JSON object with a mode, but it is {inputs.shown(row)}.")
            check(row, where)
            found.append(row)
    return found


class Packed:
    """Gives the rows of a survey their fields again, line by line; rows that are not packed stay as they are.

    A line of mode "packed" has the names of all configs, or the fields that the rows after it share. In a row,
    ``times`` is then a pair of lists: places in these names, and times. `benchmarks/pack.py` writes such files.
    """

    def __init__(self) -> None:
        self._configs: list[str] = []
        self._common: Row = {}

    def unpack(self, row: Row, where: str) -> None:
        """Take a line of mode "packed", or complete a row in place. Raises InvalidInputError."""
        if row["mode"] == PACKED:
            self._configs, self._common = row.get("configs", self._configs), row.get("common", self._common)
            return
        times = row.get("times")
        if not isinstance(times, list):
            return
        try:
            at, us = times
            row["times"] = {self._configs[index]: value for index, value in zip(at, us, strict=True)}
            row.update(self._common)
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidInputError(
                f"times in {where} must be two lists of one length, places in the configs of a line of mode "
                f"{PACKED!r} and us, but they are {inputs.shown(times)}."
            ) from error


def said(shape: GemmShape) -> Row:
    """A row's fields for its shape, and for its operation unless that is FP8's default."""
    row: Row = {"m": shape.m, "n": shape.n, "k": shape.k, "source": shape.source}
    one = Problem.of(shape)
    more = {"op": one.op if one.op != FP8 else "", "output": one.output, "accumulate": one.accumulate}
    return row | {name: value for name, value in more.items() if value}


def shape_of(row: Row) -> GemmShape:
    """The shape of a row. Raises InvalidInputError for an unknown operation."""
    shape = GemmShape(row["m"], row["n"], row["k"], row.get("source", ""))
    return posed([shape], row.get("op", FP8), row.get("output", ""), row.get("accumulate", False))[0]


def operation_of(row: Row) -> str:
    """The operation of a row for a person, as "bf16_gemm_tn to f32, added"; "" for FP8's."""
    return str(shape_of(row)).partition(" of ")[2]


def check_shape(row: Row, where: str) -> None:
    """Raises InvalidInputError unless m, n and k are whole numbers from 1 and the operation is known."""
    for name in ("m", "n", "k"):
        inputs.whole(row.get(name), f"{name} in {where}")
    try:
        shape_of(row)
    except InvalidInputError as error:
        raise InvalidInputError(f"op, output and accumulate in {where} are of nothing that is timed: {error}") from None


def check_positive(value: Any, where: str, zero: bool = False) -> None:
    """Raises InvalidInputError unless it is a finite number above 0, or 0 if that may be."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 <= value <= 1e30 or (value == 0 and not zero):
        above = "from 0" if zero else "above 0"
        raise InvalidInputError(f"{where} must be a number {above}, but it is {inputs.shown(value)}.")
