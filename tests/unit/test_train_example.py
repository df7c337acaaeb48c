"""The training example runs without a GPU, through the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_linear.py"


def test_both_precisions_learn_alike() -> None:
    spec = importlib.util.spec_from_file_location("train_linear", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = {fp8: module.train(fp8, 2, "cpu", width=64, length=16, size=1) for fp8 in (False, True)}
    assert losses[True][0] != losses[False][0], "FP8 rounds"
    torch.testing.assert_close(losses[True], losses[False], rtol=0.02, atol=0.0)
    assert losses[True][1] != losses[True][0], "weights change"
