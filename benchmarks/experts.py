"""How fast products of experts are beside DeepGEMM's, for sets of groups that are drawn.

    python benchmarks/experts.py --count 12 --seed 1 --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) of the contiguous form, FP8 and BF16, on one GPU. A row for each set
and dtype goes to FILE. The number of groups (8 to 128) and the mean rows of a group (30 to 900) are log-uniform. N x K
are of experts of public models. Rows are shared out in three ways in turn: as a router does it (log-normal), with one
expert that gets a quarter of all rows, and with a quarter of the experts empty.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import click
import torch

import deep_gemm
from deep_gemm.backends.deepgemm import load, use
from deep_gemm.backends.grouped_operations import MGroupedOperation
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

GATES_AND_UPS = ((4096, 7168), (3072, 4096), (1536, 2048), (2816, 4096))
DOWNS = ((7168, 2048), (4096, 1536), (2048, 768), (4096, 1408))
"""N x K of experts of DeepSeek-V3, Qwen3-235B, Qwen3-30B and GLM-4.5."""
ROUTINGS = ("router", "one hot expert", "a quarter empty")
MOST = 60_000
"""Rows of a call; a set with more is drawn again."""


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
    """A contiguous product whose groups have the given rows."""

    def __init__(self, dtype: str, sizes: list[int]) -> None:
        super().__init__(dtype, "contiguous")
        self.sizes = sizes

    def counts(self, dims: tuple[int, ...]) -> list[int]:
        return self.sizes


@click.command()
@click.option("--count", default=12, help="How many sets are drawn.")
@click.option("--seed", default=1, help="The seed of the draw.")
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
def main(count: int, seed: int, output: Path | None, deepgemm: Path | None) -> None:
    """Time products of experts."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment() | ({"deepgemm": use(peer)} if peer is not None else {})
    for routing, sizes, n, k in draw(count, seed):
        dims = (len(sizes), sum(sizes) // len(sizes), n, k)
        for dtype in ("fp8", "bf16"):
            product = Drawn(dtype, sizes)
            operands = product.make(dims, torch.device("cuda"))
            ours = getattr(deep_gemm, product.name)
            calls = {"us": lambda ours=ours, operands=operands: ours(*operands)}
            if peer is not None:
                theirs = getattr(peer, product.name)
                calls["us_deepgemm"] = lambda theirs=theirs, operands=operands: theirs(*operands)
            row = {"mode": "experts", "op": product.name, "routing": routing, "groups": len(sizes), "m": sum(sizes)}
            row |= {"n": n, "k": k, "source": f"experts, seed {seed}"} | timing.flush(calls)
            row["tflops"] = round(product.flops(dims) / row["us"] / 1e6, 1)
            if peer is not None:
                row["ratio_deepgemm"] = round(row["us_deepgemm"] / row["us"], 4)
            click.echo(f"{product.name} {routing}: {dims} {row['us']:.1f} us, {row.get('ratio_deepgemm', '')}")
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps(row | origin) + "\n")


if __name__ == "__main__":
    main()
