"""Times of calls, their rates, and the GPU's roof. Without a GPU the host's clock is used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..arch import SM80, target_of
from ..select import sheets
from ..testing import timing
from .registry import Call, Dims, Operation, Rate

MODES = ("flush", "graph", "steady")
HOST = "host"
MAX_SETS, STEADY_SETS = 64, 4


@dataclass(frozen=True)
class Roof:
    """The peak rates of a GPU model, from its data sheet."""

    name: str
    gb_per_s: float
    tflops: dict[Rate, float]

    def us(self, flops: int, moved: int, rate: Rate) -> float:
        """The least time for ``flops`` operations and ``moved`` bytes, whichever takes longer."""
        return max(flops / self.tflops[rate] / 1e6, moved / self.gb_per_s / 1e3)


def roof(device: torch.device) -> Roof | None:
    """The roof of a GPU, or of the nearest known model if the GPU's is unknown; None without a GPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    target = target_of(found.major, found.minor)
    sheet = sheets.for_device(found.name, found.multi_processor_count, arch=target)
    name = sheet.name if sheet.device == found.name else f"{sheet.name}, the nearest that is known to {found.name}"
    each = 64 if sheet.arch == SM80.name else 128  # float32 multiply-adds of an SM in a clock
    plain = sheet.sms * sheet.clock_ghz * each * 2 / 1e3
    fp8 = sheet.eight_bit_tflops or sheet.half_tflops  # FP8 that is widened has the rate of what it becomes
    peaks: dict[Rate, float] = {"fp8": fp8, "half": sheet.half_tflops, "float32": plain}
    return Roof(name, sheet.hbm_gb_per_s, peaks)


@dataclass(frozen=True)
class Timing:
    """The time of a call: the median, and the quartiles of the samples."""

    mode: str
    us: float
    low_us: float
    high_us: float
    samples: int
    tflops: float
    gb_per_s: float
    of_roof: float | None
    """The reached fraction of the roof, at most 1; None without a GPU."""
    extra_bytes: int | None
    """The peak memory that a call allocates besides its operands; None without a GPU."""

    @classmethod
    def of(
        cls, mode: str, samples: Sequence[float], op: Operation, dims: Dims, limit: Roof | None, extra: int | None
    ) -> Timing:
        us = statistics.median(samples)
        quarters = statistics.quantiles(samples, n=4) if len(samples) > 1 else [us] * 3
        flops, moved = op.flops(dims), op.bytes_moved(dims)
        fraction = limit.us(flops, moved, op.rate) / us if limit else None
        speed = flops / us / 1e6, moved / us / 1e3
        return cls(mode, us, quarters[0], quarters[2], len(samples), *speed, fraction, extra)


def sets_for(op: Operation, dims: Dims, mode: str) -> int:
    """The number of sets of operands that calls use in turn, so that a graph finds no set in L2."""
    graph = min(MAX_SETS, max(2, math.ceil(timing.GRAPH_WEIGHT_BYTES / op.bytes_moved(dims))))
    return {"graph": graph, "steady": STEADY_SETS}.get(mode, 1)


def sample(calls: Mapping[str, Sequence[Call]], mode: str) -> timing.Samples:
    """Times of each kernel in microseconds, measured in turns. ``calls`` has one call for each set of operands."""
    first = {name: sets[0] for name, sets in calls.items()}
    if mode == "flush":
        return timing.flush_samples(first)
    if mode == HOST:
        return timing.host_samples(first)
    return timing.graph_samples(calls) if mode == "graph" else timing.steady_samples(calls)


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """The peak memory that a call allocates through torch; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def trace(calls: Mapping[str, Call], path: Path, device: torch.device) -> None:
    """Write a chrome trace of one call of each kernel, by `torch.profiler`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for name, call in calls.items():
            with record_function(name):
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
