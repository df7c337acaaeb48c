"""`deep-gemm compare`: the backends of an operation side by side."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deep_gemm.aot.inputs import number
from deep_gemm.cli.console import busy, console, duration, size, table
from deep_gemm.cli.options import PATH, json_option
from deep_gemm.log import rate

if TYPE_CHECKING:
    from rich.console import Console

    from deep_gemm.backends.results import Comparison, Result


class Sizes(click.ParamType):
    """Sizes of a shape, as many as an operation has."""

    name = "SIZES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = value.lower().split("x")
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is no shape: 4096x7168x2048 is.", param, ctx)
        return tuple(number(part, f"a size of the shape {value}") for part in parts)


@click.command("compare")
@click.argument("op", required=False)
@click.option(
    "--shape", "shapes", multiple=True, type=Sizes(), metavar="MxNxK", help="Sizes; repeatable. [those of examples]"
)
@click.option("--backends", default="all", metavar="NAMES", help="With commas between them.")
@click.option("--mode", type=click.Choice(("flush", "graph", "steady")), default="flush")
@click.option("--device", type=click.Choice(("cuda", "cpu")), help="[a GPU if there is one]")
@click.option("--deepgemm", type=PATH, help="A directory that DeepGEMM was installed into.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write chrome traces NAME-<operation>-<shape>.json.",
)
@json_option
def command(
    op: str | None,
    shapes: tuple[tuple[int, ...], ...],
    backends: str,
    mode: str,
    device: str | None,
    deepgemm: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Run every implementation of OP on the same operands: ours, cuBLASLt, Triton, DeepGEMM, torch, plugins' ones.

    Each is checked against float64, and those that are right are timed in turns. Without OP: what there is.

    OP is an operation such as fp8_gemm_nt, several with commas between them, or all. A GEMM's shape is MxNxK, that of
    GEMMs of groups GROUPSxROWSxNxK or GROUPSxKxMxN, with the mean of the groups' rows or K. Logits of an indexer have
    QUERIESxKEYS or REQUESTSxTOKENSxKEYS, and a hyper-connection's product MxK.

    Without a GPU, torch's reference runs on the host, and Triton in its interpreter; the times are the host's.

    Ends with status 1 if a result is wrong, or nothing was compared.
    """
    from deep_gemm import backends as registry
    from deep_gemm.backends.results import Comparison
    from deep_gemm.bench.provenance import environment

    out = console()
    if deepgemm is not None:
        from deep_gemm.backends import deepgemm as theirs

        theirs.use(theirs.load(deepgemm))
    ops = list(registry.operation_names()) if op in (None, "all") else [name for name in str(op).split(",") if name]
    names = [name for name in backends.split(",") if name]
    for what, given in (("OP", ops), ("--backends", names)):
        if not given:
            raise click.UsageError(f"{what} has only commas: there is nothing to compare")
    if op is None:
        overview(out)
        return
    sizes = {name: len(registry.get_operation(name).dims) for name in ops}
    for dims in shapes if len(ops) > 1 else ():
        if len(dims) not in sizes.values():
            text = "x".join(map(str, dims))
            raise click.UsageError(f"None of {', '.join(ops)} has {len(dims)} sizes, so {text} is no shape of theirs.")
    found: list[Comparison] = []
    with busy("") as status, contextlib.redirect_stdout(sys.stderr):  # what tuners of others print
        for name in ops:
            fitting = [dims for dims in shapes if len(ops) == 1 or len(dims) == sizes[name]]
            found.append(
                registry.compare(name, fitting, names, device=device, mode=mode, trace=trace, progress=status.update)
            )
    rows = tuple(row for each in found for row in each.results)
    report = Comparison(found[0].device, found[0].mode, found[0].roof, rows, environment())
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show(report, out)
    if any(row.status == "wrong" for row in report.results):
        raise SystemExit(1)
    if not any(row.status in ("ok", "easier") for row in report.results):
        raise click.ClickException("nothing was compared.")


def overview(out: Console) -> None:
    """Print the operations, the backends that have each, and the absent backends."""
    from deep_gemm import backends as registry

    rows = []
    for name in registry.operation_names():
        operation = registry.get_operation(name)
        rows.append([name, " x ".join(operation.dims), ", ".join(registry.of(name))])
    out.print(table("", ["operation", "shape", "backends"], rows))
    for name, why in registry.absent().items():
        out.print(f"absent: {name}: {why}")


def show(report: Comparison, out: Console) -> None:
    """Print a comparison: times and errors of each shape, the ranking, and what did not run."""
    from deep_gemm.backends.accuracy import ULP_LABELS

    on_gpu = report.roof is not None
    columns = (*ERRORS, *(f"{label} ulp" for label in ULP_LABELS))
    where = (
        f"{report.device}, {report.mode} mode"
        if on_gpu
        else "times are those of the host's CPU, and say nothing about a GPU"
    )
    out.print(f"{where}\n")
    for op, dims in report.cases:
        rows = [row for row in report.rows(op, dims) if row.timing or row.accuracy]
        if rows:
            out.print(table(f"{op} {rows[0].shape}", TIMES if on_gpu else TIMES[:-2], _times(rows, on_gpu)))
            out.print("")
            out.print(table("against float64", columns, [_errors(row) for row in rows if row.accuracy]))
            out.print("")
    for op in report.ops:
        if ranking := report.ranking(op):
            lines = [
                [
                    "" if rank.easier else place,
                    _name(rank.backend, rank.easier),
                    f"{rank.of_best:.3f}",
                    "-" if rank.easier else f"{rank.first} of {rank.shapes}",
                ]
                for place, rank in enumerate(ranking, 1)
            ]
            out.print(table(f"ranking of {op}, by geometric mean of the fastest's time over each", RANKS, lines))
            out.print("")
    for group in report.left_out():
        out.print(f"not compared: {group}")


RANKS = ("", "backend", "of the best", "fastest in")
TIMES = ("backend", "median", "half between", "TFLOP/s", "GB/s", "of the roof", "allocates")
ERRORS = ("backend", "max absolute", "max relative", "L2", "1 - cosine", "of the bound")


def _name(backend: str, easier: bool) -> str:
    return f"{backend} (an easier problem)" if easier else backend


def _times(rows: list[Result], on_gpu: bool) -> list[list[Any]]:
    lines = []
    for row in rows:
        line = [_name(row.backend, row.status == "easier")]
        if (time := row.timing) is None:
            line += [row.status] + ["-"] * (5 if on_gpu else 3)
        else:
            line += [duration(time.us), f"{duration(time.low_us)} to {duration(time.high_us)}"]
            line += [rate(time.tflops), rate(time.gb_per_s)]
            if on_gpu:
                line += [f"{time.of_roof or 0:.2f}", size(time.extra_bytes or 0)]
        lines.append(line)
    return lines


def _errors(row: Result) -> list[Any]:
    found = row.accuracy
    if found is None:
        return [row.backend]
    measures = (found.max_abs, found.max_rel, found.l2_rel, 1 - found.cosine)
    shares = [f"{share:.2%}" if share else "0" for share in found.ulps]
    return [row.backend, *(f"{x:.2e}" for x in measures), f"{found.of_allowed:.2f}", *shares]
