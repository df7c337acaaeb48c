"""How fast the casts of `deep_gemm.quantize` are, beside copying as many bytes and beside a kernel that does nothing.

    python benchmarks/casts.py --output FILE

times each cast in CUDA graphs on one GPU: of a large matrix and of gathered rows, whose share of the copy rate counts,
and of 1, 16 and 64 rows, whose time beside an empty kernel's counts. Gathered rows are timed beside a copy of them by
torch and a cast of the copy, too. A row for each goes to FILE, and a line to the terminal.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from deep_gemm import quantize
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

LARGE, FEW = (8192, 7168), (1, 16, 64)
TOKENS, EXPERTS = 4096, 8
"""Gathered rows: each token goes to so many experts."""
SETS = 4
"""Matrices that a graph goes through in turns: together they are larger than L2."""

CASTS: dict[str, Callable[..., Any]] = {
    "rows": quantize.rows,
    "columns": quantize.columns,
    "blocks": quantize.blocks,
    "blocks transposed": quantize.blocks_transposed,
    "rows and columns": quantize.rows_and_columns,
    "blocks and transpose": quantize.blocks_and_transpose,
    "rows and blocks transposed": quantize.rows_and_blocks_transposed,
}


def tensors(x: Any) -> list[Tensor]:
    """All tensors of a nest of tuples."""
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in tensors(part)]


def moved(x: Tensor, out: Any) -> int:
    """Bytes that a cast reads and writes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (x, *tensors(out)))


def prepared(cast: Callable[..., Any], size: tuple[int, int], sets: int) -> tuple[list[timing.Call], int]:
    """Calls of a cast on matrices of their own, and the bytes that each moves."""
    calls: list[timing.Call] = []
    count = 0
    for seed in range(sets):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(*size, device="cuda", generator=generator).bfloat16()
        out = cast(x)
        count = moved(x, out)
        calls.append(functools.partial(cast, x, out=out))
    return calls, count


def copies(count: int) -> list[timing.Call]:
    """Calls that copy: half of the bytes are read, half are written."""
    pairs = [torch.empty(2, count // 2, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
    return [functools.partial(pair[0].copy_, pair[1]) for pair in pairs]


def gathered() -> dict[str, Any]:
    """A row for the cast of tokens in the order of their experts."""
    m, k = TOKENS * EXPERTS, LARGE[1]
    generator = torch.Generator("cuda").manual_seed(0)
    order = torch.randperm(m, device="cuda", generator=generator) % TOKENS
    index = order.int()
    xs = [torch.randn(TOKENS, k, device="cuda", generator=generator).bfloat16() for _ in range(SETS)]
    out, copied = quantize.rows(xs[0], rows=index), torch.empty(m, k, device="cuda", dtype=torch.bfloat16)

    def two_steps(x: Tensor) -> None:
        torch.index_select(x, 0, order, out=copied)
        quantize.rows(copied, out=out)

    count = moved(xs[0], out)
    calls: dict[str, list[timing.Call]] = {
        "cast": [functools.partial(quantize.rows, x, out=out, rows=index) for x in xs],
        "two steps": [functools.partial(two_steps, x) for x in xs],
        "copy": copies(count),
    }
    us = timing.graph(calls, calls_in_graph=16)
    times = {"us": us["cast"], "copy_us": us["copy"], "index_select_and_cast_us": us["two steps"]}
    return {"cast": "gathered rows", "m": m, "k": k, "bytes": count, **times}


def measure() -> list[dict[str, Any]]:
    """A row for each cast and size."""
    found: list[dict[str, Any]] = []
    m, k = LARGE
    for name, cast in CASTS.items():
        calls, count = prepared(cast, LARGE, SETS)
        us = timing.graph({"cast": calls, "copy": copies(count)})
        found.append({"cast": name, "m": m, "k": k, "bytes": count, "us": us["cast"], "copy_us": us["copy"]})
    found.append(gathered())
    nothing = torch.zeros(1, device="cuda")
    for m in FEW:
        calls, _ = prepared(quantize.rows, (m, LARGE[1]), SETS)
        us = timing.graph({"cast": calls, "empty": [lambda: nothing.add_(1)] * SETS})
        found.append({"cast": "rows", "m": m, "k": LARGE[1], "us": us["cast"], "empty_us": us["empty"]})
    return found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
def main(output: Path | None) -> None:
    """Time the casts of deep_gemm.quantize."""
    origin = provenance.environment()
    for row in measure():
        beside = row.get("copy_us", row.get("empty_us"))
        kind = "of the copy rate" if "copy_us" in row else "x an elementwise kernel of one element"
        share = beside / row["us"] if "copy_us" in row else row["us"] / beside
        steps = row.get("index_select_and_cast_us")
        more = f"; {steps:.2f} us as index_select and a cast" if steps else ""
        click.echo(f"{row['cast']:26} {row['m']:5} x {row['k']}  {row['us']:8.2f} us  {share:.3f} {kind}{more}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({"mode": "casts", **row, **origin}) + "\n")


if __name__ == "__main__":
    main()
