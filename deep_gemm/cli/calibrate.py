"""`deep-gemm calibrate`: the constants of the model that chooses configs, measured on a GPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click

from deep_gemm.aot.layers import FP8
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import result_rows as lines
from deep_gemm.bench import shapes
from deep_gemm.bench.modes import LAUNCH_MODES, SURVEY_MODES, WITHIN
from deep_gemm.cli.bench import operation_options
from deep_gemm.cli.console import Number, console
from deep_gemm.cli.options import NEW_FILE
from deep_gemm.select import calibration

if TYPE_CHECKING:
    from deep_gemm.bench.fit import Data

COUNT, TOKENS, SECONDS = click.IntRange(0, 10_000), click.IntRange(1, 1 << 20), Number()
RANGES = (64, 128, 512)
"""Upper ends of the ranges of tokens, and one range above. A survey has as many rows in each, and fits are judged by
range."""
CALIBRATION_M = (1, 8, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512, 1024, 2048, 4096)


@click.group("calibrate", invoke_without_command=True)
@click.option("--seconds", type=SECONDS, default=900.0, help="Time for the survey.")
@click.pass_context
def command(context: click.Context, seconds: float) -> None:
    """Measure this GPU, fit the model's constants, and write its calibration file. The commands below are the single
    steps.

    GPU models without a file start from their spec sheet and from the file of the nearest model.
    """
    if context.invoked_subcommand is None:
        import torch

        rows = Path("calibration-survey.jsonl")
        context.invoke(survey_command, output=rows, seconds=seconds)  # click fills in the other defaults
        target = calibration.file_of(torch.cuda.get_device_name())
        context.invoke(fit_command, sources=(rows,), output=target)


@command.command("survey")
@click.option("--output", required=True, type=NEW_FILE, help="Append JSON records to this file.")
@click.option("--random", "count", type=COUNT, default=160, help="Log-uniform random shapes.")
@click.option("--seed", default=1, help="Their seed.")
@click.option("--public/--no-public", default=True, help="DeepSeek-V3's N x K at many M too.")
@click.option("--min-m", type=TOKENS, default=1, help="Leave out shapes with a smaller M.")
@click.option("--max-m", type=TOKENS, default=8192, help="Leave out shapes with a larger M.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(SURVEY_MODES), help="How to time; repeatable. [all]")
@operation_options
@click.option(
    "--within",
    type=Number(),
    default=WITHIN,
    help="Time configs whose predicted time is at most this multiple of the best one's; 0: all.",
)
@click.option("--seconds", type=Number(), default=900.0, help="Begin no new measurement after this long.")
def survey_command(
    output: Path,
    count: int,
    seed: int,
    public: bool,
    min_m: int,
    max_m: int,
    modes: tuple[str, ...],
    op: str,
    dtype: str | None,
    accumulate: bool,
    within: float,
    seconds: float,
) -> None:
    """Time many configs on many shapes. The order is random, so a survey that is cut short still covers all kinds."""
    import torch

    from deep_gemm.bench import survey
    from deep_gemm.bench.run import append

    if not torch.cuda.is_available():
        raise click.ClickException("a survey times kernels on a GPU, and torch sees none here.")
    chosen = surveyed(count, seed, public, min_m, max_m, op, dtype or "", accumulate)
    out = console()
    plan = survey.Survey(chosen, modes or SURVEY_MODES, within, seconds, lambda text: out.print(text))
    timed = 0
    for row in plan.rows():
        append(output, row)
        timed += 1
    if not timed:
        raise click.ClickException(
            f"nothing was timed: no shape of {min_m} to {max_m} tokens suits the modes, or compiling took all of the "
            f"{seconds:g} s. Ask for other shapes or modes, or for more --seconds."
        )
    _report(survey.load([output]))


def surveyed(
    count: int, seed: int, public: bool, min_m: int, max_m: int, op: str = FP8, output: str = "", added: bool = False
) -> list[GemmShape]:
    """The shapes of a survey, of `min_m` to `max_m` tokens, in an order that `seed` gives: `count` random ones, and
    with `public` DeepSeek-V3's N x K at many M. Random shapes are log-uniform. Each range of tokens gets so many that
    all ranges have as many rows: small M is timed in graphs too, which makes two or three rows of a shape. There are
    fewer than `count` if less than one draw in 100 is in a range."""
    from deep_gemm.bench import survey

    found = [GemmShape(m, n, k, "DeepSeek-V3") for n, k in shapes.REFERENCE_NK for m in CALIBRATION_M] if public else []
    found = [x for x in shapes.posed(found, op, output, added) if survey.is_surveyed(x, "flush")]
    found = [shape for shape in found if min_m <= shape.m <= max_m]
    left = _shares(count, min_m, max_m)
    drawn = shapes.posed(shapes.log_uniform(count * 100, seed), op, output, added)
    for shape in (x for x in drawn if survey.is_surveyed(x, "flush")):
        if shape.n % 8 == 0 and min_m <= shape.m <= max_m and left[kind := range_of(shape.m)]:
            left[kind] -= 1
            found.append(shape)
    random.Random(seed).shuffle(found)
    return found


def range_of(m: int) -> str:
    """The name of the range that ``m`` tokens belong to."""
    return next((f"m <= {limit}" for limit in RANGES if m <= limit), f"m > {RANGES[-1]}")


def _shares(count: int, min_m: int, max_m: int) -> dict[str, int]:
    """How many of ``count`` shapes each range of tokens gets, so that all ranges have as many rows."""
    from deep_gemm.bench import survey

    least = {range_of(m): m for m in range(max_m, min_m - 1, -1)}
    modes = {
        kind: sum(survey.is_surveyed(GemmShape(m, 64, 128), mode) for mode in LAUNCH_MODES) for kind, m in least.items()
    }
    whole, shares, upto = sum(1 / each for each in modes.values()), {}, 0.0
    for kind, each in modes.items():
        before, upto = upto, upto + count / each / whole
        shares[kind] = round(upto) - round(before)
    return shares


@command.command("fit")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The calibration file to write.")
@click.option("--least", type=click.IntRange(1), default=80, help="Keep the present constants with fewer records.")
def fit_command(sources: tuple[Path, ...], output: Path, least: int) -> None:
    """Fit the model's constants to surveys, which are of one GPU model. Takes a minute and needs no GPU. A quarter of
    the shapes is held out to judge the fit."""
    from deep_gemm.bench import fit, survey

    rows = survey.load(sources)
    devices = sorted({str(row.get("device", "")) for row in rows})
    if not rows or len(devices) > 1:
        what = f"rows of several GPUs, {', '.join(devices)}: fit each by itself" if rows else "no rows"
        raise click.ClickException(f"the surveys hold {what}.")
    out, (spec, sheet) = console(), survey.card_of(rows[0])
    launches: dict[str, list[dict[str, Any]]] = {"": []}  # by the name of the speeds
    for row in rows:
        if row["mode"] in LAUNCH_MODES:
            launches.setdefault(fit.speeds_of(row, spec), []).append(row)
    device = rows[0].get("device")
    known = calibration.for_device(device, arch=spec.name) if device else calibration.default()
    summary: dict[str, Any] = {}
    speeds, power = {"": known.speed, **dict(known.others)}, known.power
    for name, timed in launches.items():
        title = f"speed {name}".rstrip()
        parts = [[row for row in timed if fit.is_held_out(row) == held] for held in (False, True)]
        seen, held_out = (fit.Data.of(part, spec) if part else None for part in parts)
        if seen is None or held_out is None or len(seen.rows) < least:
            out.print(f"{title}: the constants stay, since {len(timed)} records are too few.")
            continue
        speeds[name] = fit.fit(seen, known.named(name), within=fit.bounds(sheet, name))
        summary[title] = {"fitted": _summary(seen, speeds[name]), "held_out": _summary(held_out, speeds[name])}
        for part, ranges in summary[title].items():
            for text, numbers in ranges.items():
                out.print(f"{title}, {part}, {text}: {numbers}")
    if (fitted := fit.fit_power(rows, spec)) is None:
        out.print("power: the constants stay, since times back to back are too few, or do not determine them.")
    else:
        power, summary["power"] = fitted
        out.print(f"power: {summary['power']}")
    if not summary:
        raise click.ClickException(f"the surveys hold too few rows to fit any constants: {len(rows)} in all.")
    about: dict[str, Any] = {key: rows[0][key] for key in ("device", "driver", "cuda", "torch") if key in rows[0]}
    # What was not fitted now keeps its constants, so what is known about these stays too.
    file = calibration.file_of(device or "")
    before = json.loads(file.read_text()) if file.is_file() else {"fit": {}, "survey": {}}
    kept = {name: numbers for name, numbers in before["fit"].items() if name not in summary}
    earlier = before["survey"] if kept else {}
    about["files"] = sorted({path.name for path in sources}.union(earlier.get("files", ())))
    for key in ("date", "source_digest"):  # surveys may come from several days and source trees
        about[f"{key}s"] = sorted({row[key] for row in rows if key in row}.union(earlier.get(f"{key}s", ())))
    others = tuple(sorted((name, speed) for name, speed in speeds.items() if name))
    constants = calibration.Calibration(speeds[""], power, others=others).to_json()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"constants": constants, "fit": kept | summary, "survey": about}, indent=1) + "\n")
    out.print(f"Written: {output}")


def _summary(data: Data, speed: calibration.Speed) -> dict[str, dict[str, float]]:
    """The quality of choices in each range of tokens, for single calls and for graphs."""
    found: dict[str, list[float]] = {}
    for row, quality in zip(data.rows, data.selected(speed).tolist(), strict=True):
        mode = "flush" if row["mode"] == "flush" else "graph"
        found.setdefault(f"{mode} {range_of(row['m'])}", []).append(quality)
    return {
        name: {"rows": len(each), "selected_over_best": round(geometric_mean(each), 4), "worst": round(min(each), 3)}
        for name, each in sorted(found.items())
    }


@command.command("check")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def check_command(sources: tuple[Path, ...]) -> None:
    """Show how good the selected configs of surveys were: the best time over theirs."""
    from deep_gemm.bench import survey

    _report(survey.load(sources))


def _report(rows: list[dict[str, Any]]) -> None:
    from deep_gemm.bench import survey

    out = console()
    if not any(row["mode"] in SURVEY_MODES for row in rows):
        raise click.ClickException("there are no records of surveys, so there is nothing to show.")
    for mode in SURVEY_MODES:
        found = {str(lines.shape_of(r)): survey.quality(r) for r in rows if r["mode"] == mode}
        if found:
            worst = min(found, key=found.__getitem__)
            mean = geometric_mean(found.values())
            text = f"{mode}: selected / best {mean:.4f} over {len(found)} shapes, worst {found[worst]:.3f} ({worst})"
            out.print(text)
