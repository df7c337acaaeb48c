"""`deep-gemm precompile`: compile ahead, with or without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deep_gemm.aot import inputs, layers, workload
from deep_gemm.aot.layers import Layer
from deep_gemm.cli.console import busy, console, duration, fact, kernel_table, pack_size, progress, table
from deep_gemm.cli.options import (
    NEW_FILE,
    arch_option,
    json_option,
    model_option,
    op_option,
    shape_option,
    sms_option,
    tp_option,
)
from deep_gemm.log import counted

if TYPE_CHECKING:
    from deep_gemm.aot.outcomes import KernelsToBuild, Outcome, Summary
    from deep_gemm.aot.workload import GemmShape

MAX_REASONS = 3
"""How many kinds of failures are printed."""
FAILED, PARTIAL = 1, 3
"""Exit statuses. Click's own, for a wrong use, is 2."""


@click.command("precompile")
@shape_option
@model_option
@tp_option
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert-parallel GPUs of a model.")
@click.option(
    "--groups",
    type=click.IntRange(1, inputs.MAX_SIZE),
    default=1,
    help="Weights of each --shape, for products grouped by expert.",
)
@click.option("--m", "m_text", metavar="SIZES", help="M of shapes without one: 1,2,64-4096:64. [all up to --max-m]")
@click.option(
    "--max-m",
    type=click.IntRange(1, inputs.MAX_SIZE),
    default=workload.MAX_M,
    help="The largest M to serve; of a model, the tokens of each GPU.",
)
@op_option
@click.option("--training", is_flag=True, help="Also the gradients and casts that training dense layers in FP8 needs.")
@click.option(
    "--epilogue",
    "finished",
    multiple=True,
    metavar="PARTS",
    help="Also layers with this epilogue, such as bias:bf16+silu or swiglu+fp8; repeatable.",
)
@click.option("--fused", is_flag=True, help="Also all of deep_gemm.fused, for rows as wide as the K of dense layers.")
@arch_option
@sms_option
@click.option(
    "--card",
    "models",
    multiple=True,
    metavar="NAME",
    help="GPU model to serve on, such as H20, or all; repeatable. [H100, H200, those here]",
)
@click.option(
    "--shard",
    "shard_text",
    metavar="I/N",
    help="Build part I of N, counted from 0: one for each task of a Slurm array. [all]",
)
@click.option("--jobs", type=click.IntRange(1, 4096), help="Kernels compiled at once. [CPUs]")
@click.option("--pack", type=NEW_FILE, help="Also write all kernels to this pack.")
@click.option("--allow-partial", is_flag=True, help="Compile the layers that have kernels, even if others have none.")
@click.option("--dry-run", is_flag=True, help="Compile nothing: list the layers and the kernels.")
@json_option
def command(
    texts: tuple[str, ...],
    path: Path | None,
    tp: int,
    ep: int,
    groups: int,
    m_text: str | None,
    max_m: int,
    op: str,
    training: bool,
    finished: tuple[str, ...],
    fused: bool,
    arch: str,
    num_sms: int | None,
    models: tuple[str, ...],
    shard_text: str | None,
    jobs: int | None,
    pack: Path | None,
    allow_partial: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile the kernels that a model or given shapes will use, into the cache.

    A model's experts are served whatever the routing, in each form: rows with labels, ends of groups, masked groups.

    \b
    List the layers, and why some have no kernel:
      deep-gemm precompile --model DIR --tp 8 --dry-run
    Compile into the cache, and write a pack for other machines:
      deep-gemm precompile --model DIR --tp 8 --pack model.dgpack

    Each layer is listed with its N x K on one GPU, and with the reason if it has no kernel. Later processes find the
    kernels on disk. Machines without a compiler find them in a pack that DG_JIT_PRECOMPILED names.

    Exits with 3 and compiles nothing if a layer is not understood or has no kernel ("no"), also with --dry-run;
    --allow-partial goes on with the rest, if there is any. Layers that engines multiply by other libraries
    ("elsewhere") need no kernel. Exits with 1 and writes no pack if a kernel failed or could not be stored.
    """
    from deep_gemm import kernels
    from deep_gemm.aot import build, cards, shard
    from deep_gemm.ops.epilogue import epilogues_of

    if not texts and path is None:
        raise click.UsageError("nothing to compile: give --shape or --model")
    ms = inputs.parse_sizes(m_text, "--m") if m_text is not None else None
    part = shard.parse(shard_text) if shard_text is not None else None
    on = cards.parse(models, arch) if models else cards.default(num_sms, arch)
    # --shape takes shapes only, even if a file of that name exists.
    layers.check_op(op, grouped=True)
    asked: list[Any] = [replace(workload.parse(text), op=op or layers.FP8, groups=groups) for text in texts]
    asked += [path] if path is not None else []
    with busy("choosing kernels for every M"):  # a second a layer
        found = build.plan(asked, tp, ep, op, training)
        every = found.layers if ms is not None else workload.for_every_m(found.layers, max_m)
        shapes = workload.shapes(every, ms or (), training, epilogues_of(finished))
        work = build.choose(shapes, arch, num_sms, on, found.layers, fused)
    report: dict[str, Any] = {
        "arch": arch,
        "cards": [card.name for card in on],
        "layers": [
            _described(layer, work, _span(ms) if ms is not None else f"every M to {layer.most_rows(max_m)}")
            for layer in found.layers
        ],
        "problems": list(found.problems),
        "unknown": list(found.unknown),
        "untrained": list(workload.untrained(found.layers)) if training else [],
        "kernels": len(work.kernels),
        "others": sorted(kernels.get(x.kernel).kernel_name(x) for x, asking in work.kernels.items() if not asking),
    }
    where = f"{arch} ({', '.join(report['cards'])})"
    lacking, nothing = bool(found.problems or work.impossible), not work.kernels
    stops = nothing or (lacking and not allow_partial)
    if not as_json:
        _print_plan(report)
    if stops or dry_run:
        report["compiled"] = None
        if as_json:
            click.echo(json.dumps(report, indent=2))
        elif nothing:
            click.echo("No layer has a kernel, so there is nothing to compile.")
        elif stops:
            click.echo("Nothing was compiled. --allow-partial compiles the layers that have kernels.")
        else:
            click.echo(f"{counted(len(work.kernels), 'kernel')} would be compiled, or found ready, for {where}.")
        raise SystemExit(PARTIAL if stops else 0)
    if pack is None and (why := _nowhere(work)):
        raise click.ClickException(
            f"kernels would be compiled and stored nowhere: {why}. Set DG_JIT_CACHE_DIR, or give --pack."
        )
    with progress("compiling") as step:
        summary = build.run(work, shard=part, jobs=jobs, progress=lambda _, done, total: step(done, total))
    _finish(report, summary, f"{where}, shard {shard_text}" if part else where, pack, as_json)


def _finish(report: dict[str, Any], summary: Summary, where: str, pack: Path | None, as_json: bool) -> None:
    """Report what was built, write the pack, and exit with 1 if something is missing."""
    from deep_gemm.aot import build

    lost, failed = build.unstored(summary), len(summary.failed)
    compiled = summary.count("compiled")
    ready = len(summary.outcomes) - failed - compiled
    report |= {
        "compiled": compiled,
        "ready": ready,
        "seconds": summary.seconds,
        "failed": [{"kernel": outcome.name, "error": str(outcome.error)} for outcome in summary.failed],
        "unstored": [outcome.name for outcome in lost],
    }
    counts = f"{counted(compiled, 'kernel')} compiled, {ready} ready before, {failed} failed"
    said = [f"On {where}: {counts}, in {duration(summary.seconds * 1e6)}"]
    if pack is not None and not failed:
        held = build.pack(summary, pack)
        cubins = sum(kernel.cubin_bytes for kernel in held)
        report["pack"] = {"path": str(pack), "kernels": len(held), "bytes": cubins, "file_bytes": pack.stat().st_size}
        said.append(f"{pack}: {pack_size(pack, len(held), cubins)}")
    elif pack is not None:
        said.append(f"{pack} was not written: a pack that lacks some kernels would look like a whole one")
    elif lost:
        why = _cache_problem() or "see the warning above"
        said.append(f"{counted(len(lost), 'kernel')} could not be stored, and will be compiled again: {why}.")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print_kernels(summary)
        click.echo("\n".join(said))
    if failed or (lost and pack is None):
        raise SystemExit(FAILED)


def _described(layer: Layer, work: KernelsToBuild, every: str) -> dict[str, Any]:
    def is_own(s: GemmShape) -> bool:
        same = (s.n, s.k, s.op, s.groups) == (layer.n, layer.k, layer.op, layer.groups)
        return same and (not layer.ms or s.m in layer.ms)

    kernels = sum(any(map(is_own, asking)) for asking in work.kernels.values())
    impossible = [x.error for x in work.impossible if any(map(is_own, x.shapes))]
    why_not = layer.why_not or (str(impossible[0]) if impossible else "")
    told: dict[str, Any] = {name: getattr(layer, name) for name in ("name", "n", "k", "op", "groups", "elsewhere")}
    told |= {"m": _span(layer.ms) if layer.ms else every, "kernels": 0 if layer.why_not else kernels}
    return told | {"served": not why_not, "why_not": why_not}


def _served(one: dict[str, Any]) -> str:
    if one["why_not"]:
        return f"{'elsewhere' if one['elsewhere'] else 'no'}: {one['why_not']}"
    return f"yes, by {one['op']}"


def _size(one: dict[str, Any]) -> str:
    groups = "" if one["groups"] == 1 else f"{one['groups']} of "
    return f"{groups}{one['n']} x {one['k']}"


def _span(ms: Sequence[int]) -> str:
    return f"M = {ms[0]}" if len(ms) == 1 else f"{len(ms)} M from {min(ms)} to {max(ms)}"


def _print_plan(report: dict[str, Any]) -> None:
    rows = [[one["name"] or "-", _size(one), one["m"], one["kernels"], _served(one)] for one in report["layers"]]
    out = console()
    if len(rows) > 1:  # layers share kernels, so the column does not add up
        rows.append(["all together", "", "", report["kernels"], ""])
    if rows:
        out.print(table("", ["layer", "N x K", "M", "kernels", "served"], rows))
    if report["others"]:
        belong = "belongs" if len(report["others"]) == 1 else "belong"
        fact(out, "also", f"{', '.join(report['others'])}, which {belong} to no layer")
    for text in report["untrained"]:
        if not any(text in problem for problem in report["unknown"]):
            fact(out, "training", text)
    for problem in report["unknown"]:  # the table has the others
        fact(out, "problem", problem)


def _print_kernels(summary: Summary) -> None:
    out = console()
    out.print(kernel_table(summary))
    kinds: dict[str, list[Outcome]] = {}
    for outcome in summary.failed:
        kinds.setdefault(_reason(outcome), []).append(outcome)
    for outcome, *others in list(kinds.values())[:MAX_REASONS]:
        asked = ", ".join(map(str, outcome.shapes[:4])) + (", ..." if len(outcome.shapes) > 4 else "")
        out.print(f"failed: {outcome.name}{f' (for {asked})' if asked else ''}\n{outcome.error}")
        if others:
            names = ", ".join(other.name for other in others[:8]) + (", ..." if len(others) > 8 else "")
            out.print(f"failed for the same reason: {counted(len(others), 'kernel')}: {names}")
    if left := sum(map(len, list(kinds.values())[MAX_REASONS:])):
        reasons = counted(len(kinds) - MAX_REASONS, "other reason")
        out.print(f"failed for {reasons}: {counted(left, 'kernel')}; --json has them all")


def _reason(outcome: Outcome) -> str:
    """What failures of the same kind have in common: the error without names of kernels, keys and numbers."""
    text = getattr(outcome.error, "summary", str(outcome.error)).replace(outcome.name, "*")
    return f"{type(outcome.error).__name__} {re.sub(r'[0-9a-f]{8,}|[0-9]+', '*', text)}"


def _nowhere(work: KernelsToBuild) -> str:
    """Why missing kernels could not be stored; "" if none is missing or they can be."""
    from deep_gemm.errors import CompilerNotFoundError
    from deep_gemm.jit.builder import default_builder
    from deep_gemm.runtime import engine

    why = _cache_problem()
    if not why:
        return ""
    try:
        missing = any(default_builder().lookup(engine.build_request(params)) is None for params in work.kernels)
    except CompilerNotFoundError:
        missing = True
    return why if missing else ""


def _cache_problem() -> str:
    from deep_gemm.jit.info import cache_info

    return (cache_info()["problem"] or "").rstrip(".")
