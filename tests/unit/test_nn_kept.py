"""Casts of weights: when a layer keeps them, and when it makes them anew."""

from __future__ import annotations

import copy

import pytest
import torch
from nn_cases import IN, OUT, check, exact, layer, matrix, results
from torch import Tensor

from deep_gemm import InvalidInputError
from deep_gemm.nn import FP8Linear, casts


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_kept_cast_is_renewed_when_the_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen, cast = layer("kept casts"), [], casts.weights
    monkeypatch.setattr(casts, "weights", lambda w: (seen.append(1), cast(w))[1])
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
