"""What is to be compiled ahead, and what came of it, kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from deep_gemm.aot.workload import GemmShape
from deep_gemm.errors import DeepGemmError, InvalidInputError
from deep_gemm.jit.binary import Binary
from deep_gemm.log import counted, say
from deep_gemm.params import KernelParams


@dataclass(frozen=True)
class Outcome:
    """The result for one kernel: a binary, or the error that stopped it. `shapes` are those that need it."""

    name: str
    shapes: tuple[GemmShape, ...]
    params: KernelParams | None = None
    binary: Binary | None = None
    error: DeepGemmError | None = None


LAYERS = ("compiled", "disk", "pack", "memory", "adopted")


@dataclass(frozen=True, repr=False)
class Summary:
    """All outcomes and how long it took, in seconds."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    def __repr__(self) -> str:
        # One line: a model has hundreds of outcomes, and each holds a kernel's parameters and resources.
        counts = [f"{count} from {name}" for name in LAYERS[1:] if (count := self.count(name))]
        told = ", ".join([f"{self.count('compiled')} compiled", *counts, f"{len(self.failed)} failed"])
        return f"<Summary: {counted(len(self.outcomes), 'kernel')}, {told}, {self.seconds:.1f} s>"

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.binary is None]

    @property
    def failures(self) -> str:
        """How many kernels failed, and why the first did, in a sentence; "" if none did."""
        if not (lost := self.failed):
            return ""
        why = str(lost[0].error).strip().partition("\n")[0]
        return (
            f"{len(lost)} of {counted(len(self.outcomes), 'kernel')} failed, so calls that need one will compile it or "
            f"fail. The first is {lost[0].name}: {why} All are in `failed` of what precompile returns."
        )

    def count(self, layer: str) -> int:
        """How many binaries have this layer: "compiled", "disk", "pack", "memory", or "adopted" (from another rank)."""
        return sum(outcome.binary is not None and outcome.binary.layer == layer for outcome in self.outcomes)


Progress = Callable[[Outcome, int, int], None]


@dataclass(frozen=True)
class KernelsToBuild:
    """Kernels to build, each with the shapes that need it, and the shapes without a kernel."""

    kernels: dict[KernelParams, tuple[GemmShape, ...]]
    impossible: tuple[Outcome, ...] = ()


class OutcomeLog:
    """Collects outcomes: adds the shapes that need the kernel, and calls `progress`; True prints lines."""

    def __init__(self, work: KernelsToBuild, progress: Progress | bool | None = None) -> None:
        self._work = work
        if not (callable(progress) or progress in (True, False, None)):
            raise InvalidInputError(f"progress must be a function of (outcome, done, total) or True, not {progress!r}.")
        self._progress = printed() if progress is True else progress or None
        self._outcomes: list[Outcome] = []
        for outcome in work.impossible:
            self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        if outcome.params is not None:
            outcome = replace(outcome, shapes=self._work.kernels[outcome.params])
        self._outcomes.append(outcome)
        if self._progress is not None:
            total = len(self._work.impossible) + len(self._work.kernels)
            self._progress(outcome, len(self._outcomes), total)

    def missing(self) -> list[KernelParams]:
        heard = {outcome.params for outcome in self._outcomes}
        return [params for params in self._work.kernels if params not in heard]

    def summary(self, start: float) -> Summary:
        """The outcomes so far; the work began at `start` by `time.perf_counter`."""
        return Summary(tuple(self._outcomes), time.perf_counter() - start)


def printed(every: float = 2.0) -> Progress:
    """A progress callback that prints a line every `every` seconds at most, and the last one always."""
    last = 0.0

    def progress(outcome: Outcome, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= every:
            last = now
            say(f"compiling ahead: {done} of {total} kernels, {outcome.name}")

    return progress
