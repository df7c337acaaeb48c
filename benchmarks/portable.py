"""How fast kernels with mma.sync are on a Hopper GPU, where none is chosen, beside ours with wgmma and cuBLASLt.

    python benchmarks/portable.py --output FILE [--seed 73]

For each of the parts below, N and K are drawn, and products are timed in CUDA graphs that walk over copies of the
weights, or in single calls with a cold L2 ("flush"). Of the family, the tiles that the model ranks first are timed. A
row for each shape goes to FILE: the time of the peer, and that of each tile, the chosen one first. The table printed
last has the least ratio and the mean of each part, for the chosen tile and for the best one.

FP8 is widened in registers: with up to 16 rows by the instruction of compute capability 8.9 and later, with more by
others, as for 8.0 and 8.6.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

from deep_gemm import arch, kernels, options, select
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, provenance, survey
from deep_gemm.bench.shapes import posed
from deep_gemm.jit.builder import default_builder
from deep_gemm.kernels.portable import PORTABLE
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine
from deep_gemm.runtime.timer import FLUSH_BYTES, Single
from deep_gemm.spec import GemmSpec

ROUNDS, MOST_TILES = 3, 8
SM90 = arch.SM90
HOPPER = dict(kernels.gemms())
NAMES = {each.name for each in PORTABLE}
BOTH = {**HOPPER, **{each.name: replace(each, archs=(*each.archs, SM90.name)) for each in PORTABLE}}
"""The families that calls choose among, and all."""


@dataclass(frozen=True)
class Part:
    """Products of ``op`` with each of ``rows``, in a mode of `survey`, beside ``peer``."""

    title: str
    op: str
    rows: tuple[int, ...]
    mode: str
    peer: str


PARTS = (
    Part("BF16, 4096 rows, of cuBLASLt", "bf16_gemm_nt", (4096,), "flush", "cublaslt"),
    Part("BF16, up to 16 rows, of wgmma", "bf16_gemm_nt", (1, 5, 16), "graph", "ours"),
    Part("FP8, up to 16 rows, of wgmma", "fp8_gemm_nt", (1, 5, 16), "graph", "ours"),
    Part("BF16, 64 rows, of wgmma", "bf16_gemm_nt", (64,), "graph", "ours"),
    Part("BF16, 128 rows, of cuBLASLt", "bf16_gemm_nt", (128,), "flush", "cublaslt"),
)


def drawn(seed: int, count: int) -> list[tuple[int, int]]:
    """N and K, log-uniform, in steps of 64 and of 128, of at most 64 Mi weights."""
    dice, found = random.Random(seed), list[tuple[int, int]]()
    while len(found) < count:
        n, k = (int(2 ** dice.uniform(9, 14)) // step * step for step in (64, 128))
        if 2**20 < n * k < 2**26:
            found.append((n, k))
    return found


def families(known: dict[str, Any]) -> Any:
    return mock.patch.object(kernels, "gemms", return_value=known)


@dataclass
class Job:
    part: Part
    shape: GemmShape
    spec: GemmSpec
    wgmma: GemmConfig
    tiles: list[GemmConfig]

    def names(self) -> list[str]:
        return [survey.name_of(config, self.spec, SM90) for config in self.tiles]

    def times(self) -> dict[str, float]:
        """Medians in us by tile, of "ours" and of cuBLASLt."""
        with families(HOPPER):
            for x in backends.make_operands(self.shape, 1):
                backends.ours(x)()
        timers, names = {}, set(self.names())
        with families(BOTH):
            every = survey.timers_of(self.shape, self.spec, [*self.tiles, self.wgmma], self.part.mode, SM90, 0)
            for name, timer in every:
                timers[name if name in names else "ours"] = timer
        if self.part.peer == "cublaslt":
            operands = backends.make_operands(self.shape, 1)
            scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
            timers["cublaslt"] = Single(backends.cublaslt(operands[0]), scratch, operands)
        samples: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(ROUNDS):
            for name, timer in timers.items():
                samples[name].append(timer())
        return {name: statistics.median(each) for name, each in samples.items()}


def jobs(seed: int, count: int) -> Iterator[Job]:
    sms, known = options.num_sms_for(0), engine.calibration_of(0)
    for part in PARTS:
        for m, (n, k) in ((m, size) for m in part.rows for size in drawn(seed, count)):
            (shape,) = posed([GemmShape(m, n, k)], part.op)
            spec = backends.spec_of(shape, sms)
            with families(HOPPER):
                wgmma = select.rank(spec, SM90, known)[0].config
            with families(BOTH):
                found = [config for config in select.candidates(spec, SM90) if config.family in NAMES]
                tiles = [choice.config for choice in select.order(spec, found, known)][:MOST_TILES]
            yield Job(part, shape, spec, wgmma, tiles)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--seed", default=73, help="The seed of the draw.")
@click.option("--count", default=5, help="Sizes that are drawn.")
def main(output: Path | None, seed: int, count: int) -> None:
    """Time kernels with mma.sync on Hopper."""
    found, builder, origin = list(jobs(seed, count)), default_builder(), provenance.environment()
    with families(BOTH), ThreadPoolExecutor() as pool:
        wanted = {engine.kernel_params(job.spec, tile, SM90) for job in found for tile in (*job.tiles, job.wgmma)}
        list(pool.map(lambda params: builder.build(engine.build_request(params)), wanted))
    ratios: dict[Part, list[tuple[float, float]]] = {}
    for job in found:
        us, names = job.times(), job.names()
        peer, best = us[job.part.peer], min(names, key=us.__getitem__)
        ratios.setdefault(job.part, []).append((peer / us[names[0]], peer / us[best]))
        click.echo(f"{job.shape}: {job.part.peer} {peer:.1f} us, {names[0]} {us[names[0]]:.1f}, {best} {us[best]:.1f}")
        if output is not None:
            row = {"op": job.part.op, "mode": job.part.mode, "m": job.shape.m, "n": job.shape.n, "k": job.shape.k}
            with output.open("a") as file:
                file.write(json.dumps(row | {"us": us, "selected": names[0], "run": seed} | origin) + "\n")
    for part, each in ratios.items():
        for way, values in zip(("chosen", "best"), zip(*each, strict=True), strict=True):
            mean = statistics.geometric_mean(values)
            click.echo(f"{part.title}: {way} tile at least {min(values):.2f}, on average {mean:.2f}")


if __name__ == "__main__":
    main()
