"""The passes of a linear layer as one call each: the launches of separate calls, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from nn_cases import IN, OPTIONS, OUT, layer, matrix, of_separate_calls
from torch import Tensor

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, settings
from deep_gemm.nn import FP8Linear
from deep_gemm.ops import linear
from deep_gemm.runtime import measuring

BF16 = torch.bfloat16


def asked(gpu: FakeGpu, call: Callable[[], object]) -> list[tuple[str, Any]]:
    """The launches of a call: kernels, specs and strides."""
    gpu.launched.clear()
    call()
    return [(repr(launch.spec), dict(launch.strides)) for launch in gpu.launched]


@pytest.mark.parametrize("name", ["1x128", "mixed", "fused", "bfloat16"])
@pytest.mark.parametrize("tokens", [64, 37])
def test_the_launches_are_those_of_separate_calls(gpu: FakeGpu, name: str, tokens: int) -> None:
    """The same specs and strides choose the same kernels."""
    made, x, dy = layer(name), matrix(tokens, IN).requires_grad_(), matrix(tokens, OUT)
    found = asked(gpu, lambda: made(x).backward(dy))
    wanted = asked(gpu, lambda: of_separate_calls(made, x.detach(), dy))
    assert len(found) == len(wanted) == 6
    assert sorted(map(str, found)) == sorted(map(str, wanted))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_pass_writes_lies_apart(gpu: FakeGpu, name: str) -> None:
    """No launch of a step writes to what another operand of it is, in first calls, in replays and in records."""
    made, x, dy = layer(name), matrix(37, IN).requires_grad_(), matrix(37, OUT)
    for _ in range(4):
        gpu.launched.clear()
        made(x).backward(dy)
        for launch in gpu.launched:
            assert all(launch.at.values())
            places = {place for operand, place in launch.at.items() if operand != "c"}
            assert len(places) == len(launch.at) - ("c" in launch.at)


def test_only_stored_weights_are_read_early(gpu: FakeGpu) -> None:
    """A promise is for the weights of a call, and not for a cast that the call makes of them."""
    made, x = layer("1x128", bias=False, dtype=BF16), matrix(48, IN)
    stored = FP8Linear.from_linear(made, mode="inference")
    deep_gemm.declare_constant(made.weight)
    with torch.no_grad():
        for promised in (False, True):
            gpu.launched.clear()
            for run in (made, made, stored, stored):
                run(x)
            assert gpu.constants == [False, False, promised, promised]
            deep_gemm.declare_constant(stored.weight, stored.weight_scale_inv)
    gpu.launched.clear()
    made(x.requires_grad_()).sum().backward()
    assert gpu.constants == [False] * 3


def test_without_a_kernel_each_part_goes_its_own_way(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer("1x128"), matrix(48, IN)
    with torch.no_grad():
        wanted = of_separate_calls(made, x, matrix(48, OUT))["y"]
        gpu.unsupported = "There is no kernel."
        with pytest.raises(UnsupportedError, match="There is no kernel"):
            made(x)
        gpu.launched.clear()
        with settings.override(fallback="torch"):
            y = made(x)
    assert not gpu.launched
    assert y.isfinite().all()
    assert y.shape == wanted.shape


def test_a_tuner_measures_all_products_of_a_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        measuring, "_consider", lambda operation, work, spec, *rest: seen.append((spec.m, spec.n, spec.k))
    )
    made, x = layer("1x128"), matrix(48, IN).requires_grad_()
    with settings.override(tune="on"):
        made(x).backward(matrix(48, OUT))
    assert seen == [(48, OUT, IN), (48, IN, OUT), (OUT, IN, 48)]


def forward(**changed: Any) -> None:
    x, w = matrix(32, 128), matrix(64, 128)
    given = {"x": x, "weight": w, "y": matrix(32, 64), "saved": linear.new_saved(x, 64, "column"), **changed}
    linear.forward(given["x"], given["weight"], given["y"], None, given.get("bias"), given["saved"], "column")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"saved": torch.zeros(256, dtype=torch.uint8)}, r"saved must be torch.uint8 with \d+ elements .* \(256,\)"),
        ({"saved": torch.zeros(13056)}, r"saved must be torch.uint8 with 13056 elements .* torch.float32"),
        ({"saved": torch.zeros(13057, dtype=torch.uint8)[1:]}, "begin at a multiple of 16 bytes"),
        ({"saved": torch.zeros(26112, dtype=torch.uint8)[::2]}, "saved must be contiguous"),
        ({"x": matrix(2, 32, 128)[:, ::2]}, r"x must be a matrix, or contiguous .* \(2, 16, 128\)"),
        ({"x": torch.tensor(1.0)}, r"x must be a matrix, or contiguous .* \(\)"),
        ({"x": matrix(32, 128).double()}, "x must be one of torch.bfloat16"),
        ({"y": matrix(32, 80)}, "d must have the shape"),
        ({"bias": torch.zeros(64).double()}, "bias must be one of .* but it is torch.float64. Pass bias.float"),
        ({"weight": matrix(64, 144)}, r"weight must have 128 columns, as x does, but it is \(64, 144\)"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        forward(**changed)


def test_a_result_may_not_lie_on_an_operand() -> None:
    memory = torch.zeros(32 * 128, dtype=BF16)
    with pytest.raises(InvalidInputError, match="y and x share memory"):
        forward(x=memory.view(32, 128), y=memory[: 32 * 64].view(32, 64))
