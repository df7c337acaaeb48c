"""`deep-gemm inspect`: what would run for a shape, and why; or why every call with it is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from deep_gemm.aot import layers
from deep_gemm.aot.workload import GemmShape, parse
from deep_gemm.cli.console import console, duration, fact, size, table
from deep_gemm.cli.options import arch_option, json_option, sms_option
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.binary import Binary
from deep_gemm.jit.cache.packs import named_by

if TYPE_CHECKING:
    from deep_gemm.spec import GemmSpec


@click.command("inspect")
@click.argument("shape", metavar="MxNxK")
@arch_option
@click.option("--op", default=layers.FP8, help="The operation.")
@click.option("--groups", type=click.IntRange(1), default=1, help="Groups of a grouped operation.")
@click.option("--expected-m", type=click.IntRange(1), help="Rows expected in a masked group. [all]")
@click.option("--epilogue", help="The epilogue, such as bias:bf16+silu or swiglu+fp8.")
@sms_option
@click.option("--top", default=8, type=click.IntRange(1), help="How many configs to list.")
@click.option("--sass", "with_sass", is_flag=True, help="Print the machine code too.")
@json_option
def command(
    shape: str,
    arch: str,
    op: str,
    groups: int,
    expected_m: int | None,
    epilogue: str | None,
    num_sms: int | None,
    top: int,
    with_sass: bool,
    as_json: bool,
) -> None:
    """Show the problem, the configs with the model's estimates, and the kernel: source, registers, shared memory, SASS.

    The best config is compiled if it is not in the cache. Nothing runs, so no GPU is needed.
    """
    found = parse(shape)
    if len(found.ms) != 1:
        raise click.UsageError(f"inspect takes one shape, M x N x K, not {shape}")
    layers.check_op(op, grouped=True)
    known = (*layers.GROUPED_OPS, *layers.BATCHED_OPS)
    if groups > 1 and op not in known:
        raise click.UsageError(f"--groups is for {', '.join(known)}: name one of them with --op, not {op}")
    if expected_m is not None and not layers.is_masked(op):
        raise click.UsageError(f"--expected-m is for masked operations, not {op}")
    from deep_gemm.ops.epilogue import epilogues_of
    from deep_gemm.parts import Parts

    parts = Parts() if epilogue is None else epilogues_of(epilogue)[0]
    asked = GemmShape(found.ms[0], found.n, found.k, "", op or layers.FP8, groups, expected_m or 0, parts)
    report = examine(asked, arch, num_sms, top, with_sass)
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
    else:
        _print(report)


def examine(shape: GemmShape, arch: str, num_sms: int | None, top: int, with_sass: bool) -> dict[str, Any]:
    from deep_gemm import arch as archs
    from deep_gemm import kernels, select
    from deep_gemm.aot import build, cards
    from deep_gemm.kernels import epilogues
    from deep_gemm.runtime import engine
    from deep_gemm.select import casts
    from deep_gemm.spec import to_json

    spec = archs.get(arch)
    if why := build.refusal(shape.n, shape.k, shape.op, shape.groups):
        raise InvalidInputError(f"Every call with {shape} is refused: {why}")
    asked = build.spec_of(shape, spec, num_sms)
    both = epilogues.apart(asked)
    casting = both and casts.casting(asked, spec)
    if both and casting and casting.launches == 2:
        asked = both[0]
    known = None if spec is archs.DEFAULT else cards.default(num_sms, arch)[0].calibration
    ranked = select.rank(asked, spec, known)
    params = engine.kernel_params(asked, ranked[0].config, spec)
    binary = engine.build(params)
    post_pass = kernels.get(params.kernel).post_pass(params)
    configs = []
    for choice in ranked[:top]:
        config = dataclasses.asdict(choice.config) | {"name": kernels.get(choice.config.family).describe(choice.config)}
        estimate = dataclasses.asdict(choice.estimate) | {"sustained_us": choice.sustained_us}
        configs.append({"config": config, "estimate": estimate})
    report: dict[str, Any] = {
        "asked": _asked(asked),
        "spec": to_json(asked),
        "casting": casting and dataclasses.asdict(casting),
        "configs_ranked": len(ranked),
        "calibration": ranked[0].calibration.origin,
        "configs": configs,
        "params": params.to_json(),
        "kernel": binary.name,
        "key": binary.key,
        "compiler": binary.compiler,
        "from": binary.layer,
        "pack": _pack_of(binary),
        "seconds": dict(binary.seconds),
        "source": binary.source_path,
        "cubin_bytes": len(binary.cubin),
        "shared_bytes": kernels.get(params.kernel).shared_bytes(params),
        "resources": binary.resources.to_json(),
        "post_pass": post_pass and {"identity": post_pass.identity, "did": post_pass.describe(binary.cubin)},
    }
    if with_sass:
        from deep_gemm.jit.disassembler import sass

        report["sass"] = sass(binary.cubin)
    return report


def _print(report: dict[str, Any]) -> None:
    out = console()
    fact(out, "asked", report["asked"])
    if casting := report["casting"]:
        way = "1, which casts" if casting["launches"] == 1 else "2, this product and a cast of it"
        fact(out, "launches", f"{way}: {casting['one_us']:.2f} us in one, {casting['two_us']:.2f} us in two")
    fact(out, "ranked", f"by {report['calibration']}")
    rows = [[number, *_described(entry["config"])] for number, entry in enumerate(report["configs"], 1)]
    columns = ["", "tile", "stages", "consumers", "cluster", "CTAs/SM", "kernel"]
    # One space between columns: large times must fit into 80 columns.
    out.print(table(f"best of {report['configs_ranked']} configs", columns, rows, gap=1))
    times = [entry["estimate"] for entry in report["configs"]]
    parts = sorted((x for x in times[0] if x.endswith("_us")), key=lambda x: x not in ("total_us", "sustained_us"))
    rows = [[number, *(_cell(x[part]) for part in parts), x["bound"], x["waves"]] for number, x in enumerate(times, 1)]
    title = "\ntheir times in us, by the model (sustained: at the power limit)"
    out.print(table(title, ["", *(name.removesuffix("_us") for name in parts), "bound by", "waves"], rows, gap=1))
    resources = report["resources"]
    out.print()
    fact(out, "kernel", f"{report['kernel']} (key {report['key'][:16]}), from: {report['from']}")
    seconds = report["seconds"].get("compile")  # not of shipped kernels: two builds of a wheel are the same
    took = f"{duration(seconds * 1e6)}, " if seconds is not None else ""
    fact(out, "compiler", f"{report['compiler']}, {took}cubin {size(report['cubin_bytes'])}")
    pack = report["pack"]
    elsewhere = (
        f"in the pack {pack['path']} ({named_by(pack['by'])})" if pack else "not stored: the cache cannot be written"
    )
    fact(out, "source", report["source"] or elsewhere)
    used = f"{resources['registers']} registers a thread, {size(report['shared_bytes'])} shared memory, spills "
    used += f"{resources['spill_stores']} + {resources['spill_loads']} bytes, stack {resources['stack']} bytes"
    fact(out, "resources", used)
    edit = report["post_pass"]
    fact(out, "edited", f"{edit['identity']}: {edit['did']}" if edit else "no: as the compiler made it")
    for warning in resources["warnings"]:
        fact(out, "warning", warning)
    if "sass" in report:
        out.print(report["sass"])


def _pack_of(binary: Binary) -> dict[str, Any] | None:
    """The pack that the kernel came from, as `PackFile.to_json` says it, or None."""
    from deep_gemm.jit.builder import default_builder

    found = default_builder().packs.holder(binary.source_key, binary.name, binary.arch)
    return found.to_json() if found is not None else None


def _asked(spec: GemmSpec) -> str:
    """The spec, and what of it is no default."""
    words = [str(spec), f"{spec.num_sms} SMs" if spec.whole_gpu else f"{spec.num_sms} SMs, a part of the GPU"]
    if not spec.d.aligned:
        words.append("rows of D not aligned")
    if spec.batch_invariant:
        words.append("batch invariant")
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        said = isinstance(value, bool) or field.name in ("groups", "grouping")
        if field.default is not dataclasses.MISSING and value != field.default and not said:
            words.append(f"{field.name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _described(config: dict[str, Any]) -> list[Any]:
    """Cells: the tile, the pipeline, the cluster, CTAs per SM, and the kernel; --json has the rest."""
    words = [config["family"].removeprefix("sm90_")]
    words += [] if config["persistent"] else ["not persistent"]
    words += ["consumers share K"] if config["consumers_k"] > 1 else []
    tile, cluster = ("x".join(str(config[f"{name}_{x}"]) for x in "mnk") for name in ("block", "cluster"))
    return [tile, config["num_stages"], config["num_consumers"], cluster, config["ctas_per_sm"], ", ".join(words)]


def _cell(us: float) -> str:
    """In five characters."""
    return f"{us:.2f}" if us < 99.995 else f"{us:.1f}" if us < 999.95 else f"{us:.0f}"
