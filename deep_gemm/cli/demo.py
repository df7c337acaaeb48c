"""`deep-gemm demo`: compile, run and check one GEMM, on the GPU or the CPU of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deep_gemm import arch
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench.shapes import demo
from deep_gemm.cli.console import console, duration, kernel_table

if TYPE_CHECKING:
    from rich.console import Console

ARCH = arch.DEFAULT.name
CPU_M = (512, 1)
"""M of the reference on the CPU: 4096 rows and their exact product would take a minute."""


@click.command("demo")
def command() -> None:
    """Compile and run an FP8 projection of DeepSeek-V3, check it against the exact product, and run it again warm.

    Without a GPU it compiles the same kernels for Hopper, and runs the same call on CPU tensors through the reference.
    """
    import torch

    out = console()
    if torch.cuda.is_available():
        arch.for_device(torch.cuda.current_device())
        _on_gpu(out)
    else:
        _without_gpu(out)


def _on_gpu(out: Console) -> None:
    import torch

    from deep_gemm.bench.run import line, measure

    out.print(f"Running on {torch.cuda.get_device_name()}, torch {torch.__version__}.\n")
    for shape in demo():
        out.print(f"M = {shape.m}, N = {shape.n}, K = {shape.k} ({shape.source})", style="bold")
        first, second, layers, share, difference = _run("cuda", shape, torch.cuda.synchronize)
        origin = ", ".join(f"{count} {name}" for name, count in layers.items()) or "everything was in memory"
        out.print(f"  first call   {duration(first)} (kernels: {origin})")
        out.print(f"  second call  {duration(second)}, nothing compiled, loaded or looked up on disk")
        _print_check(out, share, difference)
        out.print(f"  on the GPU   {line(measure(shape, 'flush'))}\n")
    _print_kernels(out)
    out.print("\nThis was the GPU: kernels compiled, run, checked against the exact product, and timed.")


def _without_gpu(out: Console) -> None:
    out.print(f"There is no GPU here, so nothing is timed. The kernels are compiled for {ARCH} all the same:\n")
    _print_kernels(out)
    out.print("\nThe same call on CPU tensors runs the reference implementation:\n")
    for m in CPU_M:
        shape = GemmShape(m, demo()[0].n, demo()[0].k)
        out.print(f"M = {shape.m}, N = {shape.n}, K = {shape.k}", style="bold")
        first, second, _, share, difference = _run("cpu", shape, lambda: None)
        out.print(f"  first call   {duration(first)}, second call {duration(second)} (reference on the CPU)")
        _print_check(out, share, difference)
    out.print("\nThis was the CPU: the kernels were compiled and not run, and the reference was run and checked.")


def _run(device: str, shape: GemmShape, wait: Callable[[], Any]) -> tuple[float, float, dict[str, int], float, float]:
    """Call `fp8_gemm_nt` twice and check it. Times in microseconds, from call to finished result."""
    import torch

    import deep_gemm
    from deep_gemm.jit.builder import default_builder
    from deep_gemm.testing import assert_close_to_exact, calc_diff, random_operands

    a, b, x, y = random_operands(shape.m, shape.n, shape.k, device)
    a = (a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1]))
    d = torch.full((shape.m, shape.n), float("nan"), dtype=torch.bfloat16, device=device)
    before = default_builder().stats
    times = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        deep_gemm.fp8_gemm_nt(a, b, d)
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    after = default_builder().stats
    layers = {name: int(after[name] - before[name]) for name in ("compiled", "disk")}
    share = assert_close_to_exact(d, *a, *b)
    difference = float(calc_diff(d, x.float() @ y.float().t()))
    return times[0], times[1], {name: count for name, count in layers.items() if count}, share, difference


def _print_check(out: Console, share: float, difference: float) -> None:
    if not difference < 1e-3:
        raise click.ClickException(f"the result differs from the unquantised product by {difference:.1e}")
    out.print(
        f"  checked      every element within bounds of the exact product (largest error {share:.0%} of its bound)"
    )
    out.print(f"               calc_diff to the unquantised product {difference:.1e} (below 1e-3)")


def _print_kernels(out: Console) -> None:
    """Build the kernels of the demo's shapes (after a run they are cached already), and show their resources."""
    from deep_gemm.aot import build

    work = build.choose(demo(), ARCH)
    summary = build.run(work)
    if summary.failed:
        raise summary.failed[0].error or click.ClickException(summary.failures)
    out.print(kernel_table(summary))
    binaries = [outcome.binary for outcome in summary.outcomes]
    stored = {str(Path(x.source_path).parent.parent) for x in binaries if x is not None and x.source_path}
    for path in sorted(stored):
        out.print(f"stored under {path}")
    if not stored:
        out.print("stored nowhere: the cache cannot be written (see `deep-gemm doctor`), so they live in memory only")
    again = build.run(work).seconds / len(binaries) * 1e6
    out.print(f"looked up again in {duration(again)} each: nothing is compiled twice")
