"""How fast batches of products are, beside DeepGEMM's, and beside torch's, that is cuBLAS.

    python benchmarks/batched.py --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) on one GPU, and small ones in CUDA graphs too. Weights are
declared constant. A row for each size goes to FILE, and a line to the terminal.

FP8 has no peer in cuBLAS: none of its batches takes such scales. `torch` multiplies bfloat16 operands of twice the
bytes, and `scaled_mm` FP8 operands with one scale each, in one call for each head.
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
from deep_gemm.backends.deepgemm import load
from deep_gemm.bench import provenance
from deep_gemm.ops.batched import BHD, BHR, SUM
from deep_gemm.testing import timing

EACH = (BHR, BHD)
ROWS, FEW, FEW_PRODUCTS = (1, 64, 4096), 64, 400
HEADS = ((8, 4096, 1024), (16, 4096, 1024), (128, 512, 128))
"""h, r and d: of DeepSeek-V4's output projection, and of MLA's absorbed products."""


def drawn(count: int, seed: int = 1) -> tuple[tuple[int, ...], ...]:
    """Batches of 64 to 2,000, and M, N and K in steps of 64 up to 512."""
    rng = random.Random(seed)
    steps = (*range(64, 513, 64),)
    return tuple(
        (round(math.exp(rng.uniform(math.log(64), math.log(2000)))), *rng.choices(steps, k=3)) for _ in range(count)
    )


SUMS = tuple((b, *size) for b in (129, 4096, 8192) for size in ((128, 384, 128), (256, 256, 256), (384, 128, 384)))
SUMS += drawn(12)

Calls = dict[str, Callable[[], Any]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def each_head(form: str, rows: int, h: int, r: int, d: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """A product for each head. torch writes them where we do, and, easier, one head after the other."""
    k, n = (r, d) if form == BHR else (d, r)
    a, b, out = normal(rows, h, k), normal(h, d, r), normal(rows, h, n)
    deep_gemm.declare_constant(b)
    theirs, others = torch.empty_like(out).transpose(0, 1), normal(h, rows, n)
    weights = b.transpose(1, 2) if form == BHR else b
    calls: Calls = {
        "us": lambda: deep_gemm.einsum(form, a, b, out),
        "torch_us": lambda: torch.bmm(a.transpose(0, 1), weights, out=theirs),
        "torch_contiguous_us": lambda: torch.bmm(a.transpose(0, 1), weights, out=others),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.einsum(form, a, b, out)
    sizes = {"m": rows, "n": n, "k": k, "h": h}
    moved = 2 * (a.numel() + b.numel() + out.numel())
    return {"op": form, **sizes, "flops": 2 * rows * n * k * h, "bytes": moved}, calls


def each_head_fp8(rows: int, h: int, r: int, d: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """`each_head` of FP8. Scales of a are stored as TMA reads them, rows last."""
    blocks, e4m3, one = r // 128, torch.float8_e4m3fn, torch.ones((), device="cuda")
    a, b, out = normal(rows, h, r), normal(h, d, r), normal(rows, h, d)
    sfa = torch.rand(h, blocks, -(-rows // 4) * 4, device="cuda").permute(2, 0, 1)[:rows]
    left, right = (a.to(e4m3), sfa), (b.to(e4m3), torch.rand(h, d // 128, blocks, device="cuda"))
    for x in right:
        deep_gemm.declare_constant(x)
    others, form = normal(h, rows, d), BHR
    alone = left[0].transpose(0, 1).contiguous()

    def each_alone() -> None:
        for x, y in zip(alone, right[0], strict=True):
            torch._scaled_mm(x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    calls: Calls = {
        "us": lambda: deep_gemm.fp8_einsum(form, left, right, out),
        "torch_us": lambda: torch.bmm(a.transpose(0, 1), b.transpose(1, 2), out=others),
        "scaled_mm_us": each_alone,
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.fp8_einsum(form, left, right, out)
    moved = a.numel() + b.numel() + 2 * out.numel() + 4 * (sfa.numel() + right[1].numel())
    sizes = {"m": rows, "n": d, "k": r, "h": h}
    return {"op": f"fp8 {form}", **sizes, "flops": 2 * rows * d * r * h, "bytes": moved}, calls


def total(batch: int, m: int, n: int, k: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """The sum of products, added to float32. torch multiplies without adding to a d, from operands with K together."""
    a, b, d = normal(batch, m, k), normal(batch, n, k), torch.zeros(m, n, device="cuda")
    left, right = (x.transpose(0, 1).flatten(1) for x in (a, b))
    product = normal(m, n)
    calls: Calls = {
        "us": lambda: deep_gemm.einsum(SUM, a, b, d, d),
        "torch_us": lambda: torch.mm(left, right.t(), out=product),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.einsum(SUM, a, b, d, d)
    moved = 2 * (a.numel() + b.numel())
    return {"op": SUM, "m": m, "n": n, "k": k, "b": batch, "flops": 2 * batch * m * n * k, "bytes": moved}, calls


def measure(peer: Any, only: str) -> Iterator[dict[str, Any]]:
    """A row for each size and mode."""
    made = {
        "fp8": [functools.partial(each_head_fp8, rows, *heads) for heads in HEADS for rows in ROWS],
        **{
            form: [functools.partial(each_head, form, rows, *heads) for heads in HEADS for rows in ROWS]
            for form in EACH
        },
        SUM: [functools.partial(total, *size) for size in SUMS],
    }
    for make in made[only] if only else itertools.chain(*made.values()):
        row, calls = make(peer)
        yield {"mode": "flush", **row} | timing.flush(calls, repeats=20)
        if row["b"] <= FEW_PRODUCTS if row["op"] == SUM else row["m"] <= FEW:
            yield {"mode": "graph", **row} | timing.graph(
                {name: [call] for name, call in calls.items()}, calls_in_graph=32, replays=5
            )


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
@click.option("--only", type=click.Choice(["fp8", *EACH, SUM]), help="Only these products.")
def main(output: Path | None, deepgemm: Path | None, only: str | None) -> None:
    """Time batches of products and their sums."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment()
    for row in measure(peer, only or ""):
        sizes = " ".join(f"{name} {row[name]}" for name in ("m", "n", "k", "h", "b") if name in row)
        rate = f"{row['flops'] / 1e6 / row['us']:.0f} TFLOP/s, {row['bytes'] / 1e3 / row['us']:.0f} GB/s"
        others = ", ".join(f"{name[:-3]} {us / row['us']:.3f}" for name, us in row.items() if name.endswith("_us"))
        click.echo(f"{row['op']:17} {row['mode']} {sizes:32} {row['us']:9.1f} us  {rate}; of ours: {others}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")


if __name__ == "__main__":
    main()
