"""Kernels of every kind on small operands, to be run under a checker of memory accesses:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --racecheck

Needs a GPU. The API errors are those of cuda-bindings, which asks the driver for functions that it lacks. Kernels are a
cover: each tile, cluster, way to share K and so on of each family is in one of them (see `cover.py`), and all that deal
out blocks of K among their cases. `--every 1` takes every config of every family, and a larger number one in so many.
Each runs twice, alone, and then as a programmatic launch with weights promised constant right behind itself.

racecheck takes an arrival at an mbarrier for the arriving thread's alone, also where that thread has met others at a
barrier before and arrives for them, as in the ring of stages and where consumers exchange sums. `--racecheck` compiles
headers in which lanes arrive for themselves, but where a cluster fills its rings together, so that it sees all but
whether threads meet before one arrives for them. It still leaves out those where sums from another CTA go through a
ring of fewer stages than they have steps, of which it reported the reads of exactly 31 lanes of 32 before. What it
reports by now: benchmarks/README.md. `--name` runs some alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cover import FAMILIES, cover, everything, features
from forced import compiled, force, load, nvrtc
from headers import edit, edited_headers

from deep_gemm import kernels
from deep_gemm.jit import Builder
from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels import sm90_fp8_swapped
from deep_gemm.params import SCALE_BLOCK, FP8Config, KernelParams, SwappedConfig, ceil_div
from deep_gemm.reference import exact_product
from deep_gemm.testing import calc_diff, random_operands

DEALT_SMS = 4, 20
"""Where blocks of K are dealt out: so few that a CTA does whole tiles too, and so many that a tile is in three or more
CTAs. Elsewhere two clusters run."""


def chosen(every: int, racecheck: bool) -> list[KernelParams]:
    """A cover and the cases that deal out blocks of K, or with ``every`` one in so many of everything; for racecheck of
    those alone that it understands."""
    known = [p for p in everything() if not (racecheck and _wraps(_config(p)))]
    if every:
        return known[::every]
    dealt = {p for kernel in FAMILIES for p in kernel.cases() if not any(p.shape) and _config(p).stream_k}
    return cover(known, features, first=[p for p in known if p in dealt])


def named(found: list[KernelParams], part: str) -> list[KernelParams]:
    """Those with ``part`` in their kernels' names."""
    return [params for params in found if part in kernels.get(params.kernel).entry(params)]


def sizes(config: FP8Config) -> tuple[int, int, int, tuple[int, ...]]:
    """M, N, K, and numbers of SMs to run on, so few that a CTA that stays does several tiles. Where scales have a ring
    of their own, K goes round it twice; tokens past the slices are in some tiles of each CTA, and some are missing."""
    m, n, k = config.block_m + 70, 2 * config.block_n + 40, 896
    if config.extra_tokens:
        return 2 * config.block_m - 3, n, k, (2,)
    if config.stream_k:
        return m, 4 * config.block_n + 40, k, DEALT_SMS
    if isinstance(config, SwappedConfig):
        m = min(config.block_m, 150)
        if not sm90_fp8_swapped.scales_held(config):
            k = 2 * (config.num_stages + config.consumers_k) * config.cluster_k * SCALE_BLOCK
    return m, n, k, (ceil_div(2 * config.cluster_size, config.ctas_per_sm),)


def lane_by_lane(folder: Path) -> Path:
    """The device headers in ``folder``, in which each lane arrives for itself at a CTA's own ring, and where sums are
    exchanged."""
    edited_headers(
        folder,
        "reduction.cuh",
        ("kLocal ? (kShares - 1) * 4 : 1);", "kLocal ? (kShares - 1) * 128 : 1);"),
        ("if (thread % 32 == 0) barrier_arrive(barrier);", "barrier_arrive(barrier);"),
        ("to > 0 ? to : 1);", "(to > 0 ? to : 1) * 128);"),
        (
            "if (thread < kShares && thread != share) {",
            "for (u32 other = 0; other < kShares; ++other) {\n          if (other == share) continue;",
        ),
        ("empty(group * kConsumersK + thread % kConsumersK)", "empty(group * kConsumersK + other % kConsumersK)"),
        ("remote_address(sender, thread / kConsumersK)", "remote_address(sender, other / kConsumersK)"),
    )
    edit(
        folder / "pipeline.cuh",
        ("kConsumerWarps * kClusterSize);", "kConsumerWarps * (kClusterSize == 1 ? 32 : +kClusterSize));"),
        ("if (lane == 0) barrier_arrive(empty(stage));", "barrier_arrive(empty(stage));"),
    )
    return folder


def _wraps(config: FP8Config) -> bool:
    return config.stream_k and config.block_n // 32 > config.num_stages


def _config(params: KernelParams) -> FP8Config:
    assert isinstance(params.config, FP8Config)
    return params.config


@click.command()
@click.option("--every", default=0, help="One in so many of all kernels, in place of a cover.")
@click.option("--racecheck", is_flag=True)
@click.option("--name", default="", help="Of these, those with this in their names alone.")
def main(every: int, racecheck: bool, name: str) -> None:
    """Run them, and compare results while at it."""
    place = Path(tempfile.mkdtemp())
    builder = Builder(place / "cache", nvrtc(), lane_by_lane(place / "include") if racecheck else include_dir())
    with compiled((params, builder, params) for params in named(chosen(every, racecheck), name)) as binaries:
        functions = {params: load(params, binary.result()) for params, binary in binaries.items()}
    stream, wrong = torch.cuda.current_stream().cuda_stream, 0
    for params, function in functions.items():
        m, n, k, parts = sizes(_config(params))
        a, b, _, _ = random_operands(m, n, k, "cuda")
        exact = exact_product(*a, *b)
        for num_sms in parts:
            d, early = (torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            runs = [
                force(params, function, a, b, d, num_sms, stream),
                force(params, function, a, b, early, num_sms, stream, pdl=True, constant_b=True),
            ]
            for run in runs:
                run()
            torch.cuda.synchronize()
            if not float(calc_diff(d, exact)) < 1e-5 or not torch.equal(d, early):
                wrong += 1
                print(f"wrong on {num_sms} SMs: {params}")
    left_out = sum(_wraps(_config(p)) for p in everything()) if racecheck else 0
    print(f"{len(functions)} kernels, {wrong} wrong" + f"; {left_out} are not for racecheck" * bool(left_out))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
