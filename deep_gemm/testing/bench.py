"""Timing on a GPU. All times are in seconds."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.cache import files
from deep_gemm.runtime.timer import FLUSH_BYTES
from deep_gemm.testing.timing import singles


def get_arch_major() -> int:
    """The major compute capability of the current CUDA device: 9 on Hopper."""
    return torch.cuda.get_device_capability()[0]


def bench(fn: Callable[[], Any], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """The mean time of ``fn`` over ``num_tests`` calls back to back, between two CUDA events.

    L2 is flushed once, before the first call. With ``high_precision`` the GPU is kept busy until all calls are queued,
    so that a slow launch does not show.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(num_warmups):
        fn()
    flush.zero_()
    if high_precision:
        torch.cuda._sleep(20_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_tests / 1e3


def bench_flushed(fn: Callable[[], Any], num_tests: int = 20, num_warmups: int = 3) -> float:
    """The median time of single calls of ``fn`` with a cold L2: 512 MiB are written before each.

    An empty kernel takes some 4 us by this method.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(num_warmups):
        fn()
    return statistics.median(singles(fn, flush, num_tests)) / 1e6


@overload
def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str,
    num_tests: int = ...,
    suppress_kineto_output: bool = ...,
    trace_path: str | None = ...,
    flush_l2: bool = ...,
    with_multiple_kernels: bool = ...,
    barrier: Callable[[], Any] | None = ...,
) -> float: ...
@overload
def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: tuple[str, ...] | list[str],
    num_tests: int = ...,
    suppress_kineto_output: bool = ...,
    trace_path: str | None = ...,
    flush_l2: bool = ...,
    with_multiple_kernels: bool = ...,
    barrier: Callable[[], Any] | None = ...,
) -> tuple[float, ...]: ...
def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...] | list[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], Any] | None = None,
) -> float | tuple[float, ...]:
    """Time kernels on the GPU's own clock, by torch's profiler.

    Args:
        kernel_names: a part of the kernel's name, or several.
        trace_path: where to write a trace for a viewer.
        flush_l2: write 512 MiB before each call.
        with_multiple_kernels: a name may match kernels of different names; their times in one call are added up.
            Without it a name must match one kernel, and the time is the mean of its launches.
        barrier: called before each call, for runs over several processes.

    Returns:
        One time for a string, a tuple of them otherwise.
    """
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flush_l2 else None
    fn()
    torch.cuda.synchronize()
    with (
        _silence() if suppress_kineto_output else contextlib.nullcontext(),
        profile(activities=[ProfilerActivity.CUDA]) as profiler,
    ):
        for _ in range(num_tests):
            if flush is not None:
                flush.zero_()
            if barrier is not None:
                barrier()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    seen = [
        (event.name, event.time_range.elapsed_us() / 1e6)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    times = tuple(_time_of(name, seen, num_tests, with_multiple_kernels) for name in names)
    return times[0] if isinstance(kernel_names, str) else times


def _time_of(name: str, seen: list[tuple[str, float]], num_tests: int, several: bool) -> float:
    matches = [(kernel, seconds) for kernel, seconds in seen if name in kernel]
    kernels = sorted({kernel for kernel, _ in matches})
    if not matches:
        others = sorted({kernel for kernel, _ in seen})
        raise InvalidInputError(f"kernel_names: no kernel with '{name}' in its name ran. These did: {others}.")
    if len(kernels) > 1 and not several:
        raise InvalidInputError(
            f"kernel_names: '{name}' matches several kernels: {kernels}. Give more of the name, or set "
            "with_multiple_kernels=True."
        )
    total = sum(seconds for _, seconds in matches)
    return total / (num_tests if several else len(matches))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what is written to stdout and stderr, by C++ code too."""
    for text in (sys.stdout, sys.stderr):
        text.flush()  # flush first: what was printed before must not be discarded
    with files.duplicate(1) as stdout, files.duplicate(2) as stderr, files.owned(os.devnull, os.O_WRONLY) as nowhere:
        try:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
            yield
        finally:
            for text in (sys.stdout, sys.stderr):
                text.flush()
            for stream, original in ((1, stdout), (2, stderr)):
                os.dup2(original.fileno(), stream)
