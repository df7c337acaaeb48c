"""`deep-gemm bench`: the benchmarks' command."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deep_gemm.aot import workload
from deep_gemm.aot.inputs import parse_sizes
from deep_gemm.aot.layers import FP8
from deep_gemm.bench import shapes
from deep_gemm.bench.modes import GEMM_MODES
from deep_gemm.bench.summary import summary
from deep_gemm.cli.console import Number, console, table
from deep_gemm.cli.options import NEW_FILE, PATH, shape_option

AGAINST = ("tensorwise", "blockwise", "cublaslt")


def operation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which operation is timed, as `shapes.posed` takes them."""
    ops = click.Choice(shapes.TIMED_OPS)
    for option in (
        click.option("--accumulate", is_flag=True, help="Add the product to D, in place."),
        click.option("--output-dtype", "dtype", type=click.Choice(shapes.OUTPUTS), help="dtype of D. [that of A]"),
        click.option("--op", type=ops, default=FP8, metavar="NAME", help="The operation."),
    ):
        command = option(command)
    return command


@click.command("bench")
@click.option("--mode", "modes", multiple=True, type=click.Choice(GEMM_MODES), help="What to time; repeatable. [flush]")
@click.option("--set", "set_name", type=click.Choice(sorted(shapes.SETS)), help="A named list of shapes. [reference]")
@shape_option
@click.option("--m", "m_text", metavar="SIZES", help="M for NxK shapes, or to choose from a set: 1,64-256:64.")
@click.option(
    "--random", "random_count", type=click.IntRange(1, 100_000), metavar="COUNT", help="Random shapes, log-uniform."
)
@click.option("--seed", default=0, help="Seed of --random.")
@click.option(
    "--against",
    multiple=True,
    type=click.Choice(AGAINST),
    help="What to compare with: a way to call cuBLASLt; repeatable. [all]",
)
@click.option("--deepgemm", type=PATH, help="Also time the DeepGEMM in this directory.")
@operation_options
@click.option("--seconds", type=Number(), default=math.inf, help="Begin no new measurement after this long.")
@click.option("--output", type=NEW_FILE, help="Append each record to this file, as JSON, once it is measured.")
@click.option(
    "--from", "source", type=click.Path(path_type=Path, exists=True), help="Measure nothing: use this file's records."
)
def command(
    modes: tuple[str, ...],
    set_name: str | None,
    texts: tuple[str, ...],
    m_text: str | None,
    random_count: int | None,
    seed: int,
    against: tuple[str, ...],
    deepgemm: Path | None,
    op: str,
    dtype: str | None,
    accumulate: bool,
    seconds: float,
    output: Path | None,
    source: Path | None,
) -> None:
    """Time kernels side by side with cuBLASLt, in one process. Rows appear as they are measured, with the backends'
    times over ours.

    \b
    --op:
      fp8_gemm_nt                    scales of 1 x 128 and 128 x 128
      fp8_gemm_nt_1d1d               1 x 128 on both sides, added to float32
      fp8_gemm_nt_rowwise            one scale for each row
      bf16_gemm_nt, _nn, _tn, _tt    and fp16_gemm_ likewise
    `deep-gemm compare` times grouped products and logits too.

    \b
    Modes:
      flush    single calls, cold L2, launch hidden
      graph    many weights in one CUDA graph (M <= 128), with and without
               the promise that they are constant
      steady   back to back for seconds, limited by power
    \b
    Sets of shapes:
      public     those of the published results: DeepSeek-V3's N x K,
                 12 sizes of M
      reference  the same with 4 sizes of M
      models     layers of public models
      steady     large products
      demo       the shapes of `deep-gemm demo`

    --random draws M, N and K log-uniform; N and K are multiples of 16, 64 or 128.
    """
    from deep_gemm.backends import deepgemm as theirs
    from deep_gemm.bench import backends, run

    out = console()
    left_out: list[str] = []
    if source is not None:
        rows = run.load(source)
        if not rows:
            raise click.ClickException(f"{source} has no records, so there is nothing to show.")
    else:
        modes = modes or ("flush",)
        chosen = shapes.posed(_shapes(set_name, texts, m_text, random_count, seed), op, dtype or "", accumulate)
        _need_gpu(modes)
        known = backends.add_deepgemm(theirs.load(deepgemm)) if deepgemm is not None else {}
        every = backends.names_for(chosen[0])
        if unknown := set(against) - set(every):
            raise click.UsageError(f"{op} is not timed against {', '.join(unknown)}; {', '.join(every[1:])} can be")
        names = [name for name in every if not against or name not in AGAINST or name in against]
        plan = run.Run(chosen, modes, seconds, output, names, lambda text: out.print(text), known)
        rows, left_out = plan.execute(), plan.left_out
    if entries := summary(rows):
        columns = list(entries[0])
        out.print(table("\nGeometric means (above 1: ours is faster)", columns, [list(e.values()) for e in entries]))
    if left_out:
        out.print(f"The time ran out before {len(left_out)} measurements: {'; '.join(left_out)}")
    if not rows:
        raise click.ClickException("nothing was measured.")


def _shapes(
    set_name: str | None, texts: tuple[str, ...], m_text: str | None, random_count: int | None, seed: int
) -> list[workload.GemmShape]:
    chosen: list[workload.GemmShape] = []
    sizes = parse_sizes(m_text, "--m") if m_text is not None else None
    for text in texts:
        chosen += workload.shapes([workload.parse(text)], sizes or workload.DEFAULT_M)
    if random_count:
        chosen += shapes.log_uniform(random_count, seed)
    if set_name or not chosen:
        named = shapes.SETS[set_name or "reference"]()
        chosen += [shape for shape in named if sizes is None or shape.m in sizes]
    if not chosen:
        raise click.UsageError(f"no shape of the set {set_name} has an M among {m_text}")
    return chosen


def _need_gpu(modes: tuple[str, ...]) -> None:
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException(
            f"bench times kernels on a GPU (--mode {', '.join(modes)}), and torch sees none here. --from FILE sums up "
            "the records of a file."
        )
    from deep_gemm import arch

    arch.for_device(torch.cuda.current_device())
