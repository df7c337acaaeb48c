"""`deep-gemm precompile`: compile ahead, with or without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from deep_gemm import ahead, shard, workload
from deep_gemm.cli.console import console, duration, table


@click.command("precompile")
@click.option("--shape", "texts", multiple=True, metavar="MxNxK|NxK", help="A shape; repeatable.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="JSON, YAML, or a Hugging Face config.json.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel GPUs, for a config.json.")
@click.option("--m", "m_text", metavar="SIZES", help="M where none is given: 1,2,64-4096:64. [decode to prefill]")
@click.option("--arch", default="sm_90a", show_default=True, help="The target; its GPU need not be here.")
@click.option("--num-sms", type=click.IntRange(1), help="SMs that calls may use. [all]")
@click.option("--shard", "shard_text", metavar="I/N", help="Part I of N, from 0: each task of a Slurm array one. [all]")
@click.option("--jobs", type=click.IntRange(1), help="Kernels compiled at once. [CPUs]")
def command(
    texts: tuple[str, ...],
    path: Path | None,
    tp: int,
    m_text: str | None,
    arch: str,
    num_sms: int | None,
    shard_text: str | None,
    jobs: int | None,
) -> None:
    """Compile the kernels that a model or given shapes will use, into the cache.

    Ends with status 1 if any kernel failed. A later process finds the kernels on disk.
    """
    ms = workload.parse_sizes(m_text) if m_text else list(workload.DEFAULT_M)
    shapes = [shape for text in texts for shape in workload.parse_shape(text, ms)]
    if path is not None:
        shapes += workload.load(path, ms, tp)
    part = shard.parse(shard_text) if shard_text is not None else None
    if not shapes:
        raise click.UsageError("nothing to compile: give --shape or --file")

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console()
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=None, name="")

        def progress(outcome: ahead.Outcome, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, name=outcome.name)

        summary = ahead.precompile(shapes, arch=arch, num_sms=num_sms, shard=part, jobs=jobs, progress=progress)

    rows = []
    for outcome in sorted(summary.outcomes, key=lambda outcome: outcome.name):
        if outcome.binary is not None:
            resources, seconds = outcome.binary.resources, outcome.binary.seconds
            spills = resources.spill_stores + resources.spill_loads
            took = duration(seconds["compile"] * 1e6) if outcome.binary.layer == "compiled" else ""
            cells = [outcome.name, len(outcome.shapes), outcome.binary.layer, resources.registers, spills, took]
            rows.append(cells)
    out.print(table("", ["kernel", "shapes", "from", "registers", "spills", "compile"], rows))
    for outcome in summary.failed:
        asked = ", ".join(map(str, outcome.shapes[:4])) + (", ..." if len(outcome.shapes) > 4 else "")
        out.print(f"failed: {outcome.name}{f' (for {asked})' if asked else ''}\n{outcome.error}", markup=False)
    compiled, failed = summary.count("compiled"), len(summary.failed)
    ready = len(summary.outcomes) - failed - compiled
    out.print(
        f"{len(set(shapes))} shapes on {arch}{f', shard {shard_text}' if part else ''}: {compiled} kernels compiled, "
        f"{ready} were ready, {failed} failed, in {duration(summary.seconds * 1e6)}"
    )
    if failed:
        raise SystemExit(1)
