"""How fast indexer logits and the prenorm product are, beside DeepGEMM's, and beside copying as many bytes.

    python benchmarks/logits.py --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) on one GPU. A row for each size goes to FILE, and a line to the
terminal.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm.backends.deepgemm import load
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

HEADS, DIM, PAGE = 64, 128, 64
PROMPTS = ((2048, 65536), (300, 8192), (4096, 16384))
"""Queries and keys; queries are the last of the keys, and attend all before them."""
PAGES = ((256, 1, 8192), (256, 2, 8192), (256, 3, 8192), (256, 4, 8192), (8, 2, 16384))
"""Requests, tokens of each, and keys of each."""
PRODUCTS = ((4096, 7168), (8192, 28672), (137, 28672))

Calls = dict[str, Callable[[], Any]]


def e4m3(*shape: int) -> torch.Tensor:
    """Normal data."""
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def prompt(rows: int, keys: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """Logits of a prompt; the peer's with the second kernel that cleans them, and without."""
    q, k, scales = e4m3(rows, HEADS, DIM), e4m3(keys, DIM), torch.rand(keys, device="cuda") + 0.1
    weights = torch.randn(rows, HEADS, device="cuda")
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device="cuda")
    rest = (q, (k, scales), weights, start, end)
    calls: Calls = {
        "us": lambda: deep_gemm.fp8_mqa_logits(*rest),
        "uncleaned_us": lambda: deep_gemm.fp8_mqa_logits(*rest, False),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.fp8_mqa_logits(*rest, clean_logits=False)
        calls["deepgemm_cleaned_us"] = lambda: peer.fp8_mqa_logits(*rest, clean_logits=True)
    return {"op": "fp8_mqa_logits", "m": rows, "n": keys, "flops": 2 * HEADS * DIM * int(end.sum())}, calls


def pages(batch: int, next_n: int, length: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """Logits over pages in random order. The peer has kernels for one and two tokens."""
    count = batch * length // PAGE
    cache = torch.empty(count, PAGE, 1, DIM + 4, dtype=torch.uint8, device="cuda")
    flat = cache.view(count, -1)
    flat[:, : PAGE * DIM] = e4m3(count, PAGE * DIM).view(torch.uint8)
    flat[:, PAGE * DIM :] = (torch.rand(count, PAGE, device="cuda") + 0.1).view(torch.uint8)
    table = torch.randperm(count, device="cuda").view(batch, -1).int()
    lengths = torch.arange(length - next_n + 1, length + 1, dtype=torch.int32, device="cuda").repeat(batch, 1)
    q, weights = e4m3(batch, next_n, HEADS, DIM), torch.randn(batch * next_n, HEADS, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
    rest = (q, cache, weights, lengths, table, meta, length)
    calls: Calls = {"us": lambda: deep_gemm.fp8_paged_mqa_logits(*rest)}
    if peer is not None and next_n <= 2:
        calls["deepgemm_us"] = lambda: peer.fp8_paged_mqa_logits(*rest, False)
    moved = batch * length * (DIM + 4 + 4 * next_n)
    return {"op": "fp8_paged_mqa_logits", "batch": batch, "next_n": next_n, "length": length, "bytes": moved}, calls


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
    """A row for each size."""
    made = [
        *(functools.partial(prompt, *size) for size in PROMPTS),
        *(functools.partial(pages, *size) for size in PAGES),
        *(functools.partial(product, *size) for size in PRODUCTS),
    ]
    for make in made:
        row, calls = make(peer)
        yield row | timing.flush(calls)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
def main(output: Path | None, deepgemm: Path | None) -> None:
    """Time indexer logits and the prenorm product."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment()
    for row in measure(peer):
        sizes = " ".join(f"{name} {row[name]}" for name in ("m", "n", "k", "batch", "next_n", "length") if name in row)
        work, unit = (row["flops"] / 1e6, "TFLOP/s") if "flops" in row else (row["bytes"] / 1e3, "GB/s")
        others = ", ".join(f"{name[:-3]} {us / row['us']:.3f}" for name, us in row.items() if name.endswith("_us"))
        click.echo(f"{row['op']:22} {sizes:32} {row['us']:9.1f} us  {work / row['us']:.0f} {unit}; of ours: {others}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({"mode": "flush", **row, **origin}) + "\n")


if __name__ == "__main__":
    main()
