"""Output and option types of the commands: one console, tables without frames, readable units."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from deep_gemm.errors import SettingError
from deep_gemm.log import counted, duration
from deep_gemm.settings import Settings

if TYPE_CHECKING:
    from deep_gemm.aot.outcomes import Summary

__all__ = ["Number", "Size", "console", "duration", "size", "table"]


def console() -> Console:
    """A console without markup, since brackets in a path or a message are text. It neither wraps nor cuts lines if the
    output is a file or a pipe."""
    found = Console(highlight=False, soft_wrap=True, markup=False)
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, markup=False, width=200)


def busy(text: str) -> Status:
    """Show `text` and a spinner on standard error while a block runs, if that is a terminal."""
    return Console(stderr=True).status(text)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal: standard output may be JSON."""
    from rich.progress import Progress

    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def fact(out: Console, label: str, text: str, width: int = 11) -> None:
    """A label and a text, which on a terminal is wrapped beside the label, at spaces."""
    if not out.is_terminal:
        out.print(f"{label:{width}}{text}")
        return
    grid = Table.grid()
    grid.add_column(width=width)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    out.print(grid, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], gap: int = 2) -> Table:
    """A table of text cells, with `gap` spaces between columns."""
    out = Table(title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False)
    out.padding = (0, gap, 0, 0)
    for column in columns:
        out.add_column(Text(column), overflow="fold")
    for row in rows:
        out.add_row(*[Text(str(cell)) for cell in row])
    return out


def kernel_table(summary: Summary) -> Table:
    """The kernels that were built, and their resources."""
    rows = []
    for outcome in sorted(summary.outcomes, key=lambda outcome: outcome.name):
        if (binary := outcome.binary) is not None:
            spills = binary.resources.spill_stores + binary.resources.spill_loads
            took = duration(binary.seconds["compile"] * 1e6) if binary.layer == "compiled" else ""
            rows.append([outcome.name, len(outcome.shapes), binary.layer, binary.resources.registers, spills, took])
    return table("", ["kernel", "shapes", "from", "registers", "spills", "compile"], rows)


class Size(click.ParamType):
    """Bytes as DG_JIT_CACHE_LIMIT takes them, or 0."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int) or value.strip() == "0":
            return int(value)
        try:
            return Settings.cache_limit.convert(value, "it") or 0
        except SettingError:
            self.fail(f"{value!r} is no size: 2GiB, 500M and 0 are, and a number of bytes.", param, ctx)


class Number(click.FloatRange):
    """A number from 0. nan is refused: it compares with nothing."""

    name = "NUMBER"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value!r} is no number.", param, ctx)
        return found


def pack_size(path: str | Path, kernels: int, cubins: int) -> str:
    """What a pack holds: its kernels, the bytes of their cubins, and those of the file."""
    return f"{counted(kernels, 'kernel')}, {size(cubins)} in a file of {size(os.stat(path).st_size)}"


def size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
