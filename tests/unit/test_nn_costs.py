"""What the host does for a pass of an `FP8Linear`: functions that are entered, and memory that is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from entered import ours
from gpu_fakes import FakeGpu
from nn_cases import IN, OUT, layer, matrix
from torch import Tensor

from deep_gemm.nn import FP8Linear
from deep_gemm.runtime import weight_promises
from deep_gemm.tensors import DTENSOR

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DTensors are loaded, or a weight promise is left, calls ask more."""
    monkeypatch.delitem(sys.modules, DTENSOR, raising=False)
    monkeypatch.setattr(weight_promises, "_promises", {})


@pytest.mark.parametrize(("name", "forward", "backward"), [("1x128", 17, 10), ("kept casts", 21, 11), ("bias", 17, 10)])
def test_a_step_enters_few_functions(gpu: FakeGpu, name: str, forward: int, backward: int) -> None:
    """It was 84 and 51, and the bias another kernel; and 56 and 41 with a call for each cast and each product. All
    tensors stay alive, so that each step has addresses of its own and is a replay; which addresses a freed tensor
    leaves is up to the allocator, and a record of one that comes again enters fewer functions."""
    made = layer("1x128" if name == "bias" else name, bias=name == "bias", dtype=BF16)
    alive = list[Any]()

    def step() -> tuple[int, int]:
        x, dy, before = matrix(64, IN).requires_grad_(), matrix(64, OUT), len(gpu.launched)
        first = ours(lambda: alive.append(made(x)))
        second = ours(lambda: alive[-1].backward(dy, retain_graph=True))
        assert [launch.kernel for launch in gpu.launched[before:]].count("gemm") == 3, "with the bias in the first"
        alive.extend((x, dy, *(parameter.grad for parameter in made.parameters())))
        made.zero_grad(set_to_none=True)
        return len(first), len(second)

    counts = [step() for _ in range(8)]
    assert all(first <= forward and second <= backward for first, second in counts[3:]), counts


@pytest.mark.parametrize("shape", [(1, IN), (2, 1, IN)], ids=str)
def test_serving_enters_few_functions(gpu: FakeGpu, shape: tuple[int, ...]) -> None:
    """Results are fresh tensors of any rank: a replay, or the record of one. It was 33."""
    stored, x = FP8Linear.from_linear(torch.nn.Linear(IN, OUT, dtype=BF16), mode="inference"), matrix(*shape)
    alive = list[Tensor]()
    with torch.inference_mode():
        counts = [len(ours(lambda: alive.append(stored(x)))) for _ in range(8)]
    assert max(counts[3:]) <= 15, "of a replay; the record of an address that comes again takes 8"


@pytest.mark.parametrize(("name", "step", "serving"), [("1x128", 6, 2), ("kept casts", 6, 2), ("fused", 5, 2)])
def test_a_step_allocates_few_tensors(
    gpu: FakeGpu, name: str, step: int, serving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result and what is kept for the backward pass, both gradients, and scratch memory of each pass. It was 15,
    and 5 without gradients."""
    made, empty, allocated = layer(name, bias=False, dtype=BF16), torch.empty, list[int]()
    x, dy = matrix(64, IN).requires_grad_(), matrix(64, OUT)

    def counted(*sizes: Any, **how: Any) -> Tensor:
        allocated.append(1)
        return empty(*sizes, **how)

    def least(call: Callable[[], object]) -> int:
        """First calls, and those that make a record, allocate more."""
        counts = []
        for _ in range(12):
            allocated.clear()
            call()
            counts.append(len(allocated))
        return min(counts)

    monkeypatch.setattr(torch, "empty", counted)
    assert least(lambda: made(x).backward(dy)) == step
    with torch.no_grad():
        assert least(lambda: made(x)) == serving
