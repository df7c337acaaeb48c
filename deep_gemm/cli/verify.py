"""`deep-gemm doctor --verify`: runs the kernels of this GPU, and prints a report to be pasted into an issue."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console

from deep_gemm.cli.console import busy, console, duration, fact, table
from deep_gemm.errors import UnsupportedError

if TYPE_CHECKING:
    from deep_gemm.backends.verify import Report

COLUMNS = ("operation", "shape", "of the bound", "time", "cuBLASLt", "speed over cuBLASLt's")


def run(as_json: bool) -> None:
    """Check everything, print it, and end with status 1 if something is wrong."""
    import torch

    from deep_gemm.backends import verify
    from deep_gemm.bench.provenance import environment

    try:
        arch = verify.arch_here()
    except UnsupportedError as error:
        raise click.ClickException(str(error)) from error
    with busy("") as status:
        device = torch.device("cuda", torch.cuda.current_device())
        report = verify.verify(device, arch, progress=status.update)
    found = environment()
    if as_json:
        click.echo(json.dumps({"environment": found, **asdict(report), "wrong": report.wrong}, indent=2))
    else:
        show(report, found, console())
    if report.wrong:
        raise SystemExit(1)


def show(report: Report, environment: dict[str, str], out: Console) -> None:
    """Print a report."""
    about = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "device" and value)
    fact(out, "GPU", f"{environment['device']}, {report.arch}")
    fact(out, "versions", about)
    casts = report.casts - len(report.wrong_casts)
    fact(out, "casts", f"{casts} of {report.casts} give the bytes that torch gives")
    out.print("")
    ours = [row for row in report.rows if row.backend == report.ours and row.status == "ok"]
    others = {(row.op, row.dims): row.us for row in report.rows if row.backend != report.ours and row.status == "ok"}
    lines = []
    for row in ours:
        theirs = others.get((row.op, row.dims))
        bound = f"{row.accuracy.of_allowed:.2f}" if row.accuracy else "-"
        ratio = (duration(theirs), f"{theirs / row.us:.2f}") if theirs else ("-", "-")
        lines.append([row.op, row.shape, bound, duration(row.us), *ratio])
    out.print(table("operations, single calls with a cold L2", COLUMNS, lines))
    out.print("")
    called = [each for each in report.families if each.calls]
    rows = [[each.name, f"{each.calls - len(each.wrong)} of {each.calls}", f"{each.of_allowed:.2f}"] for each in called]
    if rows:
        out.print(table("families, each with several tiles", ("family", "right", "of the bound"), rows))
        out.print("")
    for op, why in report.refused.items():
        fact(out, "no kernel", f"{op}: {why}")
    if left := ", ".join(each.name for each in report.families if not each.calls):
        fact(out, "not forced", f"{left}: no operation that is compared here uses them")
    if report.late:
        fact(out, "left out", f"there was no time for {', '.join(report.late)}")
    for why in report.wrong:
        fact(out, "wrong", why)
    verdict = f"{len(report.wrong)} checks failed." if report.wrong else "Everything that ran is right."
    out.print(f"{verdict} It took {duration(report.seconds * 1e6)}. Please paste this into an issue: it helps others.")
