"""How fast a mixture of experts is as one call, beside public calls, and beside DeepGEMM's products.

    python benchmarks/moe.py --output FILE [--deepgemm DIRECTORY] [--seed 1]

Tokens 1 to 256 with 256 experts, 6 and 8 of them for a token, are timed in CUDA graphs, which read more than L2 holds
in each call (`timing.graph`); 1,024 to 8,192 tokens in single calls with a cold L2 (`timing.flush`). Sizes are drawn
among those of experts of public models; choices are those of a router that prefers some experts. A row for each case
goes to FILE:

- "chain": `fp8_moe`.
- "apart": public calls: `Routing`, a cast that gathers, grouped products with `Epilogue` between them, sums by torch.
- "deepgemm": `fp8_moe`'s first and last launch, DeepGEMM's grouped products (masked to 256 tokens, then contiguous, of
  labels that are there already), and SwiGLU with its cast by Triton.
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
from deep_gemm.backends.deepgemm import load, prepare, use
from deep_gemm.bench import provenance
from deep_gemm.bench.floor import read_floor_us
from deep_gemm.nn import Routing
from deep_gemm.ops.moe_rows import Combine, Dispatch
from deep_gemm.runtime.calls import make_entry
from deep_gemm.testing import timing

SIZES = ((4096, 2048), (7168, 2048), (4096, 1536), (2048, 768), (4096, 1408))
"""Hidden and inner sizes of DeepSeek-V4 and V3, Qwen3-235B, Qwen3-30B and GLM-4.5."""
DECODE, PREFILL = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 2048, 4096, 8192)
EXPERTS, TOP_K = 256, (6, 8)
FLOPS = 1450e12
SWIGLU = Epilogue(activation="swiglu")
ALIGNMENT = 128
"""Of an expert's first row, as DeepGEMM wants it."""
Pair = tuple[Tensor, Tensor]
Call = Callable[[], Any]


class Send(Dispatch):
    """Without what weights and statistics would get."""

    outputs = "values", "scales", "layout", "places"


send, combine = make_entry(Send(())), make_entry(Combine(True))


@functools.lru_cache(maxsize=2)
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
    def kernel(x, values, scales, counts, inner, room, of_scales, step, block: tl.constexpr):  # type: ignore[no-untyped-def]
        expert, part, first = tl.program_id(2), tl.program_id(1), tl.program_id(0)
        at = part * block + tl.arange(0, block)
        blocks: tl.constexpr = block // 128
        of_block = part * blocks + tl.arange(0, blocks)
        for row in range(first, tl.load(counts + expert), tl.num_programs(0)):
            place = (expert * room + row).to(tl.int64) * inner
            gate = tl.load(x + 2 * place + at).to(tl.float32)
            up = tl.load(x + 2 * place + inner + at).to(tl.float32)
            y = tl.reshape(gate * tl.sigmoid(gate) * up, (blocks, 128))
            scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-4) / 448
            y = tl.reshape(y / scale[:, None], (block,))
            tl.store(values + place + at, y.to(tl.float8e4nv))
            tl.store(scales + expert * of_scales + of_block * step + row, scale)

    return kernel


def swiglu_by_triton(hidden: Tensor, out: Pair, counts: Tensor, programs: int) -> None:
    """SwiGLU of hidden (.., rows, 2 * inner), and its cast by 1 x 128. ``programs`` share the first ``counts`` rows of
    each group."""
    values, scales = out
    room, inner = values.shape[-2:]
    block = max(size for size in (128, 256, 512, 1024) if inner % size == 0)
    groups = len(counts)
    strides = scales.stride(0) if groups > 1 else 0, scales.stride(-1)
    _triton_swiglu()[(programs, inner // block, groups)](hidden, *out, counts, inner, room, *strides, block=block)


def pair_of(*shape: int) -> Pair:
    """Memory for values and scales, in the layout that products read."""
    *groups, rows, columns = shape
    scales = torch.empty(*groups, columns // 128, -(-rows // 4) * 4, device="cuda")
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    return values, scales.transpose(-1, -2)[..., :rows, :]


def apart(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Pair, down: Pair) -> Tensor:
    """`fp8_moe` by public calls."""
    routing = Routing.from_choices(chosen, EXPERTS)
    a = quantize.rows(x, rows=routing.tokens.int())
    h = pair_of(len(routing.labels), down[0].shape[2])
    out = x.new_empty(len(routing.labels), x.shape[1])
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, gate_up, h, routing.labels, epilogue=SWIGLU)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(h, down, out, routing.labels)
    return (routing.choices(out) * weights[..., None]).sum(1).bfloat16()


def labels_of(chosen: Tensor) -> Tensor:
    """The expert of each row of the contiguous form, or -1 for padding."""
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    ends = (-(-counts // ALIGNMENT) * ALIGNMENT).cumsum(0)
    row = torch.arange(int(ends[-1]), device="cuda")
    expert = torch.searchsorted(ends, row, right=True)
    first = ends[expert] - (-(-counts[expert] // ALIGNMENT) * ALIGNMENT)
    return torch.where(row - first < counts[expert], expert, -1).int()


def by_deepgemm(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Pair, down: Pair) -> Call:
    """A call by DeepGEMM's products, in memory of its own."""
    (tokens, top_k), (_, width, inner) = chosen.shape, down[0].shape
    masked, expected = tokens <= DECODE[-1], -(-chosen.numel() // EXPERTS)
    labels = None if masked else labels_of(chosen)
    rows = (EXPERTS, -(-tokens // ALIGNMENT) * ALIGNMENT) if labels is None else (len(labels),)
    layout, places = chosen.new_empty(EXPERTS).int(), chosen.new_empty(tokens, top_k).int()
    a, h = pair_of(*rows, width), pair_of(*rows, inner)
    hidden, out = x.new_empty(*rows, 2 * inner), x.new_empty(*rows, width)
    form = f"m_grouped_fp8_gemm_nt_{'masked' if masked else 'contiguous'}"
    how = (layout, expected) if labels is None else (labels,)
    first, second = prepare(form, a, gate_up, hidden, *how), prepare(form, h, down, out, *how)
    counts, programs = (layout, min(32, expected)) if masked else (torch.full_like(layout[:1], rows[0]), rows[0])
    y = torch.empty_like(x)

    def call() -> Tensor:
        send(x, chosen, layout, places, a, ALIGNMENT)
        first()
        swiglu_by_triton(hidden, h, counts, programs)
        second()
        combine(out, places, weights, y)
        return y

    return call


def floor_us(chosen: Tensor, gate_up: Pair, down: Pair) -> float:
    used = chosen.unique()
    parts = [part[0].view(torch.uint8)[used].flatten() for part in (gate_up, down)]
    flops = 2 * chosen.numel() * sum(part[0][0].numel() for part in (gate_up, down))
    return max(sum(read_floor_us([part]) for part in parts), flops / FLOPS * 1e6)


def ways(
    tokens: int, top_k: int, hidden: int, inner: int, seed: int, peer: bool
) -> tuple[dict[str, Call], dict[str, Any]]:
    """Calls of one set of weights, and what a row says of it."""
    weights, chosen = choices(tokens, top_k, seed)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    gate_up, down = stored(2 * inner, hidden, EXPERTS), stored(hidden, inner, EXPERTS)
    y, given = torch.empty_like(x), (x, chosen, weights, gate_up, down)
    found: dict[str, Call] = {"chain": lambda: deep_gemm.fp8_moe(*given, y), "apart": lambda: apart(*given)}
    if peer:
        found["deepgemm"] = by_deepgemm(*given)
    used = int(chosen.unique().numel())
    return found, {"experts_used": used, "floor_us": round(floor_us(chosen, gate_up, down), 1)}


def check(calls: dict[str, Call]) -> None:
    """Compare results."""
    wanted = calls["apart"]().float()
    for name, call in calls.items():
        error = (call().float() - wanted).norm() / wanted.norm()
        if not error < 0.05:
            raise SystemExit(f"{name} and public calls differ by {error:.3f}")


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
        calls, row = ways(tokens, top_k, hidden, inner, seed, peer is not None)
        check(calls)
        if tokens in DECODE:
            mode, us = "graph", timing.graph({name: [call] for name, call in calls.items()}, calls_in_graph=8)
        else:
            mode, us = "flush", timing.flush(calls)
        row |= {"mode": mode, "op": "fp8_moe", "tokens": tokens, "top_k": top_k, "hidden": hidden, "inner": inner}
        row |= {"experts": EXPERTS, "us": us, "of_floor": round(row["floor_us"] / us["chain"], 3)}
        times = ", ".join(f"{name} {each:.1f} ({each / us['chain']:.3f})" for name, each in us.items())
        click.echo(f"{tokens:5} tokens, top {top_k}, {hidden} x {inner}: {times} us, {row['of_floor']} of the floor")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps(row | origin) + "\n")
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
