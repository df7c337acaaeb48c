"""How fast GEMMs grouped by M are, beside torch's grouped GEMMs and DeepGEMM, in single calls with a cold L2.

    python -m deep_gemm.benchmarks.grouped --output FILE [--deepgemm DIRECTORY]
    python -m deep_gemm.benchmarks.grouped --layouts --output FILE
    python -m deep_gemm.benchmarks.grouped --survey --output FILE

The first form times the public calls. The second times one routing as labels of rows (index), as ends of groups (psum)
and in the masked form. The third times every legal config of the kernel, for choosing the serving set. `--only` takes
parts of a shape's name, such as `--only fp8 --only masked --only 32x192`. Needs a GPU. A row for each shape goes to
FILE as soon as it is measured, and a line to the terminal.
"""

from __future__ import annotations

import functools
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from deep_gemm import arch as archs
from deep_gemm import engine, select
from deep_gemm.backends import deepgemm as theirs
from deep_gemm.benchmarks import provenance, survey
from deep_gemm.benchmarks.grouped_operands import (
    EASIER,
    PEERS,
    Operands,
    apart,
    from_exact,
    in_form,
    make,
    ours,
    peers_of,
)
from deep_gemm.benchmarks.grouped_shapes import SHAPES, Grouped, S, Shape, chosen, words_of
from deep_gemm.benchmarks.run import append
from deep_gemm.benchmarks.summary import geometric_mean
from deep_gemm.errors import DeepGemmError
from deep_gemm.kernels.base import Strides
from deep_gemm.layout import get_mk_alignment_for_contiguous_layout
from deep_gemm.operation import Operation
from deep_gemm.ops.grouped_checks import check_expected_m
from deep_gemm.ops.m_grouped import MGroupedBF16, MGroupedFP8
from deep_gemm.params import GemmConfig
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import timing
from deep_gemm.timer import times_of

Row = dict[str, Any]

TOLERANCE = 1e-3
"""The largest difference of a right result, by `calc_diff`."""
BEST = 5
"""Configs of a survey that are printed."""
RATIO, REFUSED = "ratio_", "refused_"
"""Prefixes of the names of a row's fields."""


def measure(shape: Shape) -> Row:
    """Time ours and every peer that can run the shape. Raises DeepGemmError if our result is wrong."""
    x = make(shape)
    mine = ours(x)
    mine()
    check_ours(from_exact(x))
    result = x.gathered(x.d)

    def differs(name: str, found: Tensor | None) -> float:
        return 0.0 if name in EASIER else apart(x, result, x.gathered(x.d) if found is None else found)

    peers = {name: functools.partial(PEERS[name], x) for name in peers_of(shape)}
    calls, refused = comparable(peers, lambda: x.d.fill_(math.nan), differs)  # NaN shows rows that are not written
    return make_row(shape, timing.flush({"ours": mine, **calls}), refused)


def check_ours(difference: float) -> None:
    """Raise DeepGemmError if our result is too far from the exact one."""
    if not difference < TOLERANCE:
        raise DeepGemmError(f"Our result differs from the exact one by {difference:.1e}.")


def comparable(
    peers: Mapping[str, Callable[[], timing.Call]],
    clear: Callable[[], object],
    differs: Callable[[str, Tensor | None], float],
) -> tuple[dict[str, timing.Call], dict[str, str]]:
    """The calls of the peers whose results are ours, and the reasons why others are not timed. ``clear`` prepares the
    output for one call. ``differs`` takes what that call returns."""
    calls, refused = {}, {}
    for name, prepare in peers.items():
        clear()
        try:
            call = prepare()
            found = call()
            torch.cuda.synchronize()
        except Exception as error:  # other libraries may raise anything
            refused[name] = textwrap.shorten(str(error), 160) or type(error).__name__
            continue
        difference = differs(name, found)
        if difference < TOLERANCE:
            calls[name] = call
        else:
            refused[name] = f"its result differs from ours by {difference:.1e}"
    return calls, refused


def said(shape: Grouped) -> Row:
    """A row's fields for its shape; ``m`` is the rows of all groups without padding, or ``k`` the sum of their K."""
    names = ("kind", "form", "groups", "mean", "m", "n", "k")
    return {name: getattr(shape, name) for name in names}


def make_row(shape: Grouped, us: Mapping[str, float], refused: Mapping[str, str]) -> Row:
    """A flat row: `us`, `tflops` and `gbps` are ours, of rows without padding; `ratio_X` is X's time over ours."""
    mine = us["ours"]
    row = {"mode": "grouped", **said(shape), "us": round(mine, 3)}
    row |= {"tflops": round(shape.flops / mine / 1e6, 1), "gbps": round(shape.bytes_moved / mine / 1e3, 1)}
    for name in us:
        if name != "ours":
            row |= {f"us_{name}": round(us[name], 3), f"{RATIO}{name}": round(us[name] / mine, 4)}
    return row | {f"{REFUSED}{name}": reason for name, reason in refused.items()}


def measure_layouts(shape: Shape) -> Row:
    """Time one routing in every form, and say whether the results have the same bits."""
    first = make(shape)
    forms = {"index": first, "psum": in_form(first, "psum"), "masked": in_form(first, "masked")}
    calls = {form: ours(x) for form, x in forms.items()}
    for call in calls.values():
        call()
    result = first.gathered(first.d)
    equal = all(torch.equal(x.gathered(x.d), result) for x in forms.values())  # False too if there is a NaN
    us = timing.flush(calls)
    row = {"mode": "grouped layouts", **said(shape), **{f"us_{form}": round(us[form], 3) for form in forms}}
    return row | {f"ratio_{form}": round(us[form] / us["index"], 4) for form in ("psum", "masked")} | {"equal": equal}


class Launch(NamedTuple):
    """What a call launches last, and the scratch memory that the launches before it have written."""

    spec: GemmSpec
    strides: Strides
    addresses: dict[str, int]
    scratch: dict[str, Tensor]


def launch_of(x: Operands, device: int) -> Launch:
    """The last launch of a call of ours."""
    masked, of_kind = x.form == "masked", MGroupedFP8 if x.shape.kind == "fp8" else MGroupedBF16
    operation = of_kind("masked" if masked else "contiguous")
    size = check_expected_m("expected_m", x.shape.mean) if masked else get_mk_alignment_for_contiguous_layout()
    names = "a", "b", "d", operation.operands["layout"]
    known = dict(zip(names, x.arguments, strict=True)) | {"disable_ue8m0_cast": False, "size": size, "form": "nt"}
    return last_launch(operation, known, device)


def last_launch(operation: Operation, known: Mapping[str, Any], device: int) -> Launch:
    """The GEMM that a call with these arguments launches, by name. Launches before it, which prepare its operands, are
    made here, once."""
    checked = operation.check(*(known.get(name) for name in operation.parameters))
    if checked is None:
        raise ValueError(f"There is nothing to compute by {operation.name}.")
    work = operation.work(checked, device)
    place = checked.tensors["a"].device
    scratch = {name: torch.empty(shape, dtype=dtype, device=place) for name, (shape, dtype) in work.scratch.items()}
    tensors = {**checked.tensors, **scratch}
    *before, last = ((s, {name: tensors[of].data_ptr() for name, of in s.operands.items()}) for s in work.steps)
    for step, at in before:
        engine.launch(engine.plan(step.spec, device), step.strides, at, engine.raw_stream(device))()
    step, at = last
    if not isinstance(step.spec, GemmSpec):
        raise TypeError(f"The last launch of {operation.name} is {step.spec}.")
    return Launch(step.spec, step.strides, at, scratch)


def built(asked: GemmSpec, configs: Iterable[GemmConfig], spec: archs.ArchSpec) -> list[GemmConfig]:
    """The configs whose kernels compile, compiled; the others are named on stderr."""

    def build(config: GemmConfig) -> str:
        try:
            engine.build(engine.kernel_params(asked, config, spec))
        except DeepGemmError as error:
            return str(error) or type(error).__name__
        return ""

    configs = list(configs)
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(build, configs))
    for config, error in zip(configs, errors, strict=True):
        if error:
            click.echo(f"{config} is left out: {textwrap.shorten(error, 300)}", err=True)
    return [config for config, error in zip(configs, errors, strict=True) if not error]


def measure_configs(shape: Shape) -> Row:
    """See `survey_of`."""
    x = make(shape)
    return survey_of(shape, x, launch_of(x, torch.cuda.current_device()))


def survey_of(shape: Grouped, x: object, launch: Launch) -> Row:
    """Time all legal configs: each gets a first look, and the promising ones and the selected one are timed. ``x`` are
    the operands of ``launch``. Only the GEMM is timed, not the launches that prepare its operands."""
    device, asked = torch.cuda.current_device(), launch.spec
    spec, known = archs.for_device(device), engine.calibration_of(device)
    config = select.rank(asked, spec, known)[0].config
    selected = survey.name_of(config, asked, spec)
    by_name = {survey.name_of(each, asked, spec): each for each in (config, *select.legal(asked, spec))}
    configs = built(asked, by_name.values(), spec)
    kept, places = [(x, launch)], [(launch.strides, launch.addresses)]
    timers = dict(survey.timers_at(kept, places, asked, configs, "flush", spec, device))
    times = times_of(survey.promising(timers, selected), selected)
    found = {name: round(us, 3) for name, us in sorted(times.items(), key=lambda item: item[1])}
    return {"mode": "grouped survey", **said(shape), "selected": selected, "legal": len(timers), "times": found}


def name_of(row: Row) -> str:
    """A row's shape as `Grouped` gives it."""
    shared = f"{row['m']}x{row['n']}" if row["form"] == "k" else f"{row['n']}x{row['k']}"
    return f"{row['kind']} {row['form']} {row['groups']}x{row['mean']} {shared}"


def heading(peers: Iterable[str] = tuple(PEERS)) -> str:
    """What `line` gives, in words."""
    return f"{'':34}{'us':>10}{'TFLOP/s':>9}{'GB/s':>7}" + "".join(f"{name:>16}" for name in peers)


def line(row: Row, peers: Iterable[str] = tuple(PEERS)) -> str:
    """A row of `make_row` for a person; a peer's column is its time over ours."""
    ratios = (f"{row[key]:16.3f}" if (key := f"{RATIO}{name}") in row else f"{'-':>16}" for name in peers)
    return f"{name_of(row):34}{row['us']:10.1f}{row['tflops']:9.1f}{row['gbps']:7.0f}{''.join(ratios)}"


def layouts_line(row: Row) -> str:
    """A row of `measure_layouts` for a person."""
    times = ", ".join(f"{form} {row[f'us_{form}']:.1f} us" for form in ("index", "psum", "masked"))
    ratios = f"psum / index {row['ratio_psum']:.3f}, masked / index {row['ratio_masked']:.3f}"
    return f"{name_of(row):34} {times}; {ratios}; {'the same bits' if row['equal'] else 'THE BITS DIFFER'}"


def configs_lines(row: Row) -> str:
    """A row of `measure_configs` for a person: the best configs, and the selected one."""
    times, selected = row["times"], row["selected"]
    head = f"{name_of(row):34} {len(times)} of {row['legal']} configs, selected / best {survey.quality(row):.3f}"
    ranked = sorted(times, key=times.__getitem__)
    shown = ranked[:BEST] + [name for name in ranked[BEST:] if name == selected]
    return "\n".join([head, *(f"{times[n]:12.1f} us  {n}{'  (selected)' if n == selected else ''}" for n in shown)])


def means(rows: Sequence[Row]) -> list[str]:
    """For each kind, form and routing, the geometric mean over all sizes of each peer's time over ours."""
    found = []
    for group in dict.fromkeys(name_of(row).rpartition(" ")[0] for row in rows):
        of = {size: row for row in rows for name, _, size in [name_of(row).rpartition(" ")] if name == group}
        for key in dict.fromkeys(key for row in of.values() for key in row if key.startswith(RATIO)):
            name, ratios = key.removeprefix(RATIO), {size: row[key] for size, row in of.items() if key in row}
            worst = min(ratios, key=ratios.__getitem__)
            note = ", an easier problem" if name in EASIER else ""
            mean = f"{geometric_mean(ratios.values()):.3f} over {len(ratios)}, least {ratios[worst]:.3f} at {worst}"
            found.append(f"{group}: {name} / ours {mean}{note}")
    return found


def refusals(rows: Sequence[Row]) -> list[str]:
    """Why peers were not timed, each reason once."""
    found = ((key, reason) for row in rows for key, reason in row.items() if key.startswith(REFUSED))
    return [f"{key.removeprefix(REFUSED)} was not timed: {reason}" for key, reason in dict.fromkeys(found)]


@dataclass
class Session:
    """Options of all measurements of a run. ``seconds`` bounds the whole run: no new measurement begins after it."""

    seconds: float = math.inf
    output: Path | None = None
    common: Row = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def rows(self, shapes: Sequence[S], measure: Callable[[S], Row]) -> Iterator[Row]:
        """The row of each shape, once it is on disk. A shape that fails is noted, and the others are measured."""
        for index, shape in enumerate(shapes):
            if time.monotonic() - self.start > self.seconds:
                self.left_out += map(str, shapes[index:])
                return
            try:
                row = measure(shape) | self.common
            except Exception as error:
                self.failed.append(f"{shape} failed: {type(error).__name__}: {textwrap.shorten(str(error), 600)}")
                click.echo(self.failed[-1], err=True)
                continue
            finally:
                torch.cuda.empty_cache()
            if self.output is not None:
                append(self.output, row)
            yield row

    def table(self, shapes: Sequence[S], measure: Callable[[S], Row], peers: Sequence[str] = tuple(PEERS)) -> None:
        """Measure and print a line for each shape, then means."""
        click.echo(heading(peers))
        rows = []
        for row in self.rows(shapes, measure):
            click.echo(line(row, peers))
            rows.append(row)
        click.echo("\n".join(["", *means(rows), *refusals(rows)]))

    def lines(self, shapes: Sequence[S], measure: Callable[[S], Row], shown: Callable[[Row], str]) -> None:
        """Measure and print each shape."""
        for row in self.rows(shapes, measure):
            click.echo(shown(row))

    def end(self) -> None:
        """Say what was not measured. Exits with 1 if a shape failed."""
        if self.left_out:
            click.echo(f"The time ran out before {len(self.left_out)} measurements: {'; '.join(self.left_out)}.")
        if self.failed:
            click.echo("\n".join(["", *self.failed]), err=True)
            sys.exit(1)


def begin(output: Path | None, directory: Path | None, seconds: float) -> Session:
    """A session with DeepGEMM of ``directory``, if there is one. Raises ClickException without a GPU."""
    if not torch.cuda.is_available():
        raise click.ClickException("Timing needs a GPU, and torch sees none here.")
    try:
        if directory is not None:
            theirs.use(theirs.load(directory))
        version = {} if theirs.why_absent() else {"deepgemm": theirs.use(theirs.library())}
    except DeepGemmError as error:
        raise click.ClickException(str(error)) from None
    return Session(seconds, output, provenance.environment() | version)


def arguments(words: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of all benchmarks of grouped GEMMs. ``words`` are those of `--only`."""
    options = (
        click.option("--output", type=click.Path(path_type=Path), help="Append each row to this file once measured."),
        click.option("--deepgemm", "directory", type=click.Path(path_type=Path), help="Also time DeepGEMM from here."),
        click.option("--only", multiple=True, type=click.Choice(words), metavar="WORD", help=f"Of {', '.join(words)}."),
        click.option("--seconds", type=float, default=math.inf, help="Begin no new measurement after this long."),
        click.option("--survey", "configs", is_flag=True, help="Time every legal config instead."),
    )
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


@click.command()
@arguments(words_of(SHAPES))
@click.option("--layouts", is_flag=True, help="Time index, psum and masked form of one routing instead.")
def main(
    output: Path | None, directory: Path | None, only: tuple[str, ...], seconds: float, layouts: bool, configs: bool
) -> None:
    """Time GEMMs grouped by M beside torch's grouped GEMMs and DeepGEMM, in single calls with a cold L2."""
    shapes = chosen(only, SHAPES)
    if layouts:
        shapes = [shape for shape in shapes if shape.form == "contiguous"]
    if not shapes:
        raise click.ClickException("No shape is in all that --only names. --layouts needs contiguous shapes.")
    session = begin(output, directory, seconds)
    if layouts:
        session.lines(shapes, measure_layouts, layouts_line)
    if configs:
        session.lines(shapes, measure_configs, configs_lines)
    if not layouts and not configs:
        session.table(shapes, measure)
    session.end()


if __name__ == "__main__":
    main()
