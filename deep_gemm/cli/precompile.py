"""`deep-gemm precompile`: compile ahead, with or without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from deep_gemm import select
from deep_gemm.aot import build, shard, workload
from deep_gemm.cli.console import console, duration, size, table


@click.command("precompile")
@click.option("--shape", "texts", multiple=True, metavar="MxNxK|NxK", help="A shape; repeatable.")
@click.option(
    "--file", "--model", "path", type=click.Path(path_type=Path), help="JSON, YAML, or a Hugging Face config.json."
)
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel GPUs, for a config.json.")
@click.option("--ep", default=1, show_default=True, help="Expert-parallel GPUs, for a config.json.")
@click.option("--m", "m_text", metavar="SIZES", help="M where none is given: 1,2,64-4096:64. [all up to --max-m]")
@click.option("--max-m", type=click.IntRange(1), default=build.MAX_M, show_default=True, help="Every M up to this.")
@click.option("--arch", default="sm_90a", show_default=True, help="The target; its GPU need not be here.")
@click.option("--num-sms", type=click.IntRange(1), help="SMs that calls may use. [all]")
@click.option("--shard", "shard_text", metavar="I/N", help="Part I of N, from 0: each task of a Slurm array one. [all]")
@click.option("--jobs", type=click.IntRange(1), help="Kernels compiled at once. [CPUs]")
@click.option(
    "--pack", "pack", type=click.Path(path_type=Path, dir_okay=False), help="Write them all to this pack too."
)
def command(
    texts: tuple[str, ...],
    path: Path | None,
    tp: int,
    ep: int,
    m_text: str | None,
    max_m: int,
    arch: str,
    num_sms: int | None,
    shard_text: str | None,
    jobs: int | None,
    pack: Path | None,
) -> None:
    """Compile the kernels that a model or given shapes will use, into the cache.

    Ends with status 1 if any kernel failed; then no pack is written. A later process finds the kernels on disk, and a
    machine without a compiler in a pack that DG_JIT_PRECOMPILED names.
    """
    ms = workload.parse_sizes(m_text) if m_text else select.representatives(max_m)
    shapes = [shape for text in texts for shape in workload.parse_shape(text, ms)]
    if path is not None:
        shapes += workload.load(path, ms, tp, ep)
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

        def progress(outcome: build.Outcome, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, name=outcome.name)

        summary = build.precompile(shapes, arch=arch, num_sms=num_sms, shard=part, jobs=jobs, progress=progress)

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
    missing = workload.left_out(path) if path is not None else None
    if missing:
        out.print(missing, markup=False)
    span = f"M of {m_text}" if m_text else f"every M up to {max_m}"
    where = f"{arch}, shard {shard_text}" if part else arch
    out.print(
        f"{len({(s.n, s.k) for s in shapes})} N x K, {span}, on {where}: {compiled} kernels compiled, {ready} were "
        f"ready, {failed} failed, in {duration(summary.seconds * 1e6)}"
    )
    if failed:
        if pack is not None:
            out.print(
                f"{pack} was not written: a pack that lacks some kernels would look like a whole one", markup=False
            )
        raise SystemExit(1)
    if pack is not None:
        held = build.pack(summary, pack)
        out.print(f"{pack}: {len(held)} kernels, {size(pack.stat().st_size)}", markup=False)
