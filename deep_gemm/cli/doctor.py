"""`deep-gemm doctor`: what was found on this machine, what is used, and why."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deep_gemm import arch, backends, kernels
from deep_gemm.cli import clients
from deep_gemm.cli.console import busy, console, fact, size
from deep_gemm.cli.findings import NVRTC, judge
from deep_gemm.cli.options import json_option
from deep_gemm.errors import SettingError, UnsupportedError
from deep_gemm.jit.builder import default_builder
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.packs import named_by
from deep_gemm.jit.cache.root import default_root
from deep_gemm.jit.compilers.find import find_all
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.jit.generator import include_dir
from deep_gemm.log import counted
from deep_gemm.settings import settings

DISTRIBUTION = "deep-gemm-jit"
OTHER_DISTRIBUTIONS = ("deep-gemm", "deepgemm", "sgl-deep-gemm")
"""They install a package of the same name."""


@click.command("doctor")
@click.option("--verify", is_flag=True, help="Run this GPU's kernels, check and time them: at most two minutes.")
@json_option
def command(verify: bool, as_json: bool) -> None:
    """Say what was found: GPU, driver, compilers, cache, and what is used and why.

    Each compiler compiles a one-line kernel; one that cannot is not used. The last lines say what to do. Exits with 1
    if kernels can be neither compiled nor taken from a pack, or if something dangerous was found. A missing GPU is no
    problem.

    With --verify it checks every kernel that the GPU has against torch and float64, times it beside cuBLASLt, and
    prints a report. Exits with 1 if a result is wrong, or if there is no GPU.
    """
    if verify:
        from deep_gemm.cli.verify import run  # here: it imports torch and all backends

        run(as_json)
        return
    with busy("trying each compiler"):
        report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
    else:
        _print(report)
    if report["problems"]:
        raise SystemExit(1)


def examine() -> dict[str, Any]:
    """Everything that doctor says, as plain data.

    `problems`, `notes` and `to_do` are sentences. A problem stops compilation, or is dangerous.
    """
    report: dict[str, Any] = {
        "package": _package(),
        "gpus": _gpus(),
        "driver_cuda": ".".join(map(str, release)) if (release := driver_release()) else None,
        "compilers": _compilers(),
        "headers": {"path": str(include_dir()), "files": len(list(include_dir().glob("*.cuh")))},
        "post_passes": _post_passes(),
        "cache": _cache(),
        "packs": _packs(),
        "other_packages": _others(),
        "clients": clients.examine(),
        "settings": _settings(),
        "misspelt": settings.misspelt(),
        "absent_backends": backends.absent(),
    }
    findings = judge(report)
    report["problems"] = [found.text for found in findings if found.problem]
    report["notes"] = [found.text for found in findings if not found.problem]
    report["to_do"] = [found.action for found in findings if found.action]
    return report


def _package() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in (DISTRIBUTION, "torch", "cuda-bindings", NVRTC, "jinja2"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    import torch

    return {"path": _home(), "versions": versions, "torch_cuda": torch.version.cuda}


def _home() -> str:
    spec = importlib.util.find_spec("deep_gemm")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "unknown"


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    from deep_gemm.runtime import engine

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            target, why = arch.for_device(index).name, ""
            if not any(target in family.archs for family in kernels.gemms().values()):
                raise UnsupportedError(f"No product can be built for {target}. {arch.WITHOUT_KERNELS}")
        except UnsupportedError as error:
            target, why = None, str(error)
        capability = f"{properties.major}.{properties.minor}"
        entry = {"index": index, "name": properties.name, "capability": capability, "memory": properties.total_memory}
        entry |= {"sms": properties.multi_processor_count, "arch": target, "why": why}
        found.append(entry | {"calibration": engine.calibration_of(index).origin if target else ""})
    return found


def _compilers() -> list[dict[str, Any]]:
    with contextlib.suppress(SettingError):  # named among the problems
        return [asdict(found) for found in find_all(tried=True)]
    return []


def _post_passes() -> dict[str, str | None]:
    """The post-pass over the cubins of each kernel family, or None for a family without one."""
    found: dict[str, str | None] = {}
    with contextlib.suppress(SettingError):  # named among the problems
        for name, kernel in kernels.registry().items():
            post_pass = next(filter(None, map(kernel.post_pass, kernel.cases())), None)
            found[name] = post_pass.identity if post_pass else None
    return found


def _cache() -> dict[str, Any]:
    try:
        root = default_root()
        if root is not None:
            return DiskCache(root, settings.trust_cache_dir).info()
        problem = "there is no home directory; set DG_JIT_CACHE_DIR"
    except SettingError as error:
        problem = str(error)
    return {"root": None, "problem": problem, "writable": False}


def _packs() -> list[dict[str, Any]]:
    with contextlib.suppress(SettingError):  # named among the problems
        return [found.to_json() for found in default_builder().packs.found()]
    return []


def _others() -> list[str]:
    """Other packages that provide, or could shadow, the import name."""
    home = Path(_home()).resolve()
    found = []
    for entry in sys.path:
        for candidate in (Path(entry or ".", "deep_gemm"), Path(entry or ".", "deep_gemm.py")):
            there = (candidate / "__init__.py").is_file() or (candidate.suffix == ".py" and candidate.is_file())
            if there and candidate.resolve() != home:
                found.append(str(candidate.resolve()))
    for distribution in OTHER_DISTRIBUTIONS:
        try:
            found.append(f"the distribution {distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return list(dict.fromkeys(found))


def _settings() -> list[dict[str, Any]]:
    keys = ("variable", "value", "source")
    return [{key: getattr(info, key) for key in keys} for info in settings.describe() if info.source != "default"]


def _print(report: dict[str, Any]) -> None:
    out = console()
    package = report["package"]
    fact(out, "package", package["path"])
    fact(out, "versions", ", ".join(f"{name} {version}" for name, version in package["versions"].items()))
    fact(out, "driver", f"CUDA {report['driver_cuda']}" if report["driver_cuda"] else "none")
    for _, alike in itertools.groupby(report["gpus"], lambda gpu: gpu | {"index": None}):
        gpu, *more = alike  # a server has eight of a kind
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['sms']} SMs, {size(gpu['memory'])}"
        label = f"GPU {gpu['index']}" + (f" to {more[-1]['index']}" if more else "")
        fact(out, label, f"{text}: {gpu['arch'] or 'no kernels'}")
        if gpu["calibration"]:
            fact(out, "", f"configs are chosen by {gpu['calibration']}")
    fact(out, "headers", f"{report['headers']['path']} ({report['headers']['files']} files)")
    edits = {edit for edit in report["post_passes"].values() if edit}
    if edits:
        some = [name for name, edit in report["post_passes"].items() if edit]
        kinds = f"{len(some)} of {counted(len(report['post_passes']), 'kind')} of kernels"
        fact(out, "cubins", f"of {kinds} are edited after compiling by {', '.join(sorted(edits))} (--json names them)")
    cache = report["cache"]
    if cache["root"]:
        state = "writable" if cache["writable"] else "not writable"
        fact(out, "cache", f"{cache['root']}: {state}, {counted(cache.get('entries', 0), 'kernel')}")
    for pack in report["packs"]:
        state = pack["problem"] or f"{counted(pack['kernels'], 'kernel')}, {size(pack['bytes'])}"
        fact(out, "pack", f"{pack['path']} ({named_by(pack['by'])}): {state}")
    if report["absent_backends"]:
        fact(out, "backends", f"not installed: {', '.join(report['absent_backends'])} (deep-gemm compare says why)")
    for entry in report["settings"]:
        value = os.pathsep.join(map(str, entry["value"])) if isinstance(entry["value"], tuple) else entry["value"]
        origin = "" if entry["source"] == entry["variable"] else f" (from {entry['source']})"
        fact(out, "setting", f"{entry['variable']} = {value}{origin}")
    for client in report["clients"]:
        first, *rest = clients.lines(client)
        fact(out, "client", first)
        for line in rest:
            fact(out, "", line)
    out.print("\ncompilers")
    for one in report["compilers"]:
        state = " is used" if one["chosen"] else "" if one["usable"] else " cannot be used"
        label = f"{'->' if one['chosen'] else '  '} {one['kind']} {one['version']}"
        fact(out, label, f"{one['path']}{state}: {one['why']}", width=18)
    for note in report["notes"]:
        fact(out, "note", note)
    for problem in report["problems"]:
        fact(out, "problem", problem)
    out.print(f"\n{_verdict(report)}")
    for number, action in enumerate(report["to_do"], 1):
        fact(out, f"{number:3}.", action, width=5)


def _verdict(report: dict[str, Any]) -> str:
    """What works here, and whether anything is to be done."""
    if report["problems"]:
        return "To do:"
    compiles = any(compiler["chosen"] for compiler in report["compilers"])
    runs = any(gpu["arch"] for gpu in report["gpus"])
    how = "compiled" if compiles else "taken from packs"
    if any(line["variable"] == "DG_JIT_FORBID_COMPILE" and line["value"] is True for line in report["settings"]):
        how = "taken from packs and the cache"
    works = f"Kernels can be {how}{' and run' if runs else ''} here."
    if how.endswith("cache"):
        works += " DG_JIT_FORBID_COMPILE forbids compiling."
    return f"{works} To do:" if report["to_do"] else f"{works} Nothing to do."
