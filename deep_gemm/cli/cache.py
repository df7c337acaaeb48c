"""`deep-gemm cache`: what is stored, checking it, removing it, and moving it between machines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import click

from deep_gemm.cli.console import Number, Size, console, pack_size, progress, size, table
from deep_gemm.cli.options import NEW_FILE, PATH, json_option
from deep_gemm.jit.cache import maintenance, transfer
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.files import absolute
from deep_gemm.jit.cache.packs import named_by
from deep_gemm.jit.cache.root import default_root, root_problem
from deep_gemm.jit.info import cache_info
from deep_gemm.log import counted
from deep_gemm.settings import settings


def _disk() -> DiskCache:
    root = default_root()
    if root is None:
        raise click.ClickException("there is no directory for the cache here: set DG_JIT_CACHE_DIR to one")
    return DiskCache(root, settings.trust_cache_dir)


@click.group("cache")
def command() -> None:
    """Show, check, prune, clear, pack or merge the cache of compiled kernels (DG_JIT_CACHE_DIR, else ~/.deep_gemm)."""


@command.command("info")
@click.argument("paths", nargs=-1, type=PATH, metavar="[PACK]...")
@json_option
def info(paths: tuple[Path, ...], as_json: bool) -> None:
    """Where the cache is, whether it can be used, and what is in it and in the packs in use; or the kernels of each
    PACK.

    The JSON is what deep_gemm.cache_info() returns; its statistics are of this process, which has built nothing.
    """
    if paths:
        _show_packs(paths, as_json)
        return
    found = cache_info()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    out = console()
    state = found["problem"] or ("writable" if found["writable"] else "not writable")
    out.print(f"{found['root'] or 'no directory'}: {state}")
    out.print(f"{counted(found['entries'], 'kernel')}, {size(found['bytes'])}")
    if found["groups"]:
        columns = ["arch", "cuda", "driver", "kernels", "size"]
        rows = [[g["arch"], g["cuda"], g["driver"], g["entries"], size(g["bytes"])] for g in found["groups"]]
        out.print(table("", columns, rows))
    for one in found["packs"]:
        state = one["problem"] or pack_size(one["path"], one["kernels"], one["bytes"])
        out.print(f"pack {one['path']} ({named_by(one['by'])}): {state}")


def _show_packs(paths: tuple[Path, ...], as_json: bool) -> None:
    report, out = [], console()
    for path in paths:
        try:
            found = packs.read(path, trust=True)
            kernels = sorted(found.kernels.values(), key=lambda one: (one.name, one.cuda))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{path} is no pack that can be read: {error}") from error
        one = {"path": str(path), "version": found.version, "bytes": found.cubin_bytes}
        one["file_bytes"] = path.stat().st_size
        report.append(one | {"kernels": [kernel.to_json() for kernel in kernels]})
        if not as_json:
            written = f"written by deep_gemm {found.version}"
            out.print(f"{path}: {pack_size(path, len(kernels), found.cubin_bytes)}, {written}")
            rows = [[x.name, x.arch, x.compiler, size(x.cubin_bytes), x.resources.registers] for x in kernels]
            out.print(table("", ["kernel", "arch", "compiler", "size", "registers"], rows))
    if as_json:
        click.echo(json.dumps(report, indent=2))


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
        click.confirm(
            f"Delete {counted(found['entries'], 'kernel')} ({size(found['bytes'])}) in {found['root']}?", abort=True
        )
    counts = disk.clear()
    click.echo(f"{counted(counts['entries'], 'kernel')} deleted, {size(counts['bytes'])}")
    if counts["failed"]:
        raise click.ClickException(f"{counts['failed']} could not be deleted")


def _usable_disk(source: Path | None = None) -> DiskCache:
    """The cache directory, or ``source``. It is refused if others can write to it."""
    disk = _disk() if source is None else DiskCache(absolute(source), settings.trust_cache_dir)
    problem = root_problem(disk.root, disk.trust)
    if problem is not None:
        raise click.ClickException(problem)
    return disk


@command.command("verify")
@click.argument("paths", nargs=-1, type=PATH, metavar="[PACK]...")
@json_option
@click.option("--delete", is_flag=True, help="Remove corrupted entries and leftovers, if nobody is using them.")
def verify(paths: tuple[Path, ...], as_json: bool, delete: bool) -> None:
    """Check all entries as loading does, or every byte of the packs named. Exits with 1 if one was corrupted, even if
    it was deleted."""
    if paths:
        if delete:
            raise click.UsageError("--delete is for the cache directory; remove or build a bad pack again")
        _verify_packs(paths, as_json)
        return
    disk = _usable_disk()
    with progress("verifying") as step:
        found = maintenance.verify(disk, maintenance.selectable(), step)
    removed = maintenance.delete_bad(disk, found) if delete else []
    states = ("sound", "corrupted", "foreign", "leftover", "in use")
    counts = {state: sum(item.state == state for item in found) for state in states}
    if as_json:
        report = {"root": str(disk.root), "counts": counts, "found": maintenance.to_json(found)}
        click.echo(json.dumps(report | {"removed": maintenance.to_json(removed)}, indent=2))
    else:
        for item in found:
            if item.state != "sound":
                click.echo(f"{item.state}: {item.path}: {item.reason}")
        click.echo(f"{disk.root}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        if delete:
            _tell(removed, dry_run=False)
    if counts["corrupted"]:
        raise SystemExit(1)


def _verify_packs(paths: tuple[Path, ...], as_json: bool) -> None:
    found: dict[str, list[str]] = {}
    with progress("verifying") as step:
        for done, path in enumerate(paths, 1):
            found[str(path)] = packs.problems(path)
            step(done, len(paths))
    if as_json:
        click.echo(json.dumps([{"path": path, "problems": problems} for path, problems in found.items()], indent=2))
    else:
        for name, problems in found.items():
            for problem in problems:
                click.echo(f"corrupted: {name}: {problem}")
            if not problems:
                opened = packs.read(Path(name), trust=True)
                click.echo(f"{name}: {pack_size(name, opened.count, opened.cubin_bytes)}, all sound")
    if any(found.values()):
        raise SystemExit(1)


@command.command("pack")
@click.argument("out", type=NEW_FILE)
@click.option(
    "--from", "source", type=click.Path(path_type=Path, file_okay=False), help="A cache directory. [this one]"
)
@click.option("--arch", default="", help="Only kernels for this target, such as sm_90a.")
@click.option("--name", default="*", metavar="GLOB", help="Only kernels whose name matches.")
@json_option
def pack(out: Path, source: Path | None, arch: str, name: str, as_json: bool) -> None:
    """Write what the cache holds to the pack OUT, each entry verified before.

    Of kernels that differ in their compiler alone, the newest compiler's is taken. Exits with 1 if an entry was
    unsound, or nothing was found to write.
    """
    disk = _usable_disk(source)
    with progress("packing") as step, _writing(out):
        report = transfer.pack_disk(disk, out, arch, name, step)
    _tell_transfer(report, out, as_json)


@command.command("merge")
@click.argument("sources", nargs=-1, required=True, type=PATH, metavar="SOURCE...")
@click.option("--pack", "out", type=NEW_FILE, help="Join them into this pack instead.")
@json_option
def merge(sources: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Copy the kernels of other cache directories and packs into the cache directory, each verified before.

    Sound entries that are there already are kept. Exits with 1 if anything was unsound, or nothing was found.
    """
    trust = settings.trust_cache_dir
    if out is None:
        disk = _usable_disk()
        with progress("merging") as step:
            report = transfer.merge(sources, disk, trust, step)
        _tell_transfer(report, disk.root, as_json)
        return
    with progress("merging") as step, _writing(out):
        report = transfer.join(sources, out, trust, step)
    _tell_transfer(report, out, as_json)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{out} cannot be written: {error}") from error


def _tell_transfer(report: list[transfer.Item], target: Path, as_json: bool) -> None:
    counts = {state: sum(item.state == state for item in report) for state in transfer.STATES}
    if as_json:
        whole = {"target": str(target), "counts": counts, "items": [item.to_json() for item in report]}
        click.echo(json.dumps(whole, indent=2))
    else:
        for item in report:
            if item.reason:
                click.echo(f"{item.state}: {item.name or 'all'} of {item.origin}: {item.reason}")
        told = [f"{count} {state}" for state, count in counts.items() if count or state == "taken"]
        click.echo(f"{target}: {', '.join(told)}")
        if not counts["taken"] + counts["same"]:
            click.echo("no kernel was found, so nothing was written")
    if counts["unsound"] or counts["failed"] or not counts["taken"] + counts["same"]:
        raise SystemExit(1)


@command.command("prune")
@click.option("--max-bytes", type=Size(), help="Remove until at most this much is stored: 2GiB, 500M, 0.")
@click.option(
    "--older-than", type=Number(), metavar="DAYS", help="Remove entries that were not used for this many days."
)
@click.option("--unused-versions", is_flag=True, help="Remove entries that no compiler or driver here can use.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(max_bytes: int | None, older_than: float | None, unused_versions: bool, dry_run: bool) -> None:
    """Remove entries, least recently used first. Entries that are being compiled stay.

    The time of last use is when a process last loaded the kernel, to the hour. DG_JIT_CACHE_LIMIT limits the size
    without this command.
    """
    if max_bytes is None and older_than is None and not unused_versions:
        raise click.UsageError("say what to remove: --max-bytes, --older-than or --unused-versions")
    disk = _usable_disk()
    here = maintenance.selectable() if unused_versions else None
    if unused_versions and here is None:
        raise click.ClickException(
            "no usable compiler is here, so no entry is known to be unused: run `deep-gemm doctor`"
        )
    seconds = None if older_than is None else older_than * 86400
    with progress("pruning") as step:
        removed = maintenance.prune(disk, max_bytes, seconds, here, dry_run, step)
    for item in removed:
        click.echo(f"{item.path}: {size(item.size)}, {item.reason}")
    _tell(removed, dry_run)


def _tell(removed: list[maintenance.Removal], dry_run: bool) -> None:
    gone = removed if dry_run else [item for item in removed if item.done]
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{len(gone)} {verb}, {size(sum(item.size for item in gone))}")
    if len(gone) < len(removed):
        click.echo(f"{len(removed) - len(gone)} were left, because they are in use or changed meanwhile")
