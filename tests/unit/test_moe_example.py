"""The example of a mixture-of-experts layer runs without a GPU, through the reference."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_layer.py"
EXPERTS = 5


@pytest.fixture(scope="module")
def moe() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("moe_layer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moe_layer"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["moe_layer"]


def made(moe: Any, tokens: int = 37, top_k: int = 2) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A layer, tokens, and a gradient. The sizes end inside blocks of 128."""
    torch.manual_seed(0)
    layer = moe.MoELayer(144, 48, EXPERTS, top_k)
    x, dy = (torch.randn(tokens, 144).bfloat16() for _ in range(2))
    return layer, x, dy


def send_to(layer: Any, experts: list[int]) -> None:
    """Send every token to these experts, with the router's weights."""

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(experts).expand(len(x), -1)
        return torch.nn.functional.linear(x.float(), layer.router).softmax(1).gather(1, chosen), chosen

    layer.route = route


@pytest.mark.parametrize(("tokens", "chosen"), [(37, None), (37, [3]), (140, [0, 4]), (1, [4, 2, 1])], ids=str)
def test_outputs_and_gradients_are_those_of_torch(moe: Any, tokens: int, chosen: list[int] | None) -> None:
    """By the router, and with experts that get every token or none."""
    layer, x, dy = made(moe, tokens)
    if chosen is not None:
        send_to(layer, chosen)
    errors = moe.compare(layer, x, dy)
    assert set(errors["FP8"]) == set(moe.BOUNDS)
    assert all(error > 0.005 for error in errors["FP8"].values()), "FP8 rounds"
    assert all(error < 0.02 for error in errors["BF16"].values())


@pytest.mark.parametrize("part", ["swiglu_backward", "add_weight_gradient", "grouped"])
def test_a_wrong_part_is_seen(moe: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(moe, part)

    def wrong(a: Any, *rest: Any) -> Any:
        first = a.flip(0) if isinstance(a, torch.Tensor) else tuple(x.flip(0) for x in a)
        return right(first, *rest)

    monkeypatch.setattr(moe, part, wrong)
    with pytest.raises(AssertionError, match="differs by"):
        moe.compare(*made(moe))


def test_repeats_have_the_same_bits_and_gradients_of_experts_add_up(moe: Any) -> None:
    layer, x, dy = made(moe)
    once, again = moe.gradients(layer, layer, x, dy), moe.gradients(layer, layer, x, dy)
    assert all(torch.equal(once[name], again[name]) for name in once)
    layer(x).backward(dy)  # main_grad is not zeroed before
    torch.testing.assert_close(layer.down.main_grad, 2 * once["d down"])
    torch.testing.assert_close(layer.gate_up.main_grad, 2 * once["d gate_up"])


def test_a_token_does_not_depend_on_the_others(moe: Any) -> None:
    layer, x, _ = made(moe)
    assert torch.equal(layer(x)[5:9], layer(x[5:9]))


def test_there_may_be_no_tokens(moe: Any) -> None:
    layer, x, dy = made(moe, tokens=0)
    found = moe.gradients(layer, layer, x, dy)
    assert found["y"].shape == found["dx"].shape == (0, 144)
    assert not any(found[name].any() for name in ("d router", "d gate_up", "d down"))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.permutations(range(EXPERTS)), min_size=1, max_size=300), st.integers(1, EXPERTS), st.data())
def test_routing_is_as_kernels_need_it(moe: Any, all_chosen: list[list[int]], top_k: int, data: st.DataObject) -> None:
    alignment = data.draw(st.sampled_from([16, 128, 256]))
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        chosen = torch.tensor(all_chosen)[:, :top_k]
        routing = moe.Routing.of(chosen, EXPERTS)
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    sizes, capacity = routing.sizes.tolist(), len(routing.labels)
    assert capacity % 128 == 0
    assert sum(sizes) <= capacity
    start = 0
    for expert, size in enumerate(sizes):
        assert start % max(alignment, 128) == 0
        tokens = (chosen == expert).any(1).nonzero().flatten().tolist()
        assert size == deep_gemm.align(len(tokens), max(alignment, 128))
        end = start + len(tokens)
        assert routing.labels[start : start + size].tolist() == [expert] * len(tokens) + [-1] * (size - len(tokens))
        assert routing.tokens[start:end].tolist() == tokens, "in the order of tokens"
        assert (routing.tokens[end : start + size] == len(chosen)).all()
        start += size
    assert (routing.labels[start:] == -1).all()
    assert (routing.tokens[start:] == len(chosen)).all()
    own = torch.arange(len(chosen))[:, None].expand(-1, top_k)
    assert torch.equal(routing.tokens[routing.rows], own)
    assert torch.equal(routing.labels[routing.rows].long(), chosen)


def test_the_command_prints_an_error_for_each_tensor(
    moe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = "--tokens 20 --width 64 --hidden 32 --experts 3 --top-k 1"
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", *sizes.split()])
    moe.main()
    printed = capsys.readouterr().out
    assert "20 tokens, each to 1 of 3 experts" in printed
    assert all(f"\n{name} " in printed for name in moe.BOUNDS)
