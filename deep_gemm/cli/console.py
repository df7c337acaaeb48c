"""How the commands print: one console, tables without frames, and units for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """A console that neither wraps nor cuts lines where the output is a file or a log."""
    found = Console(highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of text cells."""
    out = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        out.add_column(column, overflow="fold")
    for row in rows:
        out.add_row(*[str(cell) for cell in row])
    return out


def duration(us: float) -> str:
    """Microseconds as a person reads them: "8.2 us", "140 ms", "2.1 s"."""
    if us < 1e3:
        return f"{us:.1f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def size(count: int) -> str:
    """Bytes as a person reads them."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
