"""Functions of rows, and a product with bias and GELU, to be compared: operands, exact results, allowed errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from .. import ops
from ..testing.accuracy import half_accumulation_bound, tolerance
from .operations import GemmOperation, normal
from .registry import Dims, Operation, operation


def _swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


FORMULAS: Mapping[str, tuple[str, Callable[..., Tensor]]] = {
    "rms_norm": ("mv", lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * w),
    "layer_norm": ("mvv", lambda x, w, b: layer_norm(x, x.shape[1:], w, b, 1e-5)),
    "add_gelu": ("mm", lambda x, y: gelu(x + y)),
    "mul_add": ("mmm", lambda x, y, z: x * y + z),
    "silu_and_mul": ("2", lambda x: silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]),
    "swigluoai_and_mul": ("2", lambda x: _swigluoai(*(x[:, i::2] for i in (0, 1)))),
}
"""By the name in `deep_gemm.fused`: the operands (m: a matrix, v: a vector, 2: two matrices beside each other), and the
function of them in torch."""

_OPERATIONS = 12
"""Operations for each element, about: these functions are bound by bandwidth."""


class RowsFunction(Operation):
    """A function of `deep_gemm.fused` in bfloat16, such as "fused_rms_norm": its inputs, and out (M, N)."""

    dims = ("M", "N")
    examples: tuple[Dims, ...] = ((8192, 7168),)
    host_examples = ((64, 1024),)

    def __init__(self, name: str) -> None:
        self.name = f"fused_{name}"
        self.inputs, self.formula = FORMULAS[name]

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        m, n = dims
        make, sizes = normal(device, seed), {"m": (m, n), "v": (n,), "2": (m, 2 * n)}
        found = [make(*sizes[kind]) for kind in self.inputs]
        return *found, torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def exact(self, *operands: Any) -> Tensor:
        return self.formula(*(x.double() for x in operands[:-1]))

    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        """A result is computed in float32 from terms of about 1, and approximations lose up to six bits."""
        return tolerance(exact, 2.0**-18 * (1 + exact.abs()), operands[-1].dtype)

    def flops(self, dims: Dims) -> int:
        return _OPERATIONS * dims[0] * dims[1]

    def bytes_moved(self, dims: Dims) -> int:
        m, n = dims
        return 2 * (m * n + sum({"m": m * n, "v": n, "2": 2 * m * n}[kind] for kind in self.inputs))

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[1]


class LinearGelu(GemmOperation):
    """D = gelu(A @ B^T + bias) in bfloat16, with GELU by tanh: a, b, bias (N) float32 and d."""

    examples = ((4096, 4096, 2048), (4096, 4096, 7168))
    output_at = 3

    def __init__(self) -> None:
        super().__init__(ops.table.BF16)
        self.name = "bf16_linear_gelu"

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        a, b, d = super().make(dims, device, seed)
        return a, b, normal(device, seed + 1, torch.float32)(dims[1]), d

    def exact(self, a: Tensor, b: Tensor, bias: Tensor, d: Tensor) -> Tensor:
        return gelu(a.double() @ b.double().t() + bias.double(), approximate="tanh")

    def allowed(self, exact: Tensor, a: Tensor, b: Tensor, bias: Tensor, d: Tensor) -> Tensor:
        """GELU is at most 1.13 times as steep as its argument."""
        return tolerance(exact, 1.13 * half_accumulation_bound(a, b) + 2.0**-18 * (1 + exact.abs()), d.dtype)

    def bytes_moved(self, dims: Dims) -> int:
        return super().bytes_moved(dims) + 4 * dims[1]


for _name in FORMULAS:
    operation(RowsFunction(_name))
operation(LinearGelu())
