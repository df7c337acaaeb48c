"""The tuner's measurements: the best few configs of a call's spec, timed on copies of its operands.

With DG_TUNE=on, a call that is new asks here before it is planned (`consider`). Warm calls and replays do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deep_gemm import arch as archs
from deep_gemm import options
from deep_gemm.errors import CompileError, DeepGemmError
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.forking import ForkLock
from deep_gemm.log import log, warn_once
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine
from deep_gemm.runtime.operation import SCRATCH, KernelOperation, LaunchSequence, Step
from deep_gemm.runtime.timer import FLUSH_BYTES, Single, times_of
from deep_gemm.select import tuner
from deep_gemm.settings import settings
from deep_gemm.spec import GemmSpec

ROUNDS = 7
"""How often the fastest few are timed again."""

_lock = ForkLock()


@dataclass(frozen=True)
class Tuned:
    """One measurement: the times of configs in us, the config that the model had chosen, and the one that
    calls use now."""

    spec: GemmSpec
    times: Mapping[GemmConfig, float]
    modelled: GemmConfig
    chosen: GemmConfig

    @property
    def gain(self) -> float:
        """The time of the model's choice over that of the chosen config."""
        return self.times[self.modelled] / self.times[self.chosen]


_listening: tuple[list[Tuned], ...] = ()


@contextlib.contextmanager
def tuning() -> Iterator[list[Tuned]]:
    """Measure each kind of call that is made inside the block for the first time, whatever DG_TUNE says.

    Times are kept in the cache directory, for processes with ``DG_TUNE=read``. This process reads them from now on, as
    if it had that setting. A kind of call whose times are kept is not measured again. Yields a list to which each
    measurement is added. The block holds for all threads of the process.

    >>> with deep_gemm.tuning() as measured:
    ...     pass  # calls on a GPU
    >>> measured
    []
    """
    global _listening
    found: list[Tuned] = []
    with settings.override(tune="on"):
        options.use_measured_times()
        _listening = (*_listening, found)
        try:
            yield found
        finally:
            _listening = tuple(each for each in _listening if each is not found)


def consider(operation: KernelOperation, sequence: LaunchSequence, tensors: Mapping[str, Tensor], device: int) -> None:
    """Measure configs for those products of a call on CUDA device ``device`` that were neither planned nor measured
    before. Nothing is measured while the current stream is captured. ``tensors`` are only read.

    Raises:
        UnsupportedError: there is no kernel for this spec or these options.
        DriverError: a kernel could not be loaded or launched.
    """
    for index, step in enumerate(sequence.steps):
        if isinstance(step.spec, GemmSpec) and not _is_capturing():
            _consider(operation, replace(sequence, steps=sequence.steps[: index + 1]), step.spec, tensors, device)


def _consider(
    operation: KernelOperation, sequence: LaunchSequence, spec: GemmSpec, tensors: Mapping[str, Tensor], device: int
) -> None:
    """`consider`, for the last launch of ``sequence``."""
    with _lock.lock:
        choices = [] if engine.is_planned(spec, device) else engine.worth_measuring(spec, device)
        if len(choices) < 2 or choices[0].measured_us:
            return
        try:
            with torch.no_grad():
                times = _times(operation, sequence, spec, tensors, device, [choice.config for choice in choices])
        except torch.cuda.OutOfMemoryError:
            warn_once("tune-memory", f"{spec} is not tuned: there is no memory for copies of its operands.")
            return
        if not times:
            return
        tuner.remember(spec, times, engine.device_name(device))
        chosen = engine.ranked_configs(spec, device)[0].config
        found = Tuned(spec, times, choices[0].config, chosen)
        log.debug("tuned %s: %s, %.3f of the model's choice", spec, chosen, 1 / found.gain)
        for each in _listening:
            each.append(found)


def _times(
    operation: KernelOperation,
    sequence: LaunchSequence,
    spec: GemmSpec,
    tensors: Mapping[str, Tensor],
    device: int,
    configs: Sequence[GemmConfig],
) -> dict[GemmConfig, float]:
    """The times of those configs that can be built, in us; none if the first one, the model's choice, cannot, or if it
    is the only one."""
    *before, step = sequence.steps
    built = _built(spec, configs, archs.for_device(device))
    if len(built) < 2 or built[0] != configs[0]:
        return {}
    places, place = _copies(tensors), next(iter(tensors.values())).device
    if sequence.scratch:
        places[SCRATCH] = torch.zeros(sequence.scratch_bytes, dtype=torch.uint8, device=place)
    addresses = {name: x.data_ptr() for name, x in places.items()}
    addresses |= {name: addresses[whole] + offset for name, (whole, offset) in sequence.places.items()}
    stream = engine.raw_stream(device)

    def launch(step: Step, plan: engine.Plan) -> Launch:
        at = {name: addresses[given] for name, given in step.operands.items()}
        return engine.launch_record(plan, step.strides, at, stream, numbers=step.numbers)

    for earlier in before:
        launch(earlier, operation.plan(earlier, device))()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=place)

    def timer(config: GemmConfig) -> Callable[[], float]:
        return Single(launch(step, engine.forced_plan(spec, config, device)), flush, tuple(places.values()))

    timers = {built[0]: timer(built[0])}
    for config in built[1:]:
        try:
            timers[config] = timer(config)
        except DeepGemmError as error:
            log.debug("%s is not measured: %s", config, error)
    return times_of(timers, built[0], ROUNDS) if len(timers) > 1 else {}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies with the same contents and strides. Names of one tensor, as d and c of a product that is added in place,
    get one copy."""
    made: dict[tuple[object, ...], Tensor] = {}
    return {
        name: made.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype), _copy(x)) for name, x in tensors.items()
    }


def _copy(x: Tensor) -> Tensor:
    """A copy that includes gaps between rows: strides decide how fast a kernel is."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride(), 0)


def _built(spec: GemmSpec, configs: Sequence[GemmConfig], arch: archs.ArchSpec) -> list[GemmConfig]:
    """The configs whose kernels are in the cache or could be compiled."""

    def build(config: GemmConfig) -> bool:
        try:
            engine.build(engine.kernel_params(spec, config, arch))
        except CompileError as error:
            log.debug("%s is not measured: %s", config, error)
            return False
        return True

    with ThreadPoolExecutor(min(len(configs), os.cpu_count() or 1)) as pool:
        return [config for config, done in zip(configs, pool.map(build, configs), strict=True) if done]


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
