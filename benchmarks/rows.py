"""How fast the functions of `deep_gemm.fused` are, beside copying as many bytes and beside `torch.compile`.

    python benchmarks/rows.py --output FILE

times each function on one GPU: of 8192 and of 64 rows of 7168, with a bf16 result and with an FP8 one, in CUDA graphs
and in single calls after a flush of L2. The same expression by `torch.compile` writes into a given bf16 result; beside
FP8, a cast by `deep_gemm.quantize.rows` follows it. A row for each goes to FILE, and a line to the terminal.
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
from torch.nn import functional

from deep_gemm import fused, quantize
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

COLUMNS, ROWS = 7168, (8192, 64)
SETS = 4
"""Operands that a graph goes through in turns: those of many rows are together larger than L2."""

Inputs = tuple[Tensor, ...]


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return functional.silu(gate) * up


def sum_and_norm(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    residual.add_(x)
    return functional.rms_norm(residual, (COLUMNS,), weight, 1e-6)


MATRIX, WIDE, VECTOR = "matrix", "wide", "vector"
FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Tensor]]] = {
    "rms_norm": (
        (MATRIX, VECTOR),
        lambda x, w, out: fused.rms_norm(x, w, out),
        lambda x, w: functional.rms_norm(x, (COLUMNS,), w, 1e-6),
    ),
    "rms_norm of a sum": (
        (MATRIX, VECTOR, MATRIX),
        lambda x, w, r, out: fused.rms_norm(x, w, out, residual=r),
        sum_and_norm,
    ),
    "layer_norm": (
        (MATRIX, VECTOR, VECTOR),
        lambda x, w, b, out: fused.layer_norm(x, w, b, out),
        lambda x, w, b: functional.layer_norm(x, (COLUMNS,), w, b),
    ),
    "add_gelu": (
        (MATRIX, MATRIX),
        lambda x, y, out: fused.add_gelu(x, y, out),
        lambda x, y: functional.gelu(x + y),
    ),
    "add_gelu of a bias, tanh": (
        (MATRIX, VECTOR),
        lambda x, y, out: fused.add_gelu(x, y, out, approximate="tanh"),
        lambda x, y: functional.gelu(x + y, approximate="tanh"),
    ),
    "mul_add": ((MATRIX, MATRIX, MATRIX), lambda x, y, z, out: fused.mul_add(x, y, z, out), lambda x, y, z: x * y + z),
    "silu_and_mul": ((WIDE,), lambda x, out: fused.silu_and_mul(x, out), silu_and_mul),
}


def made(kinds: tuple[str, ...], m: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = {MATRIX: (m, COLUMNS), WIDE: (m, 2 * COLUMNS), VECTOR: (COLUMNS,)}
    return tuple(torch.randn(shapes[kind], device="cuda", generator=generator).bfloat16() for kind in kinds)


def compiled(expression: Callable[..., Tensor]) -> Callable[..., None]:
    """The expression by `torch.compile`, into the last argument."""

    def into(*arguments: Tensor) -> None:
        arguments[-1].copy_(expression(*arguments[:-1]))

    return torch.compile(into, dynamic=False)


def tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def measure(name: str, m: int) -> list[dict[str, Any]]:
    """A row for each type of result."""
    kinds, ours, expression = FUNCTIONS[name]
    sets = [made(kinds, m, seed) for seed in range(SETS)]
    torch._dynamo.reset()
    theirs = compiled(expression)
    found = []
    for output in (torch.bfloat16, torch.float8_e4m3fn):
        outs = [ours(*inputs, output) for inputs in sets]
        results = [torch.empty(m, COLUMNS, dtype=torch.bfloat16, device="cuda") for _ in sets]
        written = [*tensors(outs[0]), *(sets[0][-1:] if name == "rms_norm of a sum" else ())]
        count = sum(x.numel() * x.element_size() for x in (*sets[0], *written))

        def in_steps(*arguments: Any) -> None:
            *inputs, result, out = arguments
            theirs(*inputs, result)
            if not isinstance(out, Tensor):
                quantize.rows(result, out=out)

        pairs = [torch.empty(2, count // 2, dtype=torch.uint8, device="cuda") for _ in sets]
        calls: dict[str, list[timing.Call]] = {
            "us": [functools.partial(ours, *inputs, out) for inputs, out in zip(sets, outs, strict=True)],
            "compile_us": [
                functools.partial(in_steps, *inputs, result, out)
                for inputs, result, out in zip(sets, results, outs, strict=True)
            ],
            "copy_us": [functools.partial(pair[0].copy_, pair[1]) for pair in pairs],
        }
        for each in calls["compile_us"]:
            each()
        row = {"function": name, "m": m, "n": COLUMNS, "output": str(output)[6:], "bytes": count}
        once = timing.flush({key: each[0] for key, each in calls.items()})
        found.append(row | timing.graph(calls) | {f"flush_{key}": value for key, value in once.items()})
    return found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--only", default="", help="Only functions with this in their names.")
def main(output: Path | None, only: str) -> None:
    """Time the functions of deep_gemm.fused."""
    origin = provenance.environment()
    head = ("us", "GB/s", "of copy", "x compile", "flush us", "of copy", "x compile")
    lines = [f"{'':42}" + "".join(f"{each:>10}" for each in head)]
    for name in FUNCTIONS:
        if only not in name:
            continue
        for m in ROWS:
            for row in measure(name, m):
                text = f"{name:25} {m:5} {row['output'][:11]:11}{row['us']:9.2f} {row['bytes'] / row['us'] / 1e3:9.0f}"
                for prefix in ("", "flush_"):
                    us = row[f"{prefix}us"]
                    text += f"{us:10.2f}" if prefix else ""
                    text += f"{row[f'{prefix}copy_us'] / us:10.3f}{row[f'{prefix}compile_us'] / us:10.3f}"
                lines.append(text)
                click.echo(text)
                if output is not None:
                    with output.open("a") as file:
                        file.write(json.dumps({"mode": "rows", **row, **origin}) + "\n")
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
