"""What an epilogue costs beside the plain product, and what the same steps cost after it.

    python benchmarks/epilogues.py --output FILE

times single calls with a cold L2 (`timing.flush`) on one GPU: the plain product, the product with each epilogue, and
the plain product followed by bias and SiLU under `torch.compile`. A row for each size and epilogue goes to FILE, and a
line to the terminal: times relative to the plain product's, which should be at most 1.03 from M = 4096 and K = 2048 on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn import functional

import deep_gemm
from deep_gemm import Epilogue
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

SIZES = tuple((m, n, k) for m in (4096, 64) for n, k in ((4096, 2048), (4096, 7168), (7168, 2048), (24576, 1536)))
KINDS = ("fp8", "bf16")


def steps(d: torch.Tensor, bias: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    d.copy_(activation(d + bias))


def calls(kind: str, m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """The plain product, and each epilogue; names of calls after it end in "after"."""
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    d, residual = (torch.randn(m, n, device="cuda").bfloat16() for _ in range(2))
    bias, factors = torch.randn(n, device="cuda"), torch.rand(m, device="cuda")
    if kind == "fp8":
        a, b = deep_gemm.per_token_cast_to_fp8(x, False), deep_gemm.per_block_cast_to_fp8(w, False)
        product: Callable[..., None] = lambda **more: deep_gemm.fp8_gemm_nt(a, b, d, **more)  # noqa: E731
    else:
        product = lambda **more: deep_gemm.bf16_gemm_nt(x, w, d, **more)  # noqa: E731
    epilogues = {
        "bias": Epilogue(bias),
        "silu": Epilogue(activation="silu"),
        "gelu": Epilogue(activation="gelu"),
        "gelu_erf": Epilogue(activation="gelu_erf"),
        "bias + gelu": Epilogue(bias, "gelu"),
        "relu2": Epilogue(activation="relu2"),
        "own relu2": Epilogue.custom("relu2", "return x > 0 ? x * x : 0.0f;"),
        "own vectors": Epilogue.custom(
            "mixed", "return x * (column > row ? v : w);", rows={"v": factors}, columns={"w": bias}
        ),
        "rows + residual": Epilogue(residual=residual, row_factor=factors),
    }
    after = torch.compile(steps, dynamic=False)

    def apart() -> None:
        product()
        after(d, bias, functional.silu)

    return {
        "plain": product,
        **{name: (lambda epilogue=epilogue: product(epilogue=epilogue)) for name, epilogue in epilogues.items()},
        "bias + silu after": apart,
    }


def build(made: dict[str, Callable[[], Any]]) -> None:
    """Compiles the kernels of these calls side by side."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(call) for name, call in made.items() if not name.endswith("after")]:
            done.result()


def measure(kinds: tuple[str, ...], sizes: tuple[str, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each size and epilogue."""
    for kind in kinds:
        for m, n, k in SIZES:
            if sizes and f"{m}x{n}x{k}" not in sizes:
                continue
            made = calls(kind, m, n, k)
            build(made)
            us = timing.flush(made, repeats=repeats)
            for name in made:
                relative = us[name] / us["plain"]
                yield {"op": kind, "m": m, "n": n, "k": k, "epilogue": name, "us": us[name], "relative": relative}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, help="Dtypes of operands.")
@click.option(
    "--size",
    "sizes",
    type=click.Choice(["x".join(map(str, size)) for size in SIZES]),
    multiple=True,
    help="M x N x K; all if there is none.",
)
@click.option("--repeats", default=30, help="Calls of each.")
def main(output: Path | None, kinds: tuple[str, ...], sizes: tuple[str, ...], repeats: int) -> None:
    """Time products with epilogues."""
    origin, lines = provenance.environment(), {}
    for row in measure(kinds, sizes, repeats):
        size = f"{row['op']:5} {row['m']}x{row['n']}x{row['k']}"
        lines.setdefault(size, []).append(f"{row['epilogue']} {row['relative']:.3f}")
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
        if row["epilogue"].endswith("after"):
            click.echo(f"{size:24} " + ", ".join(lines[size]))


if __name__ == "__main__":
    main()
