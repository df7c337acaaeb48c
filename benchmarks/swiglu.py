"""The first half of a gated MLP, dense and of experts: SwiGLU with FP8 output, against our GEMM and our silu-and-cast
kernel. And FP8 output of a layer without a gate, against a product with its activation and a cast.

    python benchmarks/swiglu.py --output FILE

times single calls with a cold L2 (`timing.flush`), and calls in a graph (`timing.graph`), each with weights of its own,
on one GPU. A row for each case goes to FILE, and a line to the terminal: microseconds, and the time of the steps apart
over that of one call, "fused". Dense calls take one launch or two: "one" and "two" are both, whatever is chosen. A
table of these comes last, in which "lost" is the time of the chosen way over that of the better one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

import deep_gemm
from deep_gemm import Epilogue, fused, quantize
from deep_gemm.bench import provenance
from deep_gemm.kernels import epilogues
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.table import BF16, FP8
from deep_gemm.runtime import engine
from deep_gemm.runtime.calls import LaunchSequence, make_entry
from deep_gemm.testing import timing

INNER, HIDDEN = 2048, 7168
Calls = dict[str, Callable[[], Any]]
Pair = tuple[torch.Tensor, torch.Tensor]
SWIGLU, TURNS, CAST = Epilogue(activation="swiglu"), Epilogue(activation="swiglu", interleaved=True), Epilogue()


def pair_of(rows: int, columns: int) -> Pair:
    return quantize.rows(torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16))


class Forced(Dense):
    """A product with an FP8 d, in ``launches`` launches whatever the model says."""

    def __init__(self, op: str, tensors: tuple[str, ...], launches: int) -> None:
        super().__init__(op, epilogue_tensors=tensors)
        self.launches = launches

    def launches(self, x: Any, device: int) -> LaunchSequence:
        way = epilogues.apart if self.launches == 2 else lambda spec: (spec, None)
        with mock.patch.object(engine, "launches", lambda spec, device: way(spec)):
            return super().launches(x, device)


def forced(launches: int, op: str, a: Any, b: Any, d: Pair, epilogue: Epilogue) -> Callable[[], None]:
    """The call of `Forced`."""
    tensors = {**epilogue.tensors, "sfd": d[1]}
    operation = Forced(op, tuple(tensors), launches)
    given = {"a": a, "b": b, "d": d[0], "epilogue": epilogue.fp8_text, **tensors}
    arguments = [given.get(each.name, each.default) for each in operation.entry_arguments]
    return functools.partial(make_entry(operation), *arguments)


def multiplied(op: str, m: int, n: int, k: int) -> tuple[Callable[..., None], Any, Any]:
    """The function ``op`` and its a and b."""
    x, w = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(n, k, device="cuda") / 32).bfloat16()
    a, b = (quantize.rows(x), quantize.blocks(w)) if op == FP8 else (x, w)
    return getattr(deep_gemm, op), a, b


def dense(m: int, inner: int = INNER, hidden: int = HIDDEN, op: str = FP8) -> Calls:
    """SwiGLU of m tokens; of BF16 to BF16 too."""
    product, x, w = multiplied(op, m, 2 * inner, hidden)
    half, d = (torch.empty(m, columns, device="cuda", dtype=torch.bfloat16) for columns in (2 * inner, inner))
    h, both = pair_of(m, inner), pair_of(m, inner)

    def apart(out: Any) -> None:
        product(x, w, half)
        fused.silu_and_mul(half, out)

    return {
        "product": lambda: product(x, w, half),
        "apart": lambda: apart(both),
        "fused": lambda: product(x, w, h, epilogue=SWIGLU),
        "one": forced(1, op, x, w, h, SWIGLU),
        "two": forced(2, op, x, w, h, SWIGLU),
        "apart, bf16": lambda: apart(d),
        "fused, bf16": lambda: product(x, w, d, epilogue=SWIGLU),
        "interleaved": lambda: product(x, w, h, epilogue=TURNS),
    }


def activated(m: int, n: int = 2 * INNER, hidden: int = HIDDEN, op: str = FP8) -> Calls:
    """A layer with bias and SiLU to FP8, without a gate."""
    product, x, w = multiplied(op, m, n, hidden)
    half, (h, both) = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), (pair_of(m, n) for _ in range(2))
    epilogue = Epilogue(torch.randn(n, device="cuda"), "silu")

    def apart() -> None:
        product(x, w, half, epilogue=epilogue)
        quantize.rows(half, out=both)

    return {
        "product": lambda: product(x, w, half),
        "apart": apart,
        "fused": lambda: product(x, w, h, epilogue=epilogue),
        "one": forced(1, op, x, w, h, epilogue),
        "two": forced(2, op, x, w, h, epilogue),
        "alone": lambda: product(x, w, h, epilogue=CAST),
    }


def experts(groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of each expert."""
    each = [quantize.blocks(torch.randn(2 * INNER, HIDDEN, device="cuda").bfloat16() / 32) for _ in range(groups)]
    return torch.stack([values for values, _ in each]), torch.stack([scales for _, scales in each])


def contiguous(groups: int, rows: int) -> Calls:
    """Groups of as many rows each."""
    m = groups * rows
    x, w = quantize.rows(torch.randn(m, HIDDEN, device="cuda").bfloat16()), experts(groups)
    labels = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    half = torch.empty(m, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    h, both = pair_of(m, INNER), pair_of(m, INNER)
    d = torch.empty(m, INNER, device="cuda", dtype=torch.bfloat16)
    product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous

    def apart() -> None:
        product(x, w, half, labels)
        fused.silu_and_mul(half, both)

    return {
        "product": lambda: product(x, w, half, labels),
        "apart": apart,
        "fused": lambda: product(x, w, h, labels, epilogue=SWIGLU),
        "fused, bf16": lambda: product(x, w, d, labels, epilogue=SWIGLU),
    }


def masked(groups: int, rows: int, max_m: int) -> Calls:
    """About ``rows`` rows in each group. Apart, all ``max_m`` rows are cast, since nobody knows which of them exist."""
    values, scales = quantize.rows(torch.randn(groups * max_m, HIDDEN, device="cuda").bfloat16())
    of_rows = deep_gemm.get_mn_major_tma_aligned_tensor(scales.reshape(groups, max_m, -1))
    x, w = (values.view(groups, max_m, HIDDEN), of_rows), experts(groups)
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(rows // 2, rows * 3 // 2 + 1, (groups,), generator=generator).int().cuda()
    half = torch.empty(groups, max_m, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    both = pair_of(groups * max_m, INNER)
    h = pair_of(groups * max_m, INNER)[0].view(groups, max_m, INNER)
    sf = torch.empty(groups, INNER // 128, max_m, device="cuda").mT  # as the next product reads them
    d = torch.empty(groups, max_m, INNER, device="cuda", dtype=torch.bfloat16)
    product = deep_gemm.m_grouped_fp8_gemm_nt_masked

    def apart() -> None:
        product(x, w, half, counts, rows)
        fused.silu_and_mul(half.view(-1, 2 * INNER), both)

    return {
        "product": lambda: product(x, w, half, counts, rows),
        "apart": apart,
        "fused": lambda: product(x, w, (h, sf), counts, rows, epilogue=SWIGLU),
        "fused, bf16": lambda: product(x, w, d, counts, rows, epilogue=SWIGLU),
    }


FEW = {
    f"{name} {m}{' in a graph' if mode == 'graph' else ''}": (mode, functools.partial(make, m, op=op))
    for name, make, op in (
        *(("few, FP8", dense, FP8), ("few, BF16", dense, BF16)),
        *(("few, SiLU of FP8", activated, FP8), ("few, SiLU of BF16", activated, BF16)),
    )
    for mode, tokens in (("graph", (1, 64, 256)), ("flush", (1, 16, 64, 128, 256, 512, 768, 1024)))
    for m in tokens
}
"""Numbers of tokens on both sides of that up to which there are two launches."""
CASES: dict[str, tuple[str, Callable[[], Calls]]] = {
    "dense 4096": ("flush", lambda: dense(4096)),
    "dense 1024": ("flush", lambda: dense(1024)),
    "dense 8192, K 2048": ("flush", lambda: dense(8192, 2048, 2048)),
    "dense 64 in a graph": ("graph", lambda: dense(64)),
    "BF16 4096": ("flush", lambda: dense(4096, op=BF16)),
    "BF16 64": ("flush", lambda: dense(64, op=BF16)),
    "SiLU to FP8, 4096": ("flush", lambda: activated(4096)),
    "SiLU to FP8, 4096, K 2048": ("flush", lambda: activated(4096, hidden=2048)),
    "SiLU to FP8, 64": ("flush", lambda: activated(64)),
    "contiguous 8 x 4096": ("flush", lambda: contiguous(8, 4096)),
    "contiguous 32 x 256": ("flush", lambda: contiguous(32, 256)),
    "masked 32 x 20 in a graph": ("graph", lambda: masked(32, 20, 64)),
    "masked 8 x 20 in a graph": ("graph", lambda: masked(8, 20, 64)),
    "masked 32 x 20 of 1024 in a graph": ("graph", lambda: masked(32, 20, 1024)),
    **FEW,
}


def measured(mode: str, make: Callable[[], Calls], repeats: int) -> dict[str, float]:
    if mode == "flush":
        return timing.flush(make(), repeats=repeats)
    before = torch.cuda.memory_allocated()
    first = make()
    held = max(2 * INNER * HIDDEN, torch.cuda.memory_allocated() - before)
    sets = [first, *(make() for _ in range(timing.GRAPH_WEIGHT_BYTES // held))]
    return timing.graph({name: [calls[name] for calls in sets] for name in first})


def measure(names: tuple[str, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    for name, (mode, make) in CASES.items():
        if not names or name in names:
            us = measured(mode, make, repeats)
            yield {"case": name, "mode": mode, "us": us, "speedup": us["apart"] / us["fused"]}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--case", "names", type=click.Choice(list(CASES)), multiple=True, help="All if there is none.")
@click.option("--few", is_flag=True, help="Only dense cases of few tokens and some more.")
@click.option("--repeats", default=30, help="Calls of each.")
def main(output: Path | None, names: tuple[str, ...], few: bool, repeats: int) -> None:
    """Time SwiGLU with FP8 output, fused and apart."""
    origin, lines = provenance.environment(), []
    for row in measure((*names, *(FEW if few else ())), repeats):
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
        times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
        click.echo(f"{row['case']:34} {times} us; apart / fused {row['speedup']:.3f}")
        if "one" in row["us"]:
            one, two, chosen, apart = (row["us"][name] for name in ("one", "two", "fused", "apart"))
            lines.append(f"{row['case']:34} {one:7.1f} {two:7.1f} {chosen / min(one, two):7.3f} {apart:7.1f}")
    click.echo("\n".join([f"\n{'us':34} {'one':>7} {'two':>7} {'lost':>7} {'apart':>7}", *lines]))


if __name__ == "__main__":
    main()
