"""How fast indexer logits and the prenorm product are, beside DeepGEMM's, and beside copying as many bytes.

    python benchmarks/logits.py --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) on one GPU; logits over pages also in graphs, whose steps have pages
of their own or the same ones. Sizes are drawn from a seed. A row for each goes to FILE, and a line to the terminal; at
the end the mean and the least of DeepGEMM's times over ours, of kinds and sizes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm.backends.deepgemm import load
from deep_gemm.bench import provenance
from deep_gemm.bench.summary import geometric_mean
from deep_gemm.testing import timing

DIM, PAGE = 128, 64
PRODUCTS = ((4096, 7168), (8192, 28672), (137, 28672))
STEP_BYTES = 256 << 20
"""Bytes of keys that a graph reads before it reads the same ones again, if its steps have pages of their own."""

SPANS = 200, 511, 999, 8192
"""Ranges of the sizes of square prompts, by their ends."""

Calls = dict[str, Callable[[], Any]]


def log_uniform(draw: random.Random, low: float, high: float) -> int:
    """A whole number."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def prompts() -> list[tuple[str, list[int], int]]:
    """Kind, queries of each prompt, and keys. Queries of one prompt are the last of its keys; several prompts share
    neither."""
    draw = random.Random(74)
    sizes = {log_uniform(draw, 64, 8192) for _ in range(20)} | {3000, 6000, 1500, 200, 512, 8192}
    packed = []
    for _ in range(8):
        lengths: list[int] = []
        for _ in range(draw.randint(2, 30)):
            length = log_uniform(draw, 50, 2500)
            lengths += [length] if sum(lengths) + length <= 8192 else []
        packed.append(lengths)
    parts = []
    for _ in range(7):
        rows = log_uniform(draw, 100, 4096)
        parts.append((rows, rows + log_uniform(draw, 1000, 60000)))
    parts += [(2048, 65536), (300, 8192), (4096, 16384), (4096, 33000), (700, 20000)]
    return [
        *(("square", [size], size) for size in sorted(sizes)),
        *(("packed", lengths, sum(lengths)) for lengths in (*packed, [1000] * 4, [128] * 30)),
        *(("part", [rows], keys) for rows, keys in parts),
    ]


def steps() -> list[tuple[str, list[int], int, int]]:
    """Kind, keys of each request, tokens of each, and heads."""
    draw = random.Random(741)
    found = []
    for i in range(10):
        batch, low = log_uniform(draw, 64, 400), draw.randint(200, 700)
        high = low + draw.randint(100, 800)
        lengths = [draw.randint(low, high) for _ in range(batch)]
        found.append(("short", lengths, (1, 1, 2)[i % 3], 32 if i % 12 in (3, 7) else 64))
    found += [("short", [draw.randint(600, 1200) for _ in range(200)], tokens, 64) for tokens in (1, 2)]
    for i in range(6):
        batch, most = log_uniform(draw, 2, 200), log_uniform(draw, 4000, 40000)
        found.append(("long", [draw.randint(most // 3, most) for _ in range(batch)], 1 + i % 2, 64))
    found += [("long", [8192] * 256, tokens, 64) for tokens in (1, 2, 4)] + [("long", [16384] * 8, 2, 64)]
    for i, megabytes in enumerate((2, 6, 12, 18, 24, 30, 36, 42, 48, 56, 70)):
        batch = log_uniform(draw, 8, 200)
        mean = max(64, megabytes * 1e6 / ((DIM + 4) * batch))
        lengths = [max(1, round(mean * draw.uniform(0.6, 1.4))) for _ in range(batch)]
        found.append(("l2", lengths, (1, 1, 2)[i % 3], 64))
    return found


def e4m3(*shape: int) -> torch.Tensor:
    """Normal data."""
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def prompt(kind: str, lengths: Sequence[int], n: int, heads: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """Logits of prompts; the peer's with the second kernel that cleans them, and without."""
    rows = sum(lengths)
    q, k, scales = e4m3(rows, heads, DIM), e4m3(n, DIM), torch.rand(n, device="cuda") + 0.1
    weights = torch.randn(rows, heads, device="cuda")
    firsts = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    start = torch.repeat_interleave(firsts, torch.tensor(lengths)).int().cuda()
    end = torch.arange(n - rows + 1, n + 1, dtype=torch.int32, device="cuda")
    rest = (q, (k, scales), weights, start, end)
    calls: Calls = {
        "us": lambda: deep_gemm.fp8_mqa_logits(*rest),
        "uncleaned_us": lambda: deep_gemm.fp8_mqa_logits(*rest, False),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.fp8_mqa_logits(*rest, clean_logits=False)
        calls["deepgemm_cleaned_us"] = lambda: peer.fp8_mqa_logits(*rest, clean_logits=True)
    sizes = {"kind": kind, "m": rows, "n": n, "prompts": len(lengths), "heads": heads}
    return {"op": "fp8_mqa_logits", **sizes, "flops": 2 * heads * DIM * int((end - start).sum())}, calls


def pages(
    lengths: Sequence[int], next_n: int, heads: int, peer: Any, sets: int
) -> tuple[dict[str, Any], dict[str, list[Callable[[], Any]]]]:
    """Logits over pages in random order, in ``sets`` steps that have pages of their own. The peer has kernels for one
    and two tokens."""
    batch, widths = len(lengths), [-(-length // PAGE) for length in lengths]
    count = sum(widths) * sets
    cache = torch.empty(count, PAGE, 1, DIM + 4, dtype=torch.uint8, device="cuda")
    flat = cache.view(count, -1)
    flat[:, : PAGE * DIM] = e4m3(count, PAGE * DIM).view(torch.uint8)
    flat[:, PAGE * DIM :] = (torch.rand(count, PAGE, device="cuda") + 0.1).view(torch.uint8)
    order = iter(torch.randperm(count).int().split(widths * sets))
    tables = [torch.nn.utils.rnn.pad_sequence([next(order) for _ in widths], True).cuda() for _ in range(sets)]
    last = torch.tensor(lengths, dtype=torch.int32, device="cuda")[:, None]
    each = last + torch.arange(1 - next_n, 1, dtype=torch.int32, device="cuda")
    q, weights = e4m3(batch, next_n, heads, DIM), torch.randn(batch * next_n, heads, device="cuda")
    meta = deep_gemm.get_paged_mqa_logits_metadata(
        each, PAGE, torch.cuda.get_device_properties(0).multi_processor_count
    )

    def step(function: Any, table: torch.Tensor, *more: Any) -> Callable[[], Any]:
        return functools.partial(function, q, cache, weights, each, table, meta, max(lengths), *more)

    calls = {"us": [step(deep_gemm.fp8_paged_mqa_logits, table) for table in tables]}
    if peer is not None and next_n <= 2:
        calls["deepgemm_us"] = [step(peer.fp8_paged_mqa_logits, table, False) for table in tables]
    sizes = {"batch": batch, "next_n": next_n, "length": max(lengths), "heads": heads}
    return {"op": "fp8_paged_mqa_logits", **sizes, "bytes": sum(lengths) * (DIM + 4 + 4 * next_n)}, calls


def product(m: int, k: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """The prenorm product, and a copy that moves as many bytes."""
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(24, k, device="cuda")
    d, squares = torch.empty(m, 24, device="cuda"), torch.empty(m, device="cuda")
    half = a.view(-1)[: a.numel() // 2]
    to = torch.empty_like(half)
    calls: Calls = {
        "us": lambda: deep_gemm.tf32_hc_prenorm_gemm(a, b, d, squares),
        "copy_us": lambda: to.copy_(half),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.tf32_hc_prenorm_gemm(a, b, d, squares)
    return {"op": "tf32_hc_prenorm_gemm", "m": m, "k": k, "bytes": 2 * m * k}, calls


def measure(peer: Any) -> Iterator[dict[str, Any]]:
    """A row for each size, and for each way to run a step."""
    for heads, (kind, lengths, n) in itertools.product((64, 32), prompts()):
        row, calls = prompt(kind, lengths, n, heads, peer)
        yield row | {"mode": "flush"} | timing.flush(calls)
    for kind, lengths, next_n, heads in steps():
        sets = 1 if kind == "l2" else min(12, -(-STEP_BYTES // (sum(lengths) * (DIM + 4))))
        row, steps_of = pages(lengths, next_n, heads, peer, sets)
        if kind != "l2":
            yield (
                row | {"mode": "flush", "kind": kind} | timing.flush({name: all_[0] for name, all_ in steps_of.items()})
            )
        yield row | {"mode": "graph", "kind": kind} | timing.graph(steps_of, calls_in_graph=max(24, sets))
    for size in PRODUCTS:
        row, calls = product(*size, peer)
        yield row | {"mode": "flush"} | timing.flush(calls)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of each kind, number of heads, mode and range of sizes, for results that are cleaned and that are not."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        span = next((each for each in SPANS if row["m"] <= each), 0) if row.get("kind") == "square" else 0
        key = row["op"], row.get("kind", ""), row.get("heads", 0), row["mode"], span
        peers = {"": ("us", "deepgemm_us"), ", cleaned": ("us", "deepgemm_cleaned_us")}
        if "uncleaned_us" in row:
            peers[""] = "uncleaned_us", "deepgemm_us"
        for name, (ours, theirs) in peers.items():
            if theirs in row:
                found.setdefault((*key, name), []).append(row[theirs] / row[ours])
    return [
        f"{op} {kind} {heads} heads, {mode}{f', up to {span}' if span else ''}{how}: {len(ratios)} calls, "
        f"mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
        for (op, kind, heads, mode, span, how), ratios in found.items()
    ]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
def main(output: Path | None, deepgemm: Path | None) -> None:
    """Time indexer logits and the prenorm product."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment()
    rows = []
    for row in measure(peer):
        rows.append(row)
        known = ("mode", "kind", "heads", "m", "n", "k", "prompts", "batch", "next_n", "length")
        sizes = " ".join(f"{name} {row[name]}" for name in known if name in row)
        work, unit = (row["flops"] / 1e6, "TFLOP/s") if "flops" in row else (row["bytes"] / 1e3, "GB/s")
        others = ", ".join(f"{name[:-3]} {us / row['us']:.3f}" for name, us in row.items() if name.endswith("_us"))
        click.echo(f"{row['op']:22} {sizes:60} {row['us']:9.1f} us  {work / row['us']:.0f} {unit}; of ours: {others}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
    click.echo("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
