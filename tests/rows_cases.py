"""Functions of rows: their inputs with difficult values, what they are in float64, and when a result is right."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deep_gemm import fused
from deep_gemm.ops.cast_reference import cast_blocks, dequantise

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 88.0, -88.0, -8.0, 1e-40, 3e4, -3e4, -1e-5]
EPS = 1e-6
GROUPS = 5
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A call of ``function`` with inputs of the given kinds: "matrix", "vector", "wide" (two halves), "factors",
    "groups" (of rows), or "biases" of these, as wide as a wide one."""

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
            if kind == "groups":  # more of them than some calls have rows; -1 is none
                found[name] = torch.randint(-1, GROUPS, (rows,), generator=generator, dtype=torch.int32).to(device)
                continue
            x = torch.randn((GROUPS, 2 * columns) if kind == "biases" else shape, generator=generator)
            if kind in ("matrix", "wide"):
                x *= 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
                for at, value in enumerate(SPECIAL if special else ()):
                    x[(at * 37 + 1) % rows, (at * 53) % shape[1]] = value
                x[rows // 2] = 0.0
            found[name] = x.to(device, torch.float32 if kind == "factors" else dtype)
        return found

    def __call__(self, inputs: Inputs, out: Any = None, **more: Any) -> Any:
        """The result. A residual is written."""
        given: dict[str, Any] = {"bias": None, **inputs} if self.function == "layer_norm" else inputs
        return getattr(fused, self.function)(**given, out=out, **self.options, **more)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 is the sigmoid of 2 u."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def biased(x: Inputs) -> Tensor:
    """x with the bias of each row's group, in float64."""
    if "groups" not in x:
        return x["x"].double()
    biases = torch.cat([x["bias"], x["bias"].new_zeros(1, x["bias"].shape[1])]).double()
    return x["x"].double() + biases[x["groups"].long()]


def silu_and_mul(x: Inputs, interleaved: bool = False, limit: float | None = None) -> Tensor:
    both = biased(x)
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    found = torch.nn.functional.silu(gate) * up
    return found * x["factors"].double()[:, None] if "factors" in x else found


def swigluoai_and_mul(x: Inputs, limit: float = 7.0) -> Tensor:
    both = biased(x)
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    found = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return found * x["factors"].double()[:, None] if "factors" in x else found


def normed(x: Inputs) -> tuple[Tensor, Tensor]:
    """What a norm multiplies by, in float64: the values, of which a sum is rounded as it is stored, and the means."""
    values = x["x"]
    if "residual" in x:
        values = (x["x"].float() + x["residual"].float()).to(values.dtype)
    return values.double(), values.double().mean(1, keepdim=True)


def rms_norm(x: Inputs) -> Tensor:
    values, _ = normed(x)
    return values / (values.square().mean(1, keepdim=True) + EPS).sqrt() * x["weight"].double()


def layer_norm(x: Inputs) -> Tensor:
    values, mean = normed(x)
    centred = values - mean
    found = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt() * x["weight"].double()
    return found + x["bias"].double() if "bias" in x else found


def uncertainty(case: Case, x: Inputs) -> Tensor:
    """What the differences from a mean cancel, times float32's precision; and where biases cancel."""
    if case.function == "swigluoai_and_mul" and "groups" in x:  # up + 1 where up is near -1; gate is at most 7
        return 7 * 4e-7 * x["factors"].double().abs()[:, None]
    if case.function != "layer_norm":
        return torch.zeros((), dtype=torch.float64)
    values, mean = normed(x)
    scale = ((values - mean).square().mean(1, keepdim=True) + EPS).rsqrt() * x["weight"].double().abs()
    found = 4e-7 * (values.abs().amax(1, keepdim=True) + mean.abs()) * scale
    return found + (4e-7 * x["bias"].double().abs() if "bias" in x else 0)


_TWO, _NORM = {"x": "matrix", "y": "matrix"}, {"x": "matrix", "weight": "vector"}
_SUM, _BIAS, _EPS = {"residual": "matrix"}, {"bias": "vector"}, {"eps": EPS}
_OF_GROUPS = {"x": "wide", "bias": "biases", "groups": "groups"}


def _mul_add(x: Inputs) -> Tensor:
    return x["x"].double() * x["y"].double() + x["z"].double()


CASES = {
    "add and gelu": Case("add_gelu", _TWO, lambda x: gelu(x["x"].double() + x["y"].double())),
    "bias and gelu by tanh": Case("add_gelu", {"x": "matrix", "y": "vector"},
        lambda x: gelu_by_tanh(x["x"].double() + x["y"].double()), {"approximate": "tanh"}),
    "mul and add": Case("mul_add", _TWO | {"z": "matrix"}, _mul_add),
    "mul and add of vectors": Case("mul_add", {"x": "matrix", "y": "vector", "z": "vector"}, _mul_add),
    "silu and mul": Case("silu_and_mul", {"x": "wide"}, silu_and_mul),
    "silu and mul, all options": Case("silu_and_mul", {"x": "wide", "factors": "factors"},
        lambda x: silu_and_mul(x, True, 7.0), {"interleaved": True, "limit": 7.0}),
    "silu and mul, limit and factors": Case("silu_and_mul", {"x": "wide", "factors": "factors"},
        lambda x: silu_and_mul(x, limit=0.5), {"limit": 0.5}),
    "swigluoai and mul": Case("swigluoai_and_mul", {"x": "wide"}, swigluoai_and_mul),
    "swigluoai and mul, all options": Case("swigluoai_and_mul", {"x": "wide", "factors": "factors"},
        lambda x: swigluoai_and_mul(x, 0.5), {"limit": 0.5}),
    "silu and mul with biases of groups": Case("silu_and_mul", _OF_GROUPS, silu_and_mul),
    "swigluoai and mul with biases of groups": Case("swigluoai_and_mul", _OF_GROUPS | {"factors": "factors"},
        swigluoai_and_mul),
    "rms norm": Case("rms_norm", _NORM, rms_norm, _EPS),
    "rms norm of a sum": Case("rms_norm", _NORM | _SUM, rms_norm, _EPS),
    "layer norm": Case("layer_norm", _NORM | _BIAS, layer_norm, _EPS),
    "layer norm without bias": Case("layer_norm", _NORM, layer_norm, _EPS),
    "layer norm of a sum": Case("layer_norm", _NORM | _BIAS | _SUM, layer_norm, _EPS),
    "layer norm of a sum without bias": Case("layer_norm", _NORM | _SUM, layer_norm, _EPS),
}  # fmt: skip


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, of which all NaN count as one."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    nan = torch.full((), 255 if kind == torch.uint8 else -1, dtype=kind, device=x.device)
    return torch.where(x.float().isnan(), nan, x.contiguous().view(kind))


def same(found: Any, expected: Any) -> bool:
    """Whether tensors, or pairs of them, have the same bits."""
    if isinstance(found, tuple):
        return all(same(mine, other) for mine, other in zip(found, expected, strict=True))
    return torch.equal(bits(found), bits(expected))


def assert_right(case: Case, found: Any, inputs: Inputs) -> None:
    """Within a rounding to the type of ``found`` and some of float32. What is below 1e-30 may be zero: the exponential
    has no subnormal results. NaN are where they belong. FP8 is within half a step, and scales are those of the exact
    result."""
    given = {name: tensor.cpu() for name, tensor in inputs.items()}
    exact, slack = case.exact(given), uncertainty(case, given).nan_to_num(0, 0)
    if isinstance(found, tuple):
        values, scales = (tensor.cpu() for tensor in found)
        _, expected = cast_blocks(exact.float(), 1, 128, False)
        torch.testing.assert_close(scales, expected, rtol=1e-4, atol=0, equal_nan=True)
        steps = scales.double().repeat_interleave(128, 1)[:, : exact.shape[1]]
        error = (dequantise(values, scales, dtype=torch.float64) - exact).abs()
        limit = exact.abs() / 15 + steps * 2.0**-9 + slack
        wrong = (error > limit) & steps.isfinite()
    else:
        values, info = found.cpu().double(), torch.finfo(found.dtype)
        exact = torch.where(exact.abs() > info.max * (1 + info.eps / 4), exact.sign() * torch.inf, exact)
        limit = exact.abs() * (info.eps / 2 * 1.01 + 2e-5) + info.smallest_normal * info.eps + 1e-30 + slack
        wrong = ~((values - exact).abs() <= limit) & (values != exact) & ~(values.isnan() & exact.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong, such as {wrong.nonzero()[:3].tolist()}"
