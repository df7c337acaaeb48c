"""`deep-gemm tune`: measure the best few configs of the products of a model, and keep their times."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deep_gemm.aot import inputs, layers, workload
from deep_gemm.aot.workload import GemmShape
from deep_gemm.cli.console import Number, console
from deep_gemm.cli.options import json_option, model_option, op_option, shape_option, tp_option
from deep_gemm.errors import DeepGemmError
from deep_gemm.log import counted

if TYPE_CHECKING:
    from deep_gemm.runtime.measuring import Tuned


@click.command("tune")
@shape_option
@model_option
@tp_option
@click.option("--m", "m_text", metavar="SIZES", help="M of shapes without one: 1,2,64-4096:64. [19 from 1 to 8192]")
@op_option
@click.option("--seconds", type=Number(), default=float("inf"), help="Begin no new measurement after this long.")
@click.option(
    "--learn",
    "surveys",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Also keep the times in this file of `deep-gemm calibrate survey`; repeatable. Needs no GPU.",
)
@click.option("--stale", is_flag=True, help="With --learn: also rows that other sources than these measured.")
@json_option
def command(
    texts: tuple[str, ...],
    path: Path | None,
    tp: int,
    m_text: str | None,
    op: str,
    seconds: float,
    surveys: tuple[Path, ...],
    stale: bool,
    as_json: bool,
) -> None:
    """Measure configs on this GPU, and keep their times in the cache directory. DG_TUNE=read makes calls use them.

    \b
    The dense layers of a model:
      deep-gemm tune --model config.json --tp 8
    One shape at some sizes of M:
      deep-gemm tune --shape 7168x2048 --m 1,16,64

    The model ranks the configs; the first few are compiled and timed as single calls with a cold L2. A shape that was
    measured before is not measured again. Layers of experts are left out: run the model itself inside
    `deep_gemm.tuning()`, so that groups have real sizes.
    """
    if not texts and path is None and not surveys:
        raise click.UsageError("nothing to tune: give --shape, --model or --learn")
    layers.check_op(op)
    ms = inputs.parse_sizes(m_text, "--m") if m_text is not None else workload.DEFAULT_M
    asked: list[Any] = [replace(workload.parse(text), op=op or layers.FP8) for text in texts]
    asked += [path] if path is not None else []
    found = workload.plan(asked, tp, 1, op)
    left_out = [f"{x.name or f'{x.n} x {x.k}'}: {x.why_not or 'experts'}" for x in found.layers if not _is_tuned(x)]
    chosen = list(dict.fromkeys(workload.shapes(filter(_is_tuned, found.layers), ms)))
    learned = {str(each): _learn(each, stale) for each in surveys}
    failed: list[str] = []
    rows = _tune(chosen, seconds, as_json, left_out, failed) if chosen else []
    if as_json:
        report = {
            "learned": learned,
            "shapes": rows,
            "left_out": [*left_out, *failed],
            "problems": list(found.problems),
        }
        click.echo(json.dumps(report, indent=2))
    else:
        for name, counts in learned.items():
            click.echo(f"{name}: {_told(counts)}")
        for text in (*left_out, *failed, *found.unknown):
            click.echo(f"left out: {text}")
        if chosen:
            told = f"{counted(len(rows), 'shape')} of {len(chosen)} measured"
            click.echo(f"{told}; the others were known, or are left out.")
    if taught_nothing := [name for name, counts in learned.items() if not counts.get("kept")]:
        raise click.ClickException(" ".join(_nothing_learned(name, learned[name]) for name in taught_nothing))
    if not chosen and not learned:
        raise click.ClickException("there was nothing to measure: all layers were left out.")
    if failed:
        raise click.ClickException(f"{counted(len(failed), 'shape')} of {len(chosen)} could not be measured.")


def _is_tuned(layer: layers.Layer) -> bool:
    return not layer.why_not and layer.op not in (*layers.GROUPED_OPS, *layers.BATCHED_OPS)


def _learn(path: Path, stale: bool) -> dict[str, int]:
    from deep_gemm.bench import survey

    return dict(survey.remember(path, stale))


def _nothing_learned(name: str, counts: dict[str, int]) -> str:
    from deep_gemm.bench.survey import LEFT_OUT

    if not counts:
        return f"{name} has no records, so there was nothing to learn."
    return f"Nothing was learned from {name}: {_told(counts)}. {' '.join(LEFT_OUT[reason] for reason in counts)}"


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{counted(count, 'record')} {what}" for what, count in counts.items()) or "no records"


def _tune(
    chosen: list[GemmShape], seconds: float, quiet: bool, left_out: list[str], failed: list[str]
) -> list[dict[str, Any]]:
    """One row for each shape that was measured; a line is printed for each, unless ``quiet``. Adds to ``left_out`` what
    there was no time for, and to ``failed`` what could not be measured."""
    import torch

    from deep_gemm.bench import backends
    from deep_gemm.runtime.measuring import tuning

    if not torch.cuda.is_available():
        raise click.ClickException("the tuner times kernels on a GPU, and torch sees none here.")
    rows: list[dict[str, Any]] = []
    out, end = console(), time.monotonic() + seconds
    with tuning() as measured:
        for index, shape in enumerate(chosen):
            start, before = time.monotonic(), len(measured)
            if start > end:
                left_out.append(f"{counted(len(chosen) - index, 'shape')}: the time ran out")
                break
            try:
                backends.ours(backends.make_operands(shape, 1)[0])()
            except (DeepGemmError, torch.cuda.OutOfMemoryError) as error:
                failed.append(f"{shape}: {error}")
            for each in measured[before:]:
                rows.append(row := _row(shape, each, time.monotonic() - start))
                if not quiet:
                    choice = f"{row['model']} {row['model_us']} us -> {row['chosen']} {row['us']} us"
                    of = f"({row['gain']:.3f}), {row['of']} configs in {row['seconds']} s"
                    out.print(f"{shape}: {choice} {of}")
    return rows


def _row(shape: GemmShape, one: Tuned, seconds: float) -> dict[str, Any]:
    from deep_gemm import kernels

    def described(config: Any) -> str:
        return kernels.get(config.family).describe(config)

    return {
        "shape": str(shape),
        "model": described(one.modelled),
        "model_us": round(one.times[one.modelled], 2),
        "chosen": described(one.chosen),
        "us": round(one.times[one.chosen], 2),
        "gain": round(one.gain, 3),
        "of": len(one.times),
        "seconds": round(seconds, 1),
    }
