"""Side-by-side timing in one process: one JSON row for each shape and mode, written when measured. Two H200s differ by
a few percent, so compare ratios within one run."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, floor, result_rows
from deep_gemm.bench.modes import FLOOR_MAX_M, GEMM_MODES, why_not
from deep_gemm.bench.provenance import environment
from deep_gemm.bench.shapes import READ_FLOOR_US
from deep_gemm.testing import timing

OTHERS = (*(name for name in backends.BACKENDS if name != "ours"), backends.DEEPGEMM)
"""The backends that ours is compared with."""

VENDORS = {"tensorwise", "cublaslt"}
"""The vendor's fastest backends, one for each operation."""

Row = dict[str, Any]


@dataclass
class Run:
    """What to measure. `seconds` bounds the whole run: no new measurement begins after it."""

    shapes: Sequence[GemmShape]
    modes: Sequence[str] = ("flush",)
    seconds: float = math.inf
    output: Path | None = None
    names: Sequence[str] = ()
    """Backends; if there are none, all of each shape's operation."""
    progress: Callable[[str], None] = print
    known: Row = field(default_factory=dict)
    """Further fields of every row, such as DeepGEMM's version."""
    left_out: list[str] = field(default_factory=list)

    def execute(self) -> list[Row]:
        """Measure and return the rows. Measurements for which the time was too short are listed in `left_out`."""
        start = time.monotonic()
        common = environment() | self.known
        measured: list[Row] = []
        asked = [(shape, mode, why_not(shape, mode)) for mode in self.modes for shape in self.shapes]
        work = [(shape, mode) for shape, mode, reason in asked if reason is None]
        for (mode, reason), count in Counter((mode, reason) for _, mode, reason in asked if reason).items():
            self.progress(f"{mode}: {count} of {len(self.shapes)} shapes are left out: {reason}")
        for index, (shape, mode) in enumerate(work):
            if time.monotonic() - start > self.seconds:
                self.left_out += [f"{shape} {mode}" for shape, mode in work[index:]]
                break
            row = measure(shape, mode, self.names) | common
            measured.append(row)
            if self.output is not None:
                append(self.output, row)
            self.progress(f"{index + 1}/{len(work)} {line(row)}")
        return measured


def measure(shape: GemmShape, mode: str, names: Sequence[str] = ()) -> Row:
    """Time one shape in one mode with every backend of `names`, or of its operation, that accepts it.

    In graph mode ours is timed twice: with the promise that the weights are constant, as a decoder can give it, and
    without, on weights of its own. The other modes promise nothing: in general weights are not constant.
    """
    operands = backends.make_operands(shape, backends.sets_for(shape, mode))
    names = names or backends.names_for(shape)
    promised: list[backends.Operands] = []
    try:
        refused = {name: reason for name in names if (reason := backends.usable(name, operands[0])) is not None}
        makers = {name: backends.BACKENDS[name] for name in names if name not in refused}
        calls = {name: [make(x) for x in operands] for name, make in makers.items()}
        if mode == "graph" and "ours" in calls:
            calls["ours_unpromised"] = calls["ours"]
            calls["ours"] = []
            for x in map(backends.own_weights, operands):
                calls["ours"].append(backends.ours_promised(x))
                promised.append(x)
        if mode == "flush":
            us = timing.flush({name: sets[0] for name, sets in calls.items()})
        elif mode == "graph":
            us = timing.graph(calls)
            if shape.m <= FLOOR_MAX_M and operands[0].b.is_cuda and floor.runs_on(operands[0].b.get_device()):
                weights = [x.b for x in operands]
                us["floor"] = floor.read_floor_us(weights)
                us["floor_overlapped"] = floor.read_floor_us(weights, overlapped=True)
        else:
            us = timing.steady(calls)
    finally:
        for x in promised:
            backends.retract(x)
    return make_row(shape, mode, us, refused)


def make_row(shape: GemmShape, mode: str, us: dict[str, float], refused: dict[str, str]) -> Row:
    """A flat row: `us`, `tflops`, `gbps` are ours; `ratio_X` is X's time over ours, so above 1 we are faster.

    In graph mode these are with the weight promise, those ending in `_unpromised` without it. `floor_fraction` is the
    read floor over `us`: the lesser of `us_floor`, measured beside it, and `READ_FLOOR_US`, where known.
    `us_floor_overlapped` is the read floor with less shared memory.
    """
    row: Row = {"mode": mode} | result_rows.said(shape)
    mine, unpromised = us["ours"], us.get("ours_unpromised")
    row["us"] = round(mine, 3)
    row["tflops"] = round(shape.flops / mine / 1e6, 1)
    row["gbps"] = round(shape.bytes_moved() / mine / 1e3, 1)
    for name in OTHERS:
        if name in us:
            row[f"us_{name}"] = round(us[name], 3)
            row[f"ratio_{name}"] = round(us[name] / mine, 4)
        elif name in refused:
            row[f"refused_{name}"] = refused[name]
    if unpromised is not None:
        row["us_unpromised"] = round(unpromised, 3)
        for name in VENDORS & us.keys():
            row[f"ratio_{name}_unpromised"] = round(us[name] / unpromised, 4)
    for floor_name in ("floor", "floor_overlapped"):
        if floor_name in us:
            row[f"us_{floor_name}"] = round(us[floor_name], 3)
    known = READ_FLOOR_US.get((shape.n, shape.k)) if backends.element_bytes(shape) == 1 else None
    floors = [x for x in (us.get("floor"), known) if x is not None]
    if mode == "graph" and floors:
        row["floor_fraction"] = round(min(floors) / mine, 4)
    return row


NUMBERS = (
    ("us", "{:9.2f} us"),
    ("tflops", "{:6.1f} TFLOP/s"),
    ("gbps", "{:5.0f} GB/s"),
    *((f"ratio_{name}", f"{name} {{:.3f}}") for name in OTHERS),
    ("us_unpromised", "no promise {:.2f} us"),
    ("floor_fraction", "of floor {:.2f}"),
)
"""The fields of a row that are shown, and how. A ratio is the backend's time over ours."""


def line(row: Row) -> str:
    """A row for a person, aligned with others of its mode and operation."""
    numbers = [text.format(row[name]) for name, text in NUMBERS if name in row]
    refused = [f"{name} is not timed: {row[key]}" for name in OTHERS if (key := f"refused_{name}") in row]
    what = f"{row['mode']} {row['m']:5} x {row['n']:5} x {row['k']:5}  {result_rows.operation_of(row)}".rstrip()
    return "  ".join([what, *numbers, *refused])


def append(path: Path, row: Row) -> None:
    """Add one line and flush it, so that an interrupted run loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()


def load(path: Path) -> list[Row]:
    """The rows of a results file. Raises InvalidInputError for a file of anything else."""
    return result_rows.read(path, _check)


def _check(row: Row, where: str) -> None:
    """Check the fields of a GEMM's row that means need."""
    if row["mode"] not in GEMM_MODES:
        return
    result_rows.check_shape(row, where)
    for name, value in row.items():
        if name.startswith(("ratio_", "us", "floor_fraction", "tflops", "gbps")):
            result_rows.check_positive(
                value, f"{name} in {where}", zero=name in ("tflops", "gbps")
            )  # these are rounded
