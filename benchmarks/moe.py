"""How fast a mixture of experts is as one call, beside the same launches apart, and beside DeepGEMM's.

    python benchmarks/moe.py --output FILE [--deepgemm DIRECTORY] [--seed 1]

Tokens 1 to 64 with 256 experts, 6 and 8 of them for a token, are timed in CUDA graphs whose calls have weights of their
own (`timing.graph`); 1,024 to 8,192 tokens in single calls with a cold L2 (`timing.flush`). Sizes are drawn among
those of experts of public models; choices are those of a router that prefers some experts. A row for each case goes to
FILE:

- "chain": `fp8_moe`.
- "apart": public calls: `Routing`, a cast that gathers, grouped products with `Epilogue` between them, sums by torch.
- "layer": as `nn.MoE` computes it: gate and up in bfloat16, and a launch for SwiGLU with its cast.
- "deepgemm": "layer", with DeepGEMM's grouped products, and SwiGLU with its cast by Triton.
- "floor_us": the time of reading the weights of the experts that are chosen (`read_floor_us`), or of the products at
  1,450 TFLOP/s if that is longer.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import deep_gemm
from deep_gemm import Epilogue, quantize
from deep_gemm.backends.deepgemm import load, use
from deep_gemm.bench import provenance
from deep_gemm.bench.floor import read_floor_us
from deep_gemm.nn import Routing
from deep_gemm.testing import timing

SIZES = ((4096, 2048), (7168, 2048), (4096, 1536), (2048, 768), (4096, 1408))
"""Hidden and inner sizes of DeepSeek-V4 and V3, Qwen3-235B, Qwen3-30B and GLM-4.5."""
DECODE, PREFILL = (1, 2, 4, 8, 16, 32, 64), (1024, 2048, 4096, 8192)
EXPERTS, TOP_K = 256, (6, 8)
FLOPS = 1450e12
SWIGLU = Epilogue(activation="swiglu")
Pair = tuple[Tensor, Tensor]
Call = Callable[[], Any]


def stored(n: int, k: int, experts: int) -> Pair:
    """Weights of experts, of one cast that is moved: what they are does not change times."""
    values, scales = quantize.blocks(torch.randn(n, k, device="cuda").bfloat16() / k**0.5)
    bits = torch.stack([values.view(torch.uint8).roll(expert, 0) for expert in range(experts)])
    return bits.view(values.dtype), scales.expand(experts, -1, -1).contiguous()


def choices(tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """The weights and experts of each token. Experts have preferences that are log-normal, as routers have."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=generator, device="cuda")
    scores += 0.5 * torch.randn(EXPERTS, generator=generator, device="cuda")
    weights, chosen = scores.softmax(1).topk(top_k)
    return weights, chosen


@functools.cache
def _triton_swiglu() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, values, scales, inner, rows, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row, part = tl.program_id(0), tl.program_id(1)
        at = part * block + tl.arange(0, block)
        gate = tl.load(x + row * 2 * inner + at).to(tl.float32)
        up = tl.load(x + row * 2 * inner + inner + at).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up
        scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-4) / 448
        tl.store(values + row * inner + at, (y / scale).to(tl.float8e4nv))
        tl.store(scales + part * rows + row, scale)

    return kernel


def pair_of(rows: int, columns: int) -> Pair:
    """Memory for values and scales, in the layout that products read."""
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    return values, torch.empty(columns // 128, -(-rows // 4) * 4, device="cuda").t()[:rows]


def swiglu_by_triton(hidden: Tensor, out: Pair) -> None:
    """SwiGLU of hidden (rows, 2 * inner), and its cast by 1 x 128."""
    rows, inner = out[0].shape
    _triton_swiglu()[(rows, inner // 128)](hidden, *out, inner, out[1].stride(1), block=128)


def added(routing: Routing, out: Tensor, weights: Tensor) -> Tensor:
    return (routing.choices(out) * weights[..., None]).sum(1).bfloat16()


def apart(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Pair, down: Pair) -> Tensor:
    """`fp8_moe` by public calls."""
    routing = Routing.from_choices(chosen, EXPERTS)
    a = quantize.rows(x, rows=routing.tokens.int())
    h = pair_of(len(routing.labels), down[0].shape[2])
    out = x.new_empty(len(routing.labels), x.shape[1])
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, gate_up, h, routing.labels, epilogue=SWIGLU)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(h, down, out, routing.labels)
    return added(routing, out, weights)


def layer(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Pair,
    down: Pair,
    library: Any = deep_gemm,
    by_triton: bool = False,
) -> Tensor:
    """As `nn.MoE` computes it, by the grouped products of ``library``."""
    routing = Routing.from_choices(chosen, EXPERTS)
    a = quantize.rows(x, rows=routing.tokens.int())
    hidden, out = (x.new_empty(len(routing.labels), n) for n in (gate_up[0].shape[1], x.shape[1]))
    library.m_grouped_fp8_gemm_nt_contiguous(a, gate_up, hidden, routing.labels)
    if by_triton:
        h = pair_of(len(hidden), down[0].shape[2])
        swiglu_by_triton(hidden, h)
    else:
        h = quantize.rows(hidden, gated=True)
    library.m_grouped_fp8_gemm_nt_contiguous(h, down, out, routing.labels)
    return added(routing, out, weights)


def floor_us(chosen: Tensor, gate_up: Pair, down: Pair) -> float:
    used = chosen.unique()
    parts = [part[0].view(torch.uint8)[used].flatten() for part in (gate_up, down)]
    flops = 2 * chosen.numel() * sum(part[0][0].numel() for part in (gate_up, down))
    return max(sum(read_floor_us([part]) for part in parts), flops / FLOPS * 1e6)


def ways(
    tokens: int, top_k: int, hidden: int, inner: int, seed: int, peer: Any
) -> tuple[dict[str, Call], dict[str, Any]]:
    """Calls of one set of weights, and what a row says of it."""
    weights, chosen = choices(tokens, top_k, seed)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    gate_up, down = stored(2 * inner, hidden, EXPERTS), stored(hidden, inner, EXPERTS)
    y, given = torch.empty_like(x), (x, chosen, weights, gate_up, down)
    found: dict[str, Call] = {
        "chain": lambda: deep_gemm.fp8_moe(*given, y),
        "apart": lambda: apart(*given),
        "layer": lambda: layer(*given),
    }
    if peer is not None:
        found["deepgemm"] = lambda: layer(*given, library=peer, by_triton=True)
    error = (found["chain"]().float() - found["layer"]().float()).norm() / found["layer"]().float().norm()
    used = int(chosen.unique().numel())
    if not error < 0.05:
        raise SystemExit(f"{tokens} tokens: fp8_moe and the layer differ by {error:.3f}")
    return found, {"experts_used": used, "floor_us": round(floor_us(chosen, gate_up, down), 1)}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--deepgemm", type=click.Path(path_type=Path), help="Where pip install --target put DeepGEMM.")
@click.option("--seed", default=1, help="The seed of the draw.")
@click.option("--count", default=2, help="Sizes that are drawn.")
@click.option("--only", type=click.Choice(["decode", "prefill"]), help="Only these numbers of tokens.")
def main(output: Path | None, deepgemm: Path | None, seed: int, count: int, only: str | None) -> None:
    """Time mixtures of experts."""
    peer = load(deepgemm) if deepgemm is not None else None
    origin = provenance.environment() | ({"deepgemm": use(peer)} if peer is not None else {})
    sizes = random.Random(seed).sample(SIZES, count)
    numbers = (*(DECODE if only != "prefill" else ()), *(PREFILL if only != "decode" else ()))
    for (hidden, inner), top_k, tokens in ((size, k, t) for size in sizes for k in TOP_K for t in numbers):
        calls, row = ways(tokens, top_k, hidden, inner, seed, peer)
        if tokens in DECODE:
            mode, us = "graph", timing.graph({name: [call] for name, call in calls.items()}, calls_in_graph=8)
        else:
            mode, us = "flush", timing.flush(calls)
        row |= {"mode": mode, "op": "fp8_moe", "tokens": tokens, "top_k": top_k, "hidden": hidden, "inner": inner}
        row |= {"experts": EXPERTS, "us": us, "of_floor": round(row["floor_us"] / us["chain"], 3)}
        times = ", ".join(f"{name} {each:.1f}" for name, each in us.items())
        click.echo(f"{tokens:5} tokens, top {top_k}, {hidden} x {inner}: {times} us, {row['of_floor']} of the floor")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps(row | origin) + "\n")
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
