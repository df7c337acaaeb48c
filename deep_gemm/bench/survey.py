"""Surveys: timing many configs of a shape, not only the chosen one. Calibrations are fitted to and judged by them."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deep_gemm import arch as archs
from deep_gemm import kernels, options, select
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, result_rows
from deep_gemm.bench.backends import spec_of
from deep_gemm.bench.modes import meets_power_limit, why_not
from deep_gemm.bench.provenance import environment, source_digest
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit import Builder
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine
from deep_gemm.runtime.timer import FLUSH_BYTES, Single, times_of
from deep_gemm.select import calibration, sheets, tuner
from deep_gemm.select.heuristic import ranked_as
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import timing

STEADY_CONFIGS = 10
"""How many of the best configs by the model are timed back to back, which takes seconds."""
PROMISING, PROMISING_US = 1.25, 1.0
"""At a first look, configs up to this factor and this many us above the least are kept. The margin in us is needed
since a look is two single calls, and every other call of an empty kernel took 0.8 us longer."""

Row = dict[str, Any]


def name_of(config: GemmConfig, asked: GemmSpec, spec: archs.ArchSpec) -> str:
    """The name of a config in rows: its kernel's entry."""
    params = engine.kernel_params(asked, config, spec)
    return kernels.get(params.kernel).kernel_name(params)


@dataclass
class Survey:
    """Times the ranked configs of some shapes. ``within`` leaves out configs whose predicted time is more than this
    many times the best one's; 0 leaves out none. With ``everything``, for single calls, predictions do not count: all
    legal configs get a first look, and the promising ones are timed."""

    shapes: Sequence[GemmShape]
    modes: Sequence[str] = ("flush",)
    within: float = 0.0
    seconds: float = float("inf")
    progress: Callable[[str], None] = print
    everything: bool = False

    def rows(self) -> Iterator[Row]:
        """One row for each shape and mode: times in us by config, and the choice of the present calibration."""
        device = torch.cuda.current_device()
        spec, start = archs.for_device(device), time.monotonic()
        common = environment()
        num_sms, known = options.num_sms_for(device), engine.calibration_of(device)
        work = [(shape, mode) for shape in self.shapes for mode in self.modes if is_surveyed(shape, mode)]
        candidates = {shape: self._candidates(spec_of(shape, num_sms), spec, known) for shape in self.shapes}
        self._build({(spec_of(s, num_sms), config) for s, found in candidates.items() for config in found}, spec)
        for index, (shape, mode) in enumerate(work):
            if time.monotonic() - start > self.seconds:
                self.progress(f"the time ran out before {len(work) - index} of {len(work)} measurements")
                return
            asked = spec_of(shape, num_sms)
            row: Row = result_rows.said(shape) | {"mode": mode, "target": spec.name}
            row["selected"] = name_of(select.rank(asked, spec, known)[0].config, asked, spec)
            configs = candidates[shape][: STEADY_CONFIGS if mode == "steady" else None]
            timers = dict(timers_of(shape, asked, configs, mode, spec, device))
            if self.everything:
                row["legal"] = len(timers)
                timers = promising(timers, row["selected"])
            times = steady_times_of(timers) if mode == "steady" else times_of(timers, row["selected"])
            row["times"] = {name: round(us, 3) for name, us in times.items()}
            del timers  # frees their memory before the next row
            self.progress(f"[{index + 1}/{len(work)}] {line(row)}")
            yield row | common

    def _candidates(self, asked: GemmSpec, spec: archs.ArchSpec, known: calibration.Calibration) -> list[GemmConfig]:
        """The selected one first: it is timed even if configs outside the serving set rank higher."""
        if self.everything:
            return select.legal(asked, spec)
        selected = select.rank(asked, spec, known)[0].config
        ranked = select.order(asked, select.legal(asked, spec), known)
        limit = min(choice.estimate.total_us for choice in ranked) * self.within
        near = (choice.config for choice in ranked if not self.within or choice.estimate.total_us <= limit)
        return [selected, *(config for config in near if config != selected)]

    def _build(self, pairs: Iterable[tuple[GemmSpec, GemmConfig]], spec: archs.ArchSpec) -> None:
        wanted = {engine.kernel_params(asked, config, spec) for asked, config in pairs}
        with ThreadPoolExecutor() as pool:
            for done, _ in enumerate(pool.map(engine.build, wanted)):
                if done % 100 == 0:
                    self.progress(f"compiling: {done} of {len(wanted)} kernels")


def is_surveyed(shape: GemmShape, mode: str) -> bool:
    """Steady mode is only for shapes that power limits: a fit uses it for nothing else. Operands that TMA cannot read
    would be copied first, and are left out."""
    if why_not(shape, mode) is not None or not backends.addressable(shape):
        return False
    return mode != "steady" or meets_power_limit(shape)


def steady_times_of(timers: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The mean of two times of each, in order and in reverse: a drift of the GPU's power affects all alike. A first
    call, which warms it up, is not counted."""
    next(iter(timers.values()))()
    there = {name: timer() for name, timer in timers.items()}
    back = {name: timers[name]() for name in reversed(list(timers))}
    return {name: (us + back[name]) / 2 for name, us in there.items()}


def promising(timers: Mapping[str, Any], selected: str) -> dict[str, Any]:
    """The configs whose first look is close to the best one's, and the selected one."""
    looks = {name: timer.look() for name, timer in timers.items()}
    limit = min(looks.values()) * PROMISING + PROMISING_US
    return {name: timers[name] for name, us in looks.items() if us <= limit or name == selected}


def timers_of(
    shape: GemmShape,
    asked: GemmSpec,
    configs: Sequence[GemmConfig],
    mode: str,
    spec: archs.ArchSpec,
    device: int,
    builder: Builder | None = None,
) -> Iterator[tuple[str, Single | _Steady | _Graph]]:
    """A timer for each config by name, in random order, so that no config always runs on a GPU heated by another.
    Kernels come from ``builder``, if it is given."""
    operands = backends.make_operands(shape, backends.sets_for(shape, mode))
    memory: dict[str, torch.Tensor] = {}  # launches that follow one another share it, as in a model
    places = [backends.placed(x, device, memory) for x in operands]
    keep = [*operands, memory]
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    order = list(configs)
    random.Random(asked.m * asked.n + asked.k).shuffle(order)
    for config in order:
        stream = torch.cuda.Stream()
        calls = []
        plan = engine.forced_plan(asked, config, device, builder)
        for step, addresses in places:
            handle = engine.raw_stream(device) if mode == "flush" else stream.cuda_stream
            promised = mode == "promised"
            calls.append(engine.launch_record(plan, step.strides, addresses, handle, promised, step.numbers))
        name = name_of(config, asked, spec)
        if mode == "flush":
            yield name, Single(calls[0], scratch, keep)
        elif mode == "steady":
            yield name, _Steady(calls, stream, keep)
        else:
            yield name, _Graph(calls, stream, keep)


@dataclass
class _Steady:
    """Times calls back to back, at the clocks that the power limit leaves."""

    calls: Sequence[Callable[[], object]]
    stream: Any
    operands: Sequence[Any]

    SECONDS = 0.5

    def __call__(self) -> float:
        return timing.back_to_back(self.calls, self.SECONDS, self.stream)


@dataclass
class _Graph:
    """Times a call in one graph of all of them; launches are bound to the stream that they are captured on."""

    calls: Sequence[Callable[[], object]]
    stream: Any
    operands: Sequence[Any]
    captured: Any = None

    LEAST = 48
    REPLAYS = 4

    def __call__(self) -> float:
        count = max(self.LEAST, len(self.calls))
        if self.captured is None:
            self.captured = timing.capture(self.calls, count, self.stream)
        times = [timing.elapsed_us(self.captured.replay) for _ in range(self.REPLAYS + 1)]
        return statistics.median(times[1:]) / count


def quality(row: Row) -> float:
    """The best time over the selected config's: 1 if the selector found the best."""
    times = row["times"]
    return float(min(times.values()) / times[row["selected"]])


def line(row: Row) -> str:
    times, selected = row["times"], row["selected"]
    best = min(times, key=times.__getitem__)
    where = f"{row['mode']:10} {row['m']:5} x {row['n']:5} x {row['k']:5}"
    found = f"{selected} {times[selected]:.1f} us, {best} {times[best]:.1f} us"
    timed = f"{len(times)} of {row['legal']} configs" if "legal" in row else f"{len(times)} configs"
    return f"{where}  {timed}, selected / best {quality(row):.3f}  ({found})"


def card_of(row: Row) -> tuple[archs.ArchSpec, sheets.Sheet]:
    """The target that a row was measured on, with the SMs of the GPU, and the GPU's spec sheet, or the nearest one.
    Raises UnsupportedError for a target that has no kernels."""
    device = str(row.get("device"))
    known = next((sheet.arch for sheet in sheets.SHEETS if sheet.device == device), archs.DEFAULT.name)
    spec = archs.get(str(row.get("target", known)))
    sheet = sheets.for_device(device, arch=spec.name)
    return replace(spec, num_sms=sheet.sms), sheet


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of survey files, packed or not. Raises InvalidInputError for files of anything else."""
    found: list[Row] = []
    for path in paths:
        packed = result_rows.Packed()

        def check(row: Row, where: str, packed: result_rows.Packed = packed) -> None:
            packed.unpack(row, where)
            if row["mode"] != result_rows.PACKED:
                _check(row, where)

        found += (row for row in result_rows.read(path, check) if row["mode"] != result_rows.PACKED)
    return found


def _check(row: Row, where: str) -> None:
    result_rows.check_shape(row, where)
    times = row.get("times")
    if not isinstance(times, dict) or not times:
        raise InvalidInputError(f"times in {where} must be an object of configs and us, but it is {shown(times)}.")
    for name, value in times.items():
        result_rows.check_positive(value, f"the time of {shown(name)} in {where}")
    selected = row.get("selected")
    if not isinstance(selected, str) or selected not in times:
        raise InvalidInputError(f"selected in {where} must be one of its times, but it is {shown(selected)}.")


@functools.cache
def kind_name(config: GemmConfig, kind: GemmSpec, spec: archs.ArchSpec) -> str:
    """`name_of`, remembered: names do not depend on sizes, so ``kind`` has some fixed ones."""
    return name_of(config, kind, spec)


LEFT_OUT = {
    "left out, not single calls": "Only single calls are learned from: survey with --mode flush.",
    "left out, measured on a GPU without a name": "A record's device must be the name of the GPU that it is of.",
    "left out, measured by other sources": "--stale learns from records that other sources measured too.",
    "left out, without the model's choice": "Survey again: these records do not time what the model chooses now.",
}
"""Why `remember` leaves rows out, and what to do."""


def remember(path: Path, stale: bool = False) -> Counter[str]:
    """Keep the times of a survey's single calls for the tuner, under the GPU models that they were measured on.

    Rows that other sources measured are left out, unless ``stale``, and so are rows without a time for the model's
    choice, which might be the best. Returns how many rows were "kept", and how many for each reason in `LEFT_OUT`.
    """
    counts: Counter[str] = Counter()
    digest = source_digest()
    for row in load([path]):
        arch, device = card_of(row)[0], row.get("device")
        asked = ranked_as(spec_of(result_rows.shape_of(row), arch.num_sms))
        ranked = select.rank(asked, arch, calibration.for_device(str(device), arch=arch.name))
        offered = [each.config for each in ranked] + select.legal(asked, arch)
        names = {kind_name(config, replace(asked, m=1, n=128, k=128, expected_m=0), arch): config for config in offered}
        if row["mode"] != "flush":
            counts["left out, not single calls"] += 1
        elif not isinstance(device, str) or not device:
            counts["left out, measured on a GPU without a name"] += 1
        elif row.get("source_digest") != digest and not stale:
            counts["left out, measured by other sources"] += 1
        elif next(iter(names)) not in row["times"]:
            counts["left out, without the model's choice"] += 1
        else:
            times = {config: float(row["times"][name]) for name, config in names.items() if name in row["times"]}
            tuner.remember(asked, times, device)
            counts["kept"] += 1
    return counts
