"""Run an operation's implementations on the same operands, check each against float64, and time those that are right.

An error of one implementation becomes a row with the reason, and the others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm.runtime.timer import FLUSH_BYTES

from ..errors import InvalidInputError, UnsupportedError
from . import profiler
from .accuracy import examine
from .registry import Dims, Kernel, Operation, absent, get_backend, get_kernel, get_operation, of
from .results import Comparison, Result

HOST_LIMIT = 2.5e11
"""The most operations of a shape without a GPU: torch's reference takes some ten seconds for them. For a backend that
emulates a GPU the limit is divided by its slowness."""

CHECK_INPUTS = 8
"""Bytes of memory for each byte of the operands: the operands in float64."""

BYTE_COST = 32
"""Operations that count as much as one byte in this limit."""

CHECK_BYTES = 64
"""Bytes of memory for each element of the output: exact result, allowed error, and intermediate results in float64."""


@dataclass
class Runner:
    """Options of a comparison: the device, the mode of timing, and the traces to write."""

    device: torch.device
    mode: str
    trace: Path | None = None
    progress: Callable[[str], None] = lambda text: None
    results: list[Result] = field(default_factory=list)
    lost: str = ""
    """Why nothing can run any more on this GPU; empty if it can."""

    def run(self, op: Operation, dims: Dims, names: Sequence[str]) -> None:
        """Compare one shape. ``names`` are backends or variants that `of` lists, and absent backends."""
        rows: dict[str, Result] = {}
        kernels: dict[str, Kernel] = {}
        for name in names:
            found = self._find(op, dims, name)
            if isinstance(found, Kernel):
                kernels[name] = found
            else:
                rows[name] = found
        if kernels:
            rows |= self._compare(op, dims, kernels)
        self.results += [rows[name] for name in names]

    def _find(self, op: Operation, dims: Dims, name: str) -> Kernel | Result:
        """A kernel, or a row with the reason why it cannot run here or cannot run this shape."""
        skipped = Result(op.name, dims, name, "skipped")
        if why := absent().get(name):
            return replace(skipped, status="absent", why=why)
        try:
            kernel = get_kernel(name, op.name)
        except UnsupportedError as error:
            return replace(skipped, why=str(error))
        backend = get_backend(kernel.backend)
        why = self.lost or backend.why_not(self.device) or op.refuses(dims)
        why = why or self._too_large(op, dims) or self._too_slow(op, dims, backend.slowness(self.device))
        return replace(skipped, why=why) if why else kernel

    def _compare(self, op: Operation, dims: Dims, kernels: dict[str, Kernel]) -> dict[str, Result]:
        what = f"{op.name} {' x '.join(map(str, dims))}"
        self.progress(f"{what}: making operands, and the exact result in float64")
        try:
            sets = [op.make(dims, self.device, seed) for seed in range(profiler.sets_for(op, dims, self.mode))]
            exact = op.exact(*sets[0])
            allowed = op.allowed(exact, *sets[0])
        except Exception as error:  # such as out of memory, since `_too_large` only estimates
            why = f"its operands and exact result could not be made: {_said(error)}"
            return {name: Result(op.name, dims, name, "failed", why) for name in kernels}
        rows = {}
        for name, kernel in kernels.items():
            self.progress(f"{what}: {name}")
            if self.lost:
                rows[name] = Result(op.name, dims, name, "skipped", self.lost)
                continue
            rows[name] = self._check(op, dims, kernel, sets[0], exact, allowed)
        del exact, allowed
        good = {name: kernels[name] for name, row in rows.items() if row.status in ("ok", "easier") and not self.lost}
        self.progress(f"{what}: timing {', '.join(good) or 'nothing'}")
        return rows | {name: replace(rows[name], **news) for name, news in self._time(op, dims, good, sets).items()}

    def _too_large(self, op: Operation, dims: Dims) -> str:
        """Why the operands and the check would not fit in memory, by an estimate; "" if they fit."""
        sets = profiler.sets_for(op, dims, self.mode)
        needed = (sets + CHECK_INPUTS) * op.bytes_moved(dims) + CHECK_BYTES * op.elements(dims)
        needed += FLUSH_BYTES if self.device.type == "cuda" else 0
        free = free_bytes(self.device)
        if needed <= free:
            return ""
        return f"it needs about {needed / 2**30:.1f} GiB with its check, and {free / 2**30:.1f} GiB are free"

    def _check(
        self, op: Operation, dims: Dims, kernel: Kernel, operands: tuple[Any, ...], exact: Tensor, allowed: Tensor
    ) -> Result:
        """Call a kernel once. Its output is filled with NaN before."""
        row = Result(op.name, dims, kernel.name, "ok")
        output = op.output(operands)
        output.fill_(float("nan"))
        inputs = Inputs(operands, output)
        try:
            kernel(*operands)
            self._wait()
        except UnsupportedError as error:
            return replace(row, status="skipped", why=str(error))
        except Exception as error:  # other libraries may raise anything
            self._lose_context(kernel.name)
            if not self.lost:
                inputs.restore()
            return replace(row, status="failed", why=_said(error))
        if inputs.restore():
            return replace(row, status="wrong", why="it changes its operands, which others read after it")
        result = op.result(operands)
        if kernel.easier:
            bad = int((~result.isfinite()).sum())
            why = f"{bad} elements are NaN or infinite, or were not written" if bad else ""
            return replace(row, status="wrong" if bad else "easier", why=why)
        found = examine(result, exact, allowed)
        return replace(row, status="ok" if found.right else "wrong", why=found.fault, accuracy=found)

    def _too_slow(self, op: Operation, dims: Dims, slowness: float) -> str:
        """Why a shape would take too long on the host; "" if it would not."""
        if self.device.type == "cuda" or (op.flops(dims) + BYTE_COST * op.bytes_moved(dims)) * slowness <= HOST_LIMIT:
            return ""
        size = f"{op.flops(dims) / 1e9:.3g} GFLOP on {op.bytes_moved(dims) / 1e6:.3g} MB"
        return f"{size} take {'its interpreter' if slowness > 1 else 'a host'} too long: name a smaller shape"

    def _time(
        self, op: Operation, dims: Dims, kernels: dict[str, Kernel], sets: list[Any]
    ) -> dict[str, dict[str, Any]]:
        """The fields to replace in each row: its timing, or its failure."""
        limit = profiler.roof(self.device)
        found: dict[str, dict[str, Any]] = {}
        calls: dict[str, list[Any]] = {}
        extra: dict[str, int | None] = {}
        for name, kernel in kernels.items():
            try:
                calls[name] = [kernel.prepare(*operands) for operands in sets]
                extra[name] = profiler.extra_bytes(calls[name][0], self.device)
            except Exception as error:
                calls.pop(name, None)
                found[name] = {"status": "failed", "why": _said(error)}
        samples, failed = self._sample(calls)
        for name, times in samples.items():
            found[name] = {"timing": profiler.Timing.of(self.mode, times, op, dims, limit, extra[name])}
        if self.trace is not None and samples:
            path = self.trace.with_name(f"{self.trace.stem}-{op.name}-{'x'.join(map(str, dims))}.json")
            profiler.trace({name: calls[name][0] for name in samples}, path, self.device)
        return found | failed

    def _sample(self, calls: dict[str, list[Any]]) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
        """Time the kernels in turns. If one of them raises, time each by itself, to find out which."""
        if not calls:
            return {}, {}
        try:
            return profiler.sample(calls, self.mode), {}
        except Exception as error:
            self._lose_context(" or ".join(calls))
            if len(calls) == 1 or self.lost:
                return {}, {name: {"status": "failed", "why": f"while timed: {_said(error)}"} for name in calls}
        samples: dict[str, list[float]] = {}
        failed: dict[str, dict[str, Any]] = {}
        for name, sets in calls.items():
            alone, wrong = self._sample({name: sets})
            samples, failed = samples | alone, failed | wrong
        return samples, failed

    def _lose_context(self, name: str) -> None:
        """Note whether the GPU is unusable after a failure. After a memory fault it is until the process ends."""
        try:
            self._wait()
        except RuntimeError:
            self.lost = self.lost or f"the GPU takes no more work in this process since {name} failed"

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Inputs:
    """The operands of a call but for its output, with a copy of each."""

    def __init__(self, operands: tuple[Any, ...], output: Tensor) -> None:
        self._held = [(x, x.clone()) for x in _tensors(operands) if x.data_ptr() != output.data_ptr()]

    def restore(self) -> bool:
        """Give changed operands their values again. Whether there were any."""
        changed = [(x, copy) for x, copy in self._held if not _same_bits(x, copy)]
        for x, copy in changed:
            x.copy_(copy)
        return bool(changed)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def _tensors(operands: Any) -> Iterable[Tensor]:
    if isinstance(operands, Tensor):
        yield operands
    elif isinstance(operands, (tuple, list)):
        for each in operands:
            yield from _tensors(each)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or available memory of the host: free pages, and pages that only cache files."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def candidates(op: str, names: Sequence[str] = ()) -> list[str]:
    """The given backends with their variants, or all that have the operation and all absent ones. Raises
    InvalidInputError."""
    here = of(op)
    for name in names:
        if name != "all":
            with contextlib.suppress(UnsupportedError):  # it becomes a row later
                get_backend(name.partition(":")[0])
    if not names or "all" in names:
        return [*here, *(name for name in absent() if name not in here)]
    chosen = []
    for name in names:
        variants = [found for found in here if found == name or found.partition(":")[0] == name]
        chosen += variants or [name]
    return list(dict.fromkeys(chosen))


def compare(
    op: str,
    shapes: Iterable[Dims] = (),
    backends: Sequence[str] = (),
    *,
    device: str | None = None,
    mode: str = "flush",
    trace: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run the backends of an operation side by side.

    Args:
        op: such as "fp8_gemm_nt"; `operation_names()` lists them.
        shapes: sizes in the order of the operation's `dims`; by default the operation's examples.
        backends: names; by default all. An absent backend becomes a row with the reason.
        device: "cuda" or "cpu"; None takes a GPU if there is one. On the CPU the host's clock is used.
        mode: how to time on a GPU: "flush", "graph" or "steady", see `deep_gemm.testing.timing`.
        trace: where to write chrome traces, one for each shape, named after it.

    Raises:
        InvalidInputError: there is no such operation, backend, mode, device or shape.

    >>> found = deep_gemm.backends.compare("bf16_gemm_nt", [(8, 64, 32)], ["torch"])
    >>> [row.status for row in found.results]
    ['ok']
    """
    operation = get_operation(op)
    target = _device(device)
    if mode not in profiler.MODES:
        raise InvalidInputError(f"mode must be one of {', '.join(profiler.MODES)}, but it is {mode!r}.")
    on_gpu = target.type == "cuda"
    wanted = f"A shape of {op} is {' x '.join(operation.dims)}, sizes from 1"
    if not isinstance(shapes, Iterable):
        raise InvalidInputError(f"{wanted}, and shapes is a list of these, but it is {shapes!r}.")
    chosen = list(shapes) or list(operation.examples if on_gpu else operation.host_examples)
    for dims in chosen:
        right = isinstance(dims, (tuple, list)) and len(dims) == len(operation.dims)
        if not right or not all(isinstance(size, int) and size >= 1 for size in dims):
            raise InvalidInputError(f"{wanted}, but {dims!r} was given.")
    runner = Runner(target, mode if on_gpu else profiler.HOST, trace, progress)
    names = candidates(op, backends)
    with torch.cuda.device(target) if on_gpu else contextlib.nullcontext():
        for dims in chosen:
            runner.run(operation, tuple(dims), names)
    name = torch.cuda.get_device_name(target) if on_gpu else "the host's CPU"
    return Comparison(name, runner.mode, profiler.roof(target), tuple(runner.results))


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(name, str) or name.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidInputError(f"device must be cpu or cuda, but it is {name!r}.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError("device is cuda, but torch sees no GPU here: pass cpu, or nothing.")
    found = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found
