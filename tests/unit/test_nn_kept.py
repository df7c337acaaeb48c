"""Casts of weights that a layer keeps, and what a pass of a linear layer costs the host: calls, functions, memory."""

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from entered import ours
from gpu_fakes import FakeGpu
from nn_cases import IN, OPTIONS, OUT, check, exact, layer, matrix, of_separate_calls, results
from torch import Tensor

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, quantize, settings
from deep_gemm.nn import FP8Linear
from deep_gemm.ops import linear
from deep_gemm.runtime import measuring, weight_promises
from deep_gemm.tensors import DTENSOR


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_kept_cast_is_renewed_when_the_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen, cast = layer("kept casts"), [], quantize.blocks_and_transpose
    monkeypatch.setattr(quantize, "blocks_and_transpose", lambda w: (seen.append(1), cast(w))[1])
    x, dy = matrix(48, IN), matrix(48, OUT)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for count, change in enumerate((optimizer.step, lambda: made.load_state_dict({**made.state_dict()}), made.half), 1):
        check(results(made, x, dy), exact(made, x, dy))
        with torch.no_grad():
            made(x)
        assert len(seen) == count
        change()
    assert made._cast is None
    made(x)
    assert copy.deepcopy(made)._cast is None


@pytest.mark.parametrize("way", ["fused", "the same memory"])
def test_a_kept_cast_is_renewed_though_no_version_counts(way: str) -> None:
    made, x, dy = layer("kept casts"), matrix(48, IN), matrix(48, OUT)
    memory, optimizer = made.weight.detach().numpy(), torch.optim.SGD(made.parameters(), lr=0.5, fused=True)
    for _ in range(3):
        check(results(made, x, dy), exact(made, x, dy))
        if way == "fused":
            optimizer.step()
        else:  # as a parametrization makes a weight for each pass, in the memory that the last one gave back
            memory *= 2
            made.weight = torch.nn.Parameter(torch.from_numpy(memory))


def test_a_cast_of_inference_mode_serves_training() -> None:
    made, x, dy = layer("kept casts"), matrix(48, IN), matrix(48, OUT)
    with torch.inference_mode():
        wanted = made(x)
    assert torch.equal(results(made, x, dy)["y"], wanted)


@pytest.mark.parametrize("name", ["1x128", "kept casts"])
def test_a_weight_may_be_the_view_of_a_transpose(name: str) -> None:
    made, x, dy = layer(name), matrix(48, IN), matrix(48, OUT)
    wanted = results(made, x, dy)
    made.weight = torch.nn.Parameter(made.weight.detach().t().contiguous().t())
    found = results(made, x, dy)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for module in (made.requires_grad_(False), FP8Linear.from_linear(made, mode="inference")):
        assert torch.equal(module(x), wanted["y"])


class Gathered(torch.nn.Parameter):
    """A weight as FSDP2 sets it: with a shard, in memory that is written without counting versions."""

    def to_local(self) -> Tensor:
        return self


@pytest.mark.parametrize("frozen", [False, True])
def test_no_cast_is_kept_of_a_weight_that_is_gathered(frozen: bool) -> None:
    made, x = layer("kept casts"), matrix(48, IN)
    made.bias.data.zero_()
    made.weight = Gathered(made.weight.data)
    made.weight.requires_grad_(not frozen)

    def forward() -> Tensor:
        with torch.set_grad_enabled(frozen):
            return made(x.detach().requires_grad_(frozen)).detach()

    first = forward()
    with torch.autograd._unsafe_preserve_version_counter(made.weight), torch.no_grad():
        made.weight.mul_(2)
    assert torch.equal(forward(), 2 * first)
    made.fuse_wgrad_accumulation, made.weight.main_grad = True, torch.zeros(OUT, IN)  # type: ignore[assignment]
    made.weight.requires_grad_()
    with pytest.raises(InvalidInputError, match="must be False for a weight that FSDP2 shards"):
        made(x)


def test_each_forward_casts_the_weight_anew_unless_told_otherwise() -> None:
    made, x = layer("1x128"), matrix(48, IN)
    made(x)
    made.weight.data.mul_(2)  # which no version counts
    check({"y": made(x).detach()}, {"y": exact(made, x, matrix(48, OUT))["y"]})


BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DTensors are loaded, or a weight promise is left, calls ask more. Optimizers load Dynamo, which loads them:
    never twice."""
    importlib.import_module("torch._dynamo")
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
        ({"bias": torch.zeros(64).to(torch.float8_e4m3fn)}, "bias must be one of torch.float32, .* is torch.float8"),
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
