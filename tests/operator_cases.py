"""Arguments of each operator of torch, from calls of public functions."""

import functools
import itertools
from typing import Any

import pytest
import step_cases
import torch
from public_calls import BF16, CALLS, paired
from torch import Tensor

from deep_gemm.ops import linear, moe_rows
from deep_gemm.runtime import operators
from deep_gemm.runtime.calls import Calls
from deep_gemm.runtime.operation import REQUIRED


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


EPILOGUE = {"alpha": 0.5, "epilogue": "alpha+bias:f32+relu", "form": "nt"}


def finished(operator: str, function: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator with an epilogue."""
    x = {name: tensor for name, tensor in CALLS[function].tensors().items() if name != "c"}
    variants, _ = operators._entries[f"{operator}_epilogue"]
    bias = torch.ones(*x["b"].shape[:-2], x["d"].shape[-1])
    layouts = {"grouped_layout": x.get("layout"), "masked_m": x.get("layout"), "expected_m": 8}
    named = {"d": x["d"], **layouts, **EPILOGUE, "bias": bias}
    found: list[Any] = []
    for parameter in variants[0].arguments:
        if parameter.type == operators._PAIR and parameter.name in "ab":
            found += paired(x, parameter.name)
        elif parameter.use != "must_be_none":
            found.append(x[parameter.name] if parameter.name in "ab" else named.get(parameter.name, parameter.default))
    return {f"{operator}_epilogue": tuple(None if value is REQUIRED else value for value in found)}


def linear_layer() -> None:
    """The calls of a layer's passes, which have no public function."""
    x, dy, y, dx, dw = (matrix(*shape) for shape in ((48, 128), (48, 256), (48, 256), (48, 128), (256, 128)))
    saved = linear.new_saved(x, 256, "column")
    linear.forward(x, matrix(256, 128), y, None, torch.ones(256), saved, "column")
    linear.backward(dy, saved, None, None, dx, dw, False, "column")


def sums_of_experts() -> None:
    """The calls of a mixture's sums, which have no public function."""
    places = torch.tensor([[3, -1], [0, 7], [6, 2]], dtype=torch.int32)
    moe_rows.combine(matrix(9, 64), places, torch.rand(3, 2), matrix(3, 64))
    moe_rows.dots(matrix(9, 64), places, matrix(3, 64), torch.empty(3, 2))
    moe_rows.route(*step_cases.routed(9, 5, 2, "cpu").values())


@functools.cache
def arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, from the calls of public functions."""
    found: dict[str, tuple[Any, ...]] = {}
    not_warm = Calls.not_warm

    def seen(self: Calls, key: Any, rest: Any, given: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> None:
        flat: list[Any] = []
        for parameter, value in zip(self._variants[0].arguments, given, strict=True):
            if parameter.use != "must_be_none":
                flat += value if parameter.type == operators._PAIR else [value]
        found.setdefault(operators.name_of(self._variants), tuple(flat))
        not_warm(self, key, rest, given, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calls, "not_warm", seen)
        for call in CALLS.values():
            call.call(call.tensors())
        linear_layer()
        sums_of_experts()
        for kind in ("bf16", "fp16", "fp8"):
            found |= finished(f"{kind}_gemm", f"{kind}_gemm_nt")
        for kind, form in itertools.product(("bf16", "fp8"), ("contiguous", "masked")):
            found |= finished(f"m_grouped_{kind}_gemm_{form}", f"m_grouped_{kind}_gemm_nt_{form}")
    found["cublaslt_gemm"] = (*(CALLS["cublaslt_gemm_nt"].tensors()[name] for name in "abdc"), "nt")
    for x in itertools.chain(*found.values()):  # what no call writes may be NaN, which equals nothing
        if isinstance(x, Tensor) and x.dtype in (torch.float32, BF16):
            x.nan_to_num_()
    return found
