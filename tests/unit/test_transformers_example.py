"""The example with a model of Transformers runs without a GPU, if Transformers is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_gemm

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_model.py"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("transformers_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_precisions_learn_and_generate_alike(example: Any) -> None:
    models = {name: example.model(SIZES, "cpu") for name in ("BF16", "FP8")}
    report = deep_gemm.nn.convert(models["FP8"])
    assert len(report.converted) == 7
    assert [*report.kept] == ["lm_head"]
    losses = {name: example.train(net, 2, 1, 16, "cpu")[0] for name, net in models.items()}
    torch.testing.assert_close(losses["FP8"], losses["BF16"], rtol=0.02, atol=0.0)
    assert losses["FP8"] != losses["BF16"], "FP8 rounds"

    deep_gemm.nn.convert(models["FP8"].bfloat16(), mode="inference")
    assert models["FP8"].model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    ids = example.patterns(1, 16, torch.Generator().manual_seed(2), "cpu")
    tokens, prefill, rate = example.serve(models["FP8"].eval(), ids, 2, "cpu")
    assert tokens.shape == (1, 2)
    assert prefill > 0 < rate
