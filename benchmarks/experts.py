"""How fast products of experts are beside DeepGEMM's, for sets of groups that are drawn.

    python benchmarks/experts.py --count 12 --seed 1 --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) on one GPU, FP8 and BF16: the contiguous form, and the masked one if
no group has more than 512 rows. A row for each set, form and dtype goes to FILE, and the mean and the least ratio of
each form and dtype to the terminal. The number of groups (8 to 128) and the mean rows of a group (30 to 900) are
log-uniform. N x K are of experts of public models. Rows are shared out in three ways in turn: as a router does it
(log-normal), with one expert that gets a quarter of all rows, and with a quarter of the experts empty.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm.backends.deepgemm import load, prepare, use
from deep_gemm.backends.grouped_operations import GROUPINGS, MGroupedOperation
from deep_gemm.bench import provenance
from deep_gemm.bench.summary import geometric_mean
from deep_gemm.spec import Grouping
from deep_gemm.testing import timing

Call = Callable[[], Any]

GATES_AND_UPS = ((4096, 7168), (3072, 4096), (1536, 2048), (2816, 4096))
DOWNS = ((7168, 2048), (4096, 1536), (2048, 768), (4096, 1408))
"""N x K of experts of DeepSeek-V3, Qwen3-235B, Qwen3-30B and GLM-4.5."""
ROUTINGS = ("router", "one hot expert", "a quarter empty")
MOST = 60_000
"""Rows of a call; a set with more is drawn again."""
MOST_MASKED = 512
"""Rows of a group up to which the masked form is timed. It is for decoding."""


def draw(count: int, seed: int) -> list[tuple[str, list[int], int, int]]:
    """``count`` sets: the routing, the rows of each group, N and K. The same for one seed."""
    rng, sets = random.Random(seed), []
    while len(sets) < count:
        routing = ROUTINGS[len(sets) % len(ROUTINGS)]
        groups = round(math.exp(rng.uniform(math.log(8), math.log(128))))
        rows = groups * math.exp(rng.uniform(math.log(30), math.log(900)))
        n, k = rng.choice(GATES_AND_UPS + DOWNS)
        shares = [rng.lognormvariate(0, 0.5) for _ in range(groups)]
        if routing == "one hot expert":
            shares[rng.randrange(groups)] = sum(shares) / 3
        elif routing == "a quarter empty":
            for group in rng.sample(range(groups), groups // 4):
                shares[group] = 0.0
        sizes = [round(rows * share / sum(shares)) for share in shares]
        if sum(sizes) <= MOST:
            sets.append((routing, sizes, n, k))
    return sets


class Drawn(MGroupedOperation):
    """A product whose groups have the given rows."""

    def __init__(self, dtype: str, grouping: Grouping, sizes: list[int]) -> None:
        super().__init__(dtype, grouping)
        self.sizes = sizes

    def counts(self, dims: tuple[int, ...]) -> list[int]:
        return self.sizes


def products(count: int, seed: int) -> Iterator[tuple[str, Drawn, tuple[int, ...]]]:
    """The routing, the product and its sizes."""
    for routing, sizes, n, k in draw(count, seed):
        dims = (len(sizes), sum(sizes) // len(sizes), n, k)
        forms = GROUPINGS if max(sizes) <= MOST_MASKED else GROUPINGS[:1]
        for grouping, dtype in itertools.product(forms, ("fp8", "bf16")):
            yield routing, Drawn(dtype, grouping, sizes), dims


def calls_of(product: Drawn, operands: tuple[Any, ...], peer: Any) -> dict[str, Call]:
    """Ours, and the peer's, which has old names of the masked form."""
    calls: dict[str, Call] = {"us": functools.partial(getattr(deep_gemm, product.name), *operands)}
    return calls | ({"us_deepgemm": prepare(product.name, *operands)} if peer is not None else {})


@click.command()
@click.option("--count", default=12, help="How many sets are drawn.")
@click.option("--seed", default=1, help="The seed of the draw.")
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
def main(count: int, seed: int, output: Path | None, deepgemm: Path | None) -> None:
    """Time products of experts."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment() | ({"deepgemm": use(peer)} if peer is not None else {})
    ratios: dict[str, list[float]] = {}
    for routing, product, dims in products(count, seed):
        sizes, (_, _, n, k) = product.sizes, dims
        calls = calls_of(product, product.make(dims, torch.device("cuda")), peer)
        row = {"mode": "experts", "op": product.name, "routing": routing, "groups": len(sizes), "m": sum(sizes)}
        row |= {"n": n, "k": k, "source": f"experts, seed {seed}"} | timing.flush(calls)
        row["tflops"] = round(product.flops(dims) / row["us"] / 1e6, 1)
        if peer is not None:
            row["ratio_deepgemm"] = round(row["us_deepgemm"] / row["us"], 4)
            ratios.setdefault(product.name, []).append(row["ratio_deepgemm"])
        click.echo(f"{product.name} {routing}: {dims} {row['us']:.1f} us, {row.get('ratio_deepgemm', '')}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps(row | origin) + "\n")
    for name, found in ratios.items():
        click.echo(f"{name}: {len(found)} sets, mean {geometric_mean(found):.3f}, least {min(found):.3f}")


if __name__ == "__main__":
    main()
