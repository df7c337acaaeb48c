"""Functions of rows: their inputs with difficult values, and what they are in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deep_gemm import fused

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 88.0, -88.0, -8.0, 1e-40, 3e4, -3e4, -1e-5]
EPS = 1e-6
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A call of ``function`` with inputs of the given kinds: "matrix", "vector", "wide" (two halves) or "factors"."""

    function: str
    inputs: dict[str, str]
    exact: Callable[[Inputs], Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", special: bool = True) -> Inputs:
        """Random inputs. With ``special`` some rows have difficult values, and one is zeros."""
        generator = torch.Generator().manual_seed(rows * 10007 + columns)
        found = {}
        for name, kind in self.inputs.items():
            shape = {"vector": (columns,), "wide": (rows, 2 * columns), "factors": (rows,)}.get(kind, (rows, columns))
            x = torch.randn(shape, generator=generator)
            if kind == "matrix" or kind == "wide":
                x *= 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
                for at, value in enumerate(SPECIAL if special else ()):
                    x[(at * 37 + 1) % rows, (at * 53) % shape[1]] = value
                x[rows // 2] = 0.0
            found[name] = x.to(device, torch.float32 if kind == "factors" else dtype)
        return found

    def __call__(self, inputs: Inputs, out: Any = None, **more: Any) -> Any:
        """The result. A residual is written."""
        return getattr(fused, self.function)(
            **inputs, **({"bias": None} if self.no_bias(inputs) else {}), out=out, **self.options, **more
        )

    def no_bias(self, inputs: Inputs) -> bool:
        return self.function == "layer_norm" and "bias" not in inputs


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5))


def norm(x: Inputs, centred: bool) -> Tensor:
    values = x["x"]
    if "residual" in x:  # the sum is rounded as it is stored
        values = (x["x"].float() + x["residual"].float()).to(values.dtype)
    values = values.double()
    values = values - values.mean(1, keepdim=True) if centred else values
    found = values / (values.square().mean(1, keepdim=True) + EPS).sqrt() * x["weight"].double()
    return found + x["bias"].double() if "bias" in x else found


def silu(x: Inputs, interleaved: bool = False, limit: float | None = None) -> Tensor:
    both = x["x"].double()
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    found = torch.nn.functional.silu(gate) * up
    return found * x["factors"].double()[:, None] if "factors" in x else found


_TWO, _NORM = {"x": "matrix", "y": "matrix"}, {"x": "matrix", "weight": "vector"}
_SUM, _BIAS = {"residual": "matrix"}, {"bias": "vector"}

CASES = {
    "add and gelu": Case("add_gelu", _TWO, lambda x: gelu(x["x"].double() + x["y"].double())),
    "bias and gelu by tanh": Case(
        "add_gelu",
        {"x": "matrix", "y": "vector"},
        lambda x: torch.nn.functional.gelu(x["x"].double() + x["y"].double(), approximate="tanh"),
        {"approximate": "tanh"},
    ),
    "mul and add": Case(
        "mul_add", _TWO | {"z": "matrix"}, lambda x: x["x"].double() * x["y"].double() + x["z"].double()
    ),
    "mul and add of vectors": Case(
        "mul_add",
        {"x": "matrix", "y": "vector", "z": "vector"},
        lambda x: x["x"].double() * x["y"].double() + x["z"].double(),
    ),
    "silu and mul": Case("silu_and_mul", {"x": "wide"}, silu),
    "silu and mul, all options": Case(
        "silu_and_mul",
        {"x": "wide", "factors": "factors"},
        lambda x: silu(x, True, 7.0),
        {"interleaved": True, "limit": 7.0},
    ),
    "silu and mul with a limit": Case("silu_and_mul", {"x": "wide"}, lambda x: silu(x, limit=0.5), {"limit": 0.5}),
    "rms norm": Case("rms_norm", _NORM, lambda x: norm(x, False), {"eps": EPS}),
    "rms norm of a sum": Case("rms_norm", _NORM | _SUM, lambda x: norm(x, False), {"eps": EPS}),
    "layer norm": Case("layer_norm", _NORM | _BIAS, lambda x: norm(x, True), {"eps": EPS}),
    "layer norm without bias": Case("layer_norm", _NORM, lambda x: norm(x, True), {"eps": EPS}),
    "layer norm of a sum": Case("layer_norm", _NORM | _BIAS | _SUM, lambda x: norm(x, True), {"eps": EPS}),
    "layer norm of a sum without bias": Case("layer_norm", _NORM | _SUM, lambda x: norm(x, True), {"eps": EPS}),
}


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, of which all NaN count as one."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(x.float().isnan(), -1 if kind != torch.uint8 else 255, x.contiguous().view(kind))


def same(found: Any, expected: Any) -> bool:
    """Whether tensors, or pairs of them, have the same bits."""
    if isinstance(found, tuple):
        return all(same(mine, other) for mine, other in zip(found, expected, strict=True))
    return torch.equal(bits(found.cpu()), bits(expected.cpu()))


def assert_near(found: Tensor, exact: Tensor, rtol: float = 2e-5, scale: Tensor | None = None) -> None:
    """Within a rounding to the type of ``found``, and ``rtol`` of the value or 1e-6 of ``scale``: the sums that nearly
    cancel. Rows with an infinity or NaN agree about which elements are NaN."""
    values, exact = found.cpu().double(), exact.cpu()
    info = torch.finfo(found.dtype)
    exact = torch.where(exact.abs() > info.max * (1 + info.eps / 4), exact.sign() * torch.inf, exact)
    assert torch.equal(values.isnan(), exact.isnan())
    limit = exact.abs() * (info.eps / 2 * 1.01 + rtol) + info.smallest_normal * (2 * info.eps + 2**-20)
    if scale is not None:
        limit = limit + 1e-6 * scale.cpu()
    wrong = ~((values - exact).abs() <= limit) & (values != exact) & ~exact.isnan()
    assert not wrong.any(), (wrong.nonzero()[:3].tolist(), values[wrong][:3].tolist(), exact[wrong][:3].tolist())
