"""The example of a mixture-of-experts layer runs without a GPU, through the reference."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_layer.py"


@pytest.fixture(scope="module")
def moe() -> Any:
    spec = importlib.util.spec_from_file_location("moe_layer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(moe: Any, tokens: int = 37, top_k: int = 2) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A layer, tokens, and a gradient. The sizes end inside blocks of 128."""
    torch.manual_seed(0)
    layer = moe.MoE(144, 48, 5, top_k)
    x, dy = (torch.randn(tokens, 144).bfloat16() for _ in range(2))
    return layer, x, dy


def test_outputs_and_gradients_are_those_of_torch(moe: Any) -> None:
    errors = moe.compare(*made(moe))
    assert set(errors["FP8"]) == set(moe.BOUNDS)
    assert all(error > 0.005 for error in errors["FP8"].values()), "FP8 rounds"
    assert all(error < 0.02 for error in errors["BF16"].values())


def test_a_wrong_layer_is_seen(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, dy = made(moe)
    right = layer._recorded
    monkeypatch.setattr(layer, "_recorded", lambda x, *rest: right(x.flip(0), *rest))
    with pytest.raises(AssertionError, match="differs by"):
        moe.compare(layer, x, dy)


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
