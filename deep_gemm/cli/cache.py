"""`deep-gemm cache`: what is stored, and clearing it."""

from __future__ import annotations

import json

import click

from deep_gemm.cli.console import console, size, table
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.root import default_root
from deep_gemm.settings import settings


def _disk() -> DiskCache:
    root = default_root()
    if root is None:
        raise click.ClickException("there is no directory for the cache here: set DG_JIT_CACHE_DIR to one")
    return DiskCache(root, settings.trust_cache_dir)


@click.group("cache")
def command() -> None:
    """Show or clear the cache of compiled kernels (DG_JIT_CACHE_DIR, else ~/.deep_gemm)."""


@command.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Where the cache is, whether it can be used, and what is in it."""
    found = _disk().info()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    out = console()
    state = found["problem"] or ("writable" if found["writable"] else "not writable")
    out.print(f"{found['root']}: {state}", markup=False)
    out.print(f"{found['entries']} kernels, {size(found['bytes'])}")
    if found["groups"]:
        columns = ["arch", "cuda", "driver", "kernels", "size"]
        rows = [[g["arch"], g["cuda"], g["driver"], g["entries"], size(g["bytes"])] for g in found["groups"]]
        out.print(table("", columns, rows))


@command.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Delete all compiled kernels. Nothing else in the directory is touched."""
    disk = _disk()
    found = disk.info()
    if found["problem"]:
        raise click.ClickException(found["problem"])
    if not found["entries"] and not found["bytes"]:
        click.echo(f"{found['root']} holds no kernels")
        return
    if not yes:
        click.confirm(f"Delete {found['entries']} kernels ({size(found['bytes'])}) in {found['root']}?", abort=True)
    counts = disk.clear()
    click.echo(f"{counts['entries']} kernels deleted, {size(counts['bytes'])}")
    if counts["failed"]:
        raise click.ClickException(f"{counts['failed']} could not be deleted")
