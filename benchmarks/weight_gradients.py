"""How fast weight gradients are that are added to float32: mixed, with 1x128 scales on both sides, in BF16, DeepGEMM's.

    python benchmarks/weight_gradients.py --output FILE --deepgemm DIRECTORY

times single calls with a cold L2 (`timing.flush`) on one GPU: the seven layers of DeepSeek-V3 at 4096 tokens, and
gradients of experts. A row for each size goes to FILE, and a line to the terminal.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm import quantize
from deep_gemm.backends.deepgemm import load
from deep_gemm.bench import provenance, shapes
from deep_gemm.testing import timing

TOKENS = 4096
GROUPS = ((4, 4096, 7168, 8192), (8, 4096, 7168, 4096), (4, 7168, 2048, 8192), (16, 7168, 2048, 2048))
"""Experts, M and N of a gradient, and the mean number of an expert's tokens."""
EXACT, MIXED = (1, 1, 128), (1, 128, 128)

Calls = dict[str, Callable[[], Any]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def dense(m: int, n: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    dy, x = normal(TOKENS, m), normal(TOKENS, n)
    a, exact, mixed = quantize.columns(dy), quantize.columns(x), quantize.blocks_transposed(x)
    d, stored = (torch.zeros(m, n, device="cuda") for _ in range(2))
    calls: Calls = {
        "us": lambda: deep_gemm.fp8_gemm_nt(a, mixed, d, c=d, recipe=MIXED),
        "stored_us": lambda: deep_gemm.fp8_gemm_nt(a, mixed, stored, recipe=MIXED),
        "exact_us": lambda: deep_gemm.fp8_gemm_nt(a, exact, d, c=d, recipe=EXACT),
        "bf16_us": lambda: deep_gemm.bf16_gemm_tn(dy, x, d, c=d),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.fp8_gemm_nt(a, exact, d, c=d, recipe=EXACT)
    return {"op": "dense", "m": m, "n": n, "k": TOKENS, "flops": 2 * TOKENS * m * n}, calls


def experts(groups: int, m: int, n: int, mean: int, peer: Any) -> tuple[dict[str, Any], Calls]:
    """Sizes from half of the mean to one and a half of it."""
    sizes = [mean // 2 + mean * g // max(1, groups - 1) // 128 * 128 for g in range(groups)]
    layout = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    parts = [(normal(size, m), normal(size, n)) for size in sizes]
    dy, x = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    a, exact, mixed = quantize.columns(dy), quantize.columns(x), quantize.blocks_transposed(x)
    flat = [_flat([quantize.columns(part[side]) for part in parts]) for side in (0, 1)]
    d, stored = (torch.zeros(groups, m, n, device="cuda") for _ in range(2))
    padded = deep_gemm.k_grouped_fp8_gemm_nt_padded
    calls: Calls = {
        "us": lambda: padded(a, mixed, d, layout, d, recipe=MIXED),
        "stored_us": lambda: padded(a, mixed, stored, layout, recipe=MIXED),
        "exact_us": lambda: padded(a, exact, d, layout, d),
        "bf16_us": lambda: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(dy, x, d, None, layout, d),
    }
    if peer is not None:
        calls["deepgemm_us"] = lambda: peer.k_grouped_fp8_gemm_nt_contiguous(*flat, d, sizes, layout, d)
    k = sum(sizes)
    return {"op": "experts", "groups": groups, "m": m, "n": n, "k": k, "flops": 2 * k * m * n}, calls


def _flat(casts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's layout: one group's matrix after the other."""
    values = torch.cat([x.contiguous().view(torch.uint8).flatten() for x, _ in casts]).view(torch.float8_e4m3fn)
    return values, torch.cat([sf.t() for _, sf in casts]).t()


def measure(peer: Any) -> Iterator[dict[str, Any]]:
    made = [
        *(functools.partial(dense, *size) for size in shapes.REFERENCE_NK),
        *(functools.partial(experts, *size) for size in GROUPS),
    ]
    for make in made:
        row, calls = make(peer)
        yield {"mode": "flush", **row} | timing.flush(calls, repeats=20)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
def main(output: Path | None, deepgemm: Path | None) -> None:
    """Time weight gradients."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin, ratios = provenance.environment(), dict[str, list[float]]()
    for row in measure(peer):
        others = {name[:-3]: us / row["us"] for name, us in row.items() if name.endswith("_us")}
        text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in others.items())
        size = " x ".join(str(row[name]) for name in ("groups", "m", "n", "k") if name in row)
        click.echo(f"{row['op']:8} {size:28} {row['us']:9.1f} us {row['flops'] / 1e6 / row['us']:5.0f} TFLOP/s; {text}")
        if "deepgemm" in others:
            ratios.setdefault(row["op"], []).append(others["deepgemm"])
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
    for op, found in ratios.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        click.echo(f"{op}: DeepGEMM's time over ours {mean:.3f} on average, {min(found):.3f} at least")


if __name__ == "__main__":
    main()
