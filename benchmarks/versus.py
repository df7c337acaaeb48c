"""Compare other device headers with these, in turns on one GPU: the gain of a change of device code.

    git archive HEAD~1 templates/include | tar -x -C /tmp
    python benchmarks/versus.py /tmp/templates/include 4096x32768x512 2816x3520x128

Each shape runs in the config that is chosen for it: single calls, back to back, and for small M in graphs, with and
without the weight promise. The host code is the present one: headers that need other arguments, or another size of
shared memory, do not compile. Needs a GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deep_gemm import arch as archs
from deep_gemm import options, select
from deep_gemm.aot.workload import DEFAULT_M, GemmShape, parse
from deep_gemm.aot.workload import shapes as shapes_at
from deep_gemm.bench import survey
from deep_gemm.bench.modes import SURVEY_MODES, why_not
from deep_gemm.bench.summary import geometric_mean
from deep_gemm.errors import DeepGemmError
from deep_gemm.jit import Builder
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec

OTHERS, THESE = "others", "these"
TURNS = 4
"""Turns alternate in order, so that warming and cooling of the GPU affect both alike."""


def builders(directory: Path) -> dict[str, Builder]:
    """Builders for the headers in ``directory`` and for the present ones. Raises DeepGemmError if the directory has
    none."""
    if not (directory / "fp8_gemm.cuh").is_file():
        raise DeepGemmError(f"There is no fp8_gemm.cuh in {directory}. Name a directory that was templates/include.")
    return {OTHERS: Builder(include_dir=directory), THESE: Builder()}


def chosen(shape: GemmShape, device: int) -> tuple[GemmSpec, GemmConfig, archs.ArchSpec]:
    """The spec of a call of this shape, the config that is chosen for it, and the architecture."""
    asked, spec = survey.spec_of(shape, options.num_sms_for(device)), archs.for_device(device)
    return asked, select.rank(asked, spec, engine.calibration_of(device))[0].config, spec


def in_turns(timers: Mapping[str, Callable[[], float]], turns: int = TURNS) -> dict[str, float]:
    """The median over turns for each timer; a first turn warms up and does not count."""
    for timer in timers.values():
        timer()
    times: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(turns):
        for name in list(timers) if turn % 2 == 0 else reversed(list(timers)):
            times[name].append(timers[name]())
    return {name: statistics.median(found) for name, found in times.items()}


def compare(shape: GemmShape, mode: str, versions: Mapping[str, Builder], device: int) -> tuple[dict[str, float], bool]:
    """The times in us of one shape in a mode of `SURVEY_MODES`, and whether results are equal to the bit."""
    import torch

    asked, config, spec = chosen(shape, device)
    timers: dict[str, Any] = {}
    for name, builder in versions.items():
        [(_, timers[name])] = survey.timers_of(shape, asked, [config], mode, spec, device, builder)
    times = in_turns(timers)
    return times, torch.equal(*(timer.operands[0].d for timer in timers.values()))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 2
    import torch

    versions = builders(Path(arguments[0]))
    shapes = shapes_at(map(parse, arguments[1:]), DEFAULT_M)
    device, different = torch.cuda.current_device(), 0
    ratios: dict[str, list[float]] = {}
    kernels = {engine.kernel_params(*chosen(shape, device)) for shape in shapes}
    with ThreadPoolExecutor() as pool:
        for builder in versions.values():
            list(pool.map(builder.build, map(engine.build_request, kernels)))
    for shape in shapes:
        for mode in SURVEY_MODES:
            if why_not(shape, mode) is not None:
                continue
            times, equal = compare(shape, mode, versions, device)
            ratios.setdefault(mode, []).append(times[THESE] / times[OTHERS])
            different += not equal
            where = f"{mode:10} {shape.m:5} x {shape.n:5} x {shape.k:5}"
            found = f"{times[OTHERS]:8.2f} -> {times[THESE]:8.2f} us, {ratios[mode][-1]:.3f}"
            print(f"{where}  {found}{'' if equal else ', and another result'}", flush=True)
    for mode, of in ratios.items():
        print(f"{mode}: {geometric_mean(of):.4f} of the time, {min(of):.3f} to {max(of):.3f}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
