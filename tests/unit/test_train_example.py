"""The training example runs without a GPU, through the reference."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_linear.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_linear", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_precisions_learn_alike() -> None:
    losses = {fp8: example().train(fp8, 2, "cpu", width=64, length=16, size=1) for fp8 in (False, True)}
    assert losses[True][0] != losses[False][0], "FP8 rounds"
    torch.testing.assert_close(losses[True], losses[False], rtol=0.02, atol=0.0)
    assert losses[True][1] != losses[True][0], "weights change"


def test_without_a_gpu_the_loss_falls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With new patterns in each step, it rose during the first steps."""
    module, curves = example(), dict[str, list[float]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["train_linear.py", "--steps", "4"])
    monkeypatch.setattr(module, "draw", lambda found, path: curves.update(found))
    module.main()
    for losses in curves.values():
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] - 0.2
