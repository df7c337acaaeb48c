"""How fast `deep_gemm.nn.FP8Linear` is, forward and backward, beside `torch.nn.Linear` in bfloat16.

    python benchmarks/linear.py [--output FILE] [--only LAYER ...]

times a training step on one GPU: forward, input gradient, weight gradient, and all casts, of the weight too. Steps are
launched back to back, eagerly and compiled by torch, and the layers take turns. "host" is the time that Python takes to
launch a step: where it is longer than the GPU's, it is what counts. A row for each goes to FILE, and the table to the
terminal. "x eager" is the speed of compiled layers relative to the same that are not compiled.

Torch needs some time of the host for each compiled graph, however small that is. So a stack of layers, each with the
sizes of the one before in turn, is compiled too, also in torch's mode "reduce-overhead", by CUDA graphs. Its times are
those of one of its layers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from deep_gemm import nn
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

SIZES = ((4096, 7168, 2048), (4096, 7168, 7168))
"""M, N, K: tokens, out_features and in_features."""
LEAST = {(4096, 7168, 2048): 1.25, (4096, 7168, 7168): 1.4}
"""The speed relative to bfloat16 that must be reached."""
BASE = "bf16 nn.Linear"
STEPS, TURNS = 20, 12

LAYERS: dict[str, Callable[..., Any]] = {
    BASE: torch.nn.Linear,
    "BF16Linear": nn.BF16Linear,
    "FP8Linear": nn.FP8Linear,
    "FP8Linear mixed": lambda *sizes, **place: nn.FP8Linear(*sizes, weight_gradient="mixed", **place),
    "FP8Linear kept casts": lambda *sizes, **place: nn.FP8Linear(*sizes, recast="when changed", **place),
    "bf16 nn.Linear, bias": lambda *sizes, **place: torch.nn.Linear(*sizes, **{**place, "bias": True}),
    "FP8Linear, bias": lambda *sizes, **place: nn.FP8Linear(*sizes, **{**place, "bias": True}),
    "FP8Linear main_grad": lambda *sizes, **place: with_main_grad(
        nn.FP8Linear(*sizes, fuse_wgrad_accumulation=True, **place)
    ),
}
COMPILED = (BASE, "FP8Linear", "FP8Linear mixed", "FP8Linear, bias")
STACKED = (BASE, "FP8Linear")
STACK = 8
"""Layers in a stack."""
GRAPHS = ", compiled, CUDA graphs"


def with_main_grad(layer: Any) -> Any:
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    return layer


def step(layer: Any, x: Tensor, dy: Tensor) -> None:
    """A step of training without an optimizer."""
    x.grad = None
    layer.zero_grad()
    layer(x).backward(dy)


def steps(
    size: tuple[int, int, int], device: str, compiled: bool = True, only: Sequence[str] = ()
) -> dict[str, Callable[[], None]]:
    """A step of each layer, or of those named, by its name; those of compiled layers end in ", compiled"."""
    m, n, k = size
    place: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    dy = torch.randn(m, n, device=device).bfloat16()
    found: dict[str, Callable[[], None]] = {}
    for name, make in LAYERS.items():
        if only and name not in only:
            continue
        layer = make(k, n, **place)
        found[name] = lambda layer=layer: step(layer, x, dy)
        if compiled and name in COMPILED:
            traced = torch.compile(make(k, n, **place), fullgraph=True)
            found[f"{name}, compiled"] = lambda layer=traced: step(layer, x, dy)
    return found


def stacks(size: tuple[int, int, int], device: str, only: Sequence[str] = ()) -> dict[str, Callable[[], None]]:
    """A step of a stack of each layer, by its name, as `steps` has them."""
    m, n, k = size
    place: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    dy = torch.randn(m, k, device=device).bfloat16()
    found: dict[str, Callable[[], None]] = {}
    for name in STACKED:
        if only and name not in only:
            continue
        title = f"{name} x {STACK}"
        for end, options in (("", None), (", compiled", {}), (GRAPHS, {"mode": "reduce-overhead"})):
            layers = [LAYERS[name](*((k, n) if at % 2 == 0 else (n, k)), **place) for at in range(STACK)]
            stack: Any = torch.nn.Sequential(*layers)
            if options is not None:
                stack = torch.compile(stack, fullgraph=True, **options)
            found[title + end] = lambda stack=stack: step(stack, x, dy)
    return found


def measure(size: tuple[int, int, int], only: Sequence[str] = ()) -> dict[str, tuple[float, float]]:
    """Microseconds of a step on the GPU, back to back, and of its launches on the host, by layer: medians."""
    calls = steps(size, "cuda", only=only)
    if size == SIZES[0]:
        calls |= stacks(size, "cuda", only)
    for call in calls.values():
        for _ in range(5):
            call()
    samples: timing.Samples = {name: [] for name in calls}
    hosts: timing.Samples = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            time.sleep(timing.REST_SECONDS / 4)
            samples[name].append(timing.elapsed_us(lambda call=call: [call() for _ in range(STEPS)]) / STEPS)
            start = time.perf_counter()
            call()
            hosts[name].append((time.perf_counter() - start) * 1e6)
    least = {name: min(values) / layers_of(name) for name, values in hosts.items()}
    return {name: (us / layers_of(name), least[name]) for name, us in timing.medians(samples).items()}


def layers_of(name: str) -> int:
    return STACK if f" x {STACK}" in name else 1


def table(size: tuple[int, int, int], found: Mapping[str, tuple[float, float]]) -> str:
    """The lines for a size: times, and speeds relative to bfloat16, compiled layers relative to the compiled one."""
    m, n, k = size
    least = f", at least {LEAST[size]} is wanted" if size in LEAST else ""
    lines = [
        f"M={m} N={n} K={k}: forward and backward{least}",
        f"{'':40}{'us':>8}{'x bf16':>8}{'host us':>9}{'x eager':>9}",
    ]
    for name, (us, host) in found.items():
        eager, compiled, graphs = name.partition(", compiled")
        against = f"{found[eager][0] / us:9.2f}" if compiled else ""
        base = found[BASE + (f" x {STACK}" if layers_of(name) > 1 else "") + compiled + graphs][0]
        lines.append(f"{name:40}{us:8.1f}{base / us:8.2f}{host:9.1f}{against}")
    return "\n".join(lines)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--only", multiple=True, type=click.Choice([*LAYERS]), help=f"Layers beside {BASE!r}, instead of all.")
def main(output: Path | None, only: tuple[str, ...]) -> None:
    """Time forward and backward of linear layers."""
    origin, tables = provenance.environment(), []
    for size in SIZES:
        found = measure(size, (BASE, *only) if only else ())
        for name, (us, host) in found.items():
            row = {"mode": "linear", "layer": name, **dict(zip("mnk", size, strict=True)), "us": us, "host_us": host}
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps({**row, **origin}) + "\n")
        tables.append(table(size, found))
    click.echo("\n\n".join(tables))


if __name__ == "__main__":
    main()
