"""Two kernels of one's own through deep_gemm's JIT: a fused scale and add, and a scaled transpose by TMA.

Run it: with a GPU it compares both with torch; without one it compiles them for Hopper and says what they use.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import LaunchConfig, ceil_div, tensor_map

THREADS, TILE = 256, 64


@deep_gemm.kernel(
    {"out": "bf16*", "x": "const bf16*", "y": "const bf16*", "scale": "f32", "n": "u32"},
    body="""
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = scale * x[i] + y[i];
    """,
)
def scale_add(out: Tensor, x: Tensor, y: Tensor, scale: float) -> LaunchConfig | None:
    """out = scale * x + y, element by element; contiguous bfloat16 of one size."""
    n = out.numel()
    if x.numel() != n or y.numel() != n:
        raise deep_gemm.InvalidInputError(f"out, x and y must have one size, not {n}, {x.numel()} and {y.numel()}.")
    return LaunchConfig(grid=ceil_div(n, THREADS), block=THREADS, values={"n": n}, flops=2 * n) if n else None


@scale_add.reference
def _(out: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    out.copy_(scale * x.float() + y.float())


@deep_gemm.kernel(
    {"map_out": "TensorMap<bf16> out", "map_x": "const TensorMap<bf16> x", "alpha": "f32"},
    template=Path(__file__).with_suffix(".cu.jinja"),
    needs=(9, 0),
)
def scaled_transpose(out: Tensor, x: Tensor, alpha: float) -> LaunchConfig | None:
    """out = alpha * x^T; bfloat16 matrices whose rows are multiples of 16 bytes."""
    rows, columns = x.shape
    if out.shape != (columns, rows):
        raise deep_gemm.InvalidInputError(f"out must be {columns} x {rows}, but it is {tuple(out.shape)}.")
    if x.numel() == 0:
        return None
    return LaunchConfig(
        grid=(ceil_div(columns, TILE), ceil_div(rows, TILE)),
        block=THREADS,
        values={"map_out": tensor_map(out, (TILE, TILE)), "map_x": tensor_map(x, (TILE, TILE))},
        constants={"tile": TILE},
    )


@scaled_transpose.reference
def _(out: Tensor, x: Tensor, alpha: float) -> None:
    out.copy_(alpha * x.float().t())


def main() -> None:
    """Run both kernels on a GPU, or compile them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (torch.randn(1000, 520, device=device).bfloat16() for _ in range(2))
    added, turned = torch.empty_like(x), torch.empty(520, 1000, dtype=torch.bfloat16, device=device)
    scale_add(added, x, y, 0.5)  # on the CPU, the reference
    scaled_transpose(turned, x, 2.0)
    torch.testing.assert_close(added, (0.5 * x.float() + y.float()).bfloat16())
    torch.testing.assert_close(turned, (2.0 * x.float().t()).bfloat16())
    for binary in (scale_add.build(added, x, y, 0.5), scaled_transpose.build(turned, x, 2.0)):
        used = binary.resources
        print(f"{binary.name}: {used.registers} registers, {used.shared_static} bytes of shared memory, {binary.layer}")
    print(f"Both agree with torch on {device}.")


if __name__ == "__main__":
    main()
