"""How fast products of MXFP4 weights are, beside our FP8 products of the same sizes.

    python benchmarks/mxfp4.py --output FILE

times CUDA graphs of calls that go through at least 256 MB of weights, on one GPU: experts with a few rows each (masked)
and dense products, and some with many rows (contiguous), these of BF16 weights too. Weights are transformed, and
declared constant. A row for each size and type of activations goes to FILE. `gb_s` counts the bytes of a checkpoint,
4.25 bits a weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

import deep_gemm
from deep_gemm import quantize
from deep_gemm.bench import provenance
from deep_gemm.testing import timing

EXPERTS = ((32, 20), (6, 20), (16, 4), (8, 64))
"""Groups, and rows of each."""
SHAPES = ((6144, 7168), (7168, 3072), (4096, 4096), (5760, 2880))
"""N x K of experts: DeepSeek-V4's, and gpt-oss's."""
DENSE, ROWS = ((4096, 7168), (7168, 2048)), (1, 16, 64)
LARGE = ((8, 512, 6144, 7168), (32, 128, 6144, 7168), (8, 512, 7168, 3072), (1, 2048, 4096, 7168))
"""Groups, rows of each, N and K."""
LEAST_BYTES = 256 << 20

Calls = dict[str, Sequence[Callable[[], Any]]]


def copies(pair: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """The weights as often as caches need to forget them."""
    each = sum(x.numel() * x.element_size() for x in pair)
    found = [tuple(pair)] + [tuple(x.clone() for x in pair) for _ in range(-(-LEAST_BYTES // each) - 1)]
    for weights in found:
        deep_gemm.declare_constant(*weights)
    return found


def weights(groups: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(116, 124, (groups, n, k // 32), dtype=torch.uint8, device="cuda")


def experts(groups: int, rows: int, n: int, k: int) -> Calls:
    x = torch.randn(groups, rows, k, device="cuda")
    a = tuple(part.view(groups, rows, -1) for part in quantize.rows(x.flatten(0, 1), row_major=True))
    a = a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])
    d, counts = x.new_empty(groups, rows, n).bfloat16(), torch.full((groups,), rows, dtype=torch.int32, device="cuda")
    packed, half = weights(groups, n, k), x.bfloat16()
    whole = torch.randn(groups, n, k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(groups, -(-n // 128), -(-k // 128), device="cuda")

    def fp8(b: Any) -> Callable[[], None]:
        return lambda: deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, counts, rows)

    def bf16(b: Any) -> Callable[[], None]:
        return lambda: deep_gemm.m_grouped_bf16_fp4_gemm_nt_masked(half, b, d, counts, rows)

    return {
        "fp8": [fp8(b) for b in copies(deep_gemm.transform_fp4_weights(*packed))],
        "bf16": [bf16(b) for b in copies(deep_gemm.transform_fp4_weights(*packed, "bf16"))],
        "fp8 weights": [fp8(b) for b in copies((whole, scales))],
    }


def many(groups: int, rows: int, n: int, k: int) -> Calls:
    """Groups of rows with labels, which fill whole tiles."""
    x = torch.randn(groups * rows, k, device="cuda")
    a, half, d = quantize.rows(x), x.bfloat16(), x.new_empty(groups * rows, n).bfloat16()
    labels = torch.arange(groups, dtype=torch.int32, device="cuda").repeat_interleave(rows)
    packed, whole = weights(groups, n, k), torch.randn(groups, n, k, device="cuda").bfloat16()
    scales = torch.ones(groups, -(-n // 128), -(-k // 128), device="cuda")

    def call(function: Callable[..., Any], x: Any, b: Any) -> Callable[[], Any]:
        return lambda: function(x, b, d, labels)

    of_fp8, of_bf16 = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous, deep_gemm.m_grouped_bf16_fp4_gemm_nt_contiguous
    return {
        "fp8": [call(of_fp8, a, b) for b in copies(deep_gemm.transform_fp4_weights(*packed))],
        "bf16": [call(of_bf16, half, b) for b in copies(deep_gemm.transform_fp4_weights(*packed, "bf16"))],
        "fp8 weights": [call(of_fp8, a, b) for b in copies((whole.to(torch.float8_e4m3fn), scales))],
        "bf16 weights": [call(deep_gemm.m_grouped_bf16_gemm_nt_contiguous, half, b) for (b,) in copies((whole,))],
    }


def dense(m: int, n: int, k: int) -> Calls:
    x = torch.randn(m, k, device="cuda")
    a, half, d = quantize.rows(x), x.bfloat16(), torch.empty(m, n, device="cuda").bfloat16()
    packed = weights(1, n, k)
    packed = packed[0][0], packed[1][0]
    whole = (
        torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn),
        torch.ones(-(-n // 128), -(-k // 128), device="cuda"),
    )

    def fp8(b: Any) -> Callable[[], None]:
        return lambda: deep_gemm.fp8_fp4_gemm_nt(a, b, d)

    def bf16(b: Any) -> Callable[[], None]:
        return lambda: deep_gemm.bf16_fp4_gemm_nt(half, b, d)

    def of_half(b: Any) -> Callable[[], None]:
        return lambda: deep_gemm.bf16_gemm_nt(half, b, d)

    return {
        "fp8": [fp8(b) for b in copies(deep_gemm.transform_fp4_weights(*packed))],
        "bf16": [bf16(b) for b in copies(deep_gemm.transform_fp4_weights(*packed, "bf16"))],
        "fp8 weights": [fp8(b) for b in copies(whole)],
        **({} if m in ROWS else {"bf16 weights": [of_half(b) for (b,) in copies((whole[0].bfloat16(),))]}),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
def main(output: Path | None) -> None:
    """Time products of MXFP4 weights."""
    origin = provenance.environment()
    sizes = [(groups, rows, n, k) for n, k in SHAPES for groups, rows in EXPERTS]
    sizes += [(1, m, n, k) for n, k in DENSE for m in ROWS]
    for groups, rows, n, k in (*sizes, *LARGE):
        calls = dense(rows, n, k) if groups == 1 else (many if rows >= 128 else experts)(groups, rows, n, k)
        found = timing.graph(calls)
        for kind, us in found.items():
            gb_s = groups * n * k * 17 / 32 / us / 1e3
            click.echo(f"{groups}x{rows} {n}x{k} {kind:12} {us:8.1f} us {gb_s:6.0f} GB/s")
            if output is not None:
                row = {"mode": "graph", "op": kind, "groups": groups, "m": rows, "n": n, "k": k, "us": us, "gb_s": gb_s}
                with output.open("a") as file:
                    file.write(json.dumps(row | origin) + "\n")


if __name__ == "__main__":
    main()
