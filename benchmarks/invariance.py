"""What `set_batch_invariant` costs: times with the switch over times without.

    python benchmarks/invariance.py --output FILE

times dense products of FP8 and BF16, and the prenorm product, on one GPU: single calls with a cold L2 (`timing.flush`),
and dense products in CUDA graphs with weights of their own too. Logits and grouped products take no notice of the
switch. A row for each size and mode goes to FILE, and a line for each matrix to the terminal.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096)
MATRICES = ((576, 7168), (1536, 7168), (2112, 7168), (7168, 2048), (4096, 7168))
"""N x K."""
PRENORM = tuple(itertools.product((1, 16, 64, 137, 512, 2048), (7168, 28672)))
"""M and K."""


def switched(call: Callable[[], Any], enabled: bool) -> None:
    """A call in one position of the switch."""
    deep_gemm.set_batch_invariant(enabled)
    call()
    deep_gemm.set_batch_invariant(False)


def ratio(us: dict[str, float]) -> dict[str, float]:
    """The fields of a row."""
    return {"us": us["off"], "us_invariant": us["on"], "ratio": us["on"] / us["off"]}


def positions(call: Callable[[], Any]) -> dict[str, Callable[[], None]]:
    """The call in both positions."""
    return {name: functools.partial(switched, call, name == "on") for name in ("off", "on")}


def dense(dtype: str, n: int, k: int) -> Iterator[dict[str, Any]]:
    """Products with one matrix."""
    sets = max(2, -(-timing.GRAPH_WEIGHT_BYTES // (n * k * (1 if dtype == "fp8" else 2))))
    weights = torch.randn(n, k, device="cuda").bfloat16()
    one = deep_gemm.per_block_cast_to_fp8(weights, False) if dtype == "fp8" else (weights,)
    copies = [tuple(x.clone() for x in one) for _ in range(sets)]
    for x in itertools.chain(*copies):
        deep_gemm.declare_constant(x)
    for m in ROWS:
        a: Any = torch.randn(m, k, device="cuda").bfloat16()
        d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        if dtype == "fp8":
            values, scales = deep_gemm.per_token_cast_to_fp8(a, False)
            a = values, deep_gemm.get_mn_major_tma_aligned_tensor(scales)
        product = deep_gemm.fp8_gemm_nt if dtype == "fp8" else deep_gemm.bf16_gemm_nt
        calls = [functools.partial(product, a, b if dtype == "fp8" else b[0], d) for b in copies]
        single = positions(calls[0])
        row = {"op": f"{dtype}_gemm_nt", "m": m, "n": n, "k": k}
        yield {"mode": "flush", **row} | ratio(timing.flush(single))
        graphs = {name: [positions(call)[name] for call in calls] for name in single}
        yield {"mode": "graph", **row} | ratio(timing.graph(graphs))


def prenorm(m: int, k: int) -> dict[str, Any]:
    """The product before a norm."""
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(24, k, device="cuda")
    d, squares = torch.empty(m, 24, device="cuda"), torch.empty(m, device="cuda")
    calls = positions(lambda: deep_gemm.tf32_hc_prenorm_gemm(a, b, d, squares))
    return {"mode": "flush", "op": "tf32_hc_prenorm_gemm", "m": m, "n": 24, "k": k} | ratio(timing.flush(calls))


def measure() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A title and the rows of each matrix, and of prenorm."""
    for dtype, (n, k) in itertools.product(("fp8", "bf16"), MATRICES):
        yield f"{dtype} {n} x {k}", list(dense(dtype, n, k))
    yield "prenorm", [prenorm(m, k) for m, k in PRENORM]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
def main(output: Path | None) -> None:
    """Time both positions of the switch."""
    origin = provenance.environment()
    for title, rows in measure():
        click.echo(f"{title:18} " + ", ".join(f"{row['m']} {row['mode']} {row['ratio']:.3f}" for row in rows))
        if output is not None:
            with output.open("a") as file:
                file.writelines(json.dumps({**row, **origin}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
