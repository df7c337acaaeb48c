"""An operation of one's own with several backends, which `backends.compare` checks against float64 and times: RMSNorm
in torch, in CUDA C++ through deep_gemm's JIT, and in Triton where it is installed.

Run it, with a GPU or without one. A package names its module in the entry point group `deep_gemm.backends` instead;
then `deep-gemm compare rms_norm` finds it too.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import LaunchConfig, backends
from deep_gemm.backends.operations import Dims, Operation, normal

EPS = 1e-6


@backends.operation
class RMSNorm(Operation):
    """``rms_norm(x, weight, out)``: ``out = x / sqrt(mean(x^2) + EPS) * weight`` by rows; bfloat16."""

    name = "rms_norm"
    dims = ("rows", "columns")
    examples = ((64, 7168), (4096, 7168))
    host_examples = ((64, 1024),)

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        make = normal(device, seed)
        return make(*dims), make(dims[1]), torch.empty(dims, dtype=torch.bfloat16, device=device)

    def exact(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        wide = x.double()
        return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()

    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        """Two roundings to bfloat16, as torch's own kernel may do, and a tenth for those in float32."""
        info = torch.finfo(torch.bfloat16)
        return 1.1 * info.eps * exact.abs() + info.smallest_normal * info.eps

    def flops(self, dims: Dims) -> int:
        return 4 * math.prod(dims)

    def bytes_moved(self, dims: Dims) -> int:
        return 2 * (2 * math.prod(dims) + dims[1])

    def elements(self, dims: Dims) -> int:
        return math.prod(dims)


@backends.kernel("torch", RMSNorm.name)
def by_torch(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight, EPS)


@deep_gemm.kernel(
    {"out": "bf16*", "x": "const bf16*", "weight": "const bf16*", "eps": "f32", "columns": "u32"},
    body="""
    __shared__ float of_warp[8];
    const bf16* row = x + u64(blockIdx.x) * columns;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) {
      const float value = row[i];
      sum += value * value;
    }
    for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (u32 warp = 0; warp < 8; ++warp) sum += of_warp[warp];
    const float scale = rsqrtf(sum / columns + eps);
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x)
      out[u64(blockIdx.x) * columns + i] = float(row[i]) * scale * float(weight[i]);
    """,
)
def cuda_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> LaunchConfig:
    return LaunchConfig(grid=x.shape[0], block=256, values={"columns": x.shape[1]})


@cuda_rms_norm.reference
def _(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(by_torch(x.float(), weight.float(), out))


@backends.kernel("mine", RMSNorm.name)
def by_cuda(x: Tensor, weight: Tensor, out: Tensor) -> None:
    cuda_rms_norm(out, x, weight, EPS)


if "triton" not in backends.absent():
    from deep_gemm.backends.triton_mode import rounded, tl, triton

    @triton.jit
    def _row(x, weight, out, columns, eps, BLOCK: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / columns + eps)
        result = values * scale * tl.load(weight + at, mask=inside).to(tl.float32)
        tl.store(out + row * columns + at, rounded(result, out.dtype.element_ty), mask=inside)

    @backends.kernel("triton", RMSNorm.name)
    def by_triton(x: Tensor, weight: Tensor, out: Tensor) -> None:
        rows, columns = out.shape
        _row[(rows,)](x, weight, out, columns, EPS, BLOCK=triton.next_power_of_2(columns))


def main() -> None:
    """Compare all backends that are here, and print a line for each."""
    for row in backends.compare(RMSNorm.name).results:
        found = f"{row.timing.us:.1f} us" if row.timing else row.why
        print(f"{row.shape} {row.backend}: {row.status}, {found}")


if __name__ == "__main__":
    main()
