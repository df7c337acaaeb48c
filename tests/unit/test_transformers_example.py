"""The example with a model of Transformers runs without a GPU, if Transformers is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_gemm

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_model.py"
CPU = "cpu"
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
    found = example.serve(models["FP8"].eval(), ids, 2, "cpu")
    assert found.tokens.shape == (1, 2)
    assert found.logits.shape == (1, 16, example.TOKENS)
    assert found.prefill > 0 < found.rate


def test_transformers_own_layers_call_this_library(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import deepgemm, finegrained_fp8

    for module, name in ((deepgemm, "is_sm100"), (finegrained_fp8, "is_sm100"), (deepgemm, "is_deepgemm_loadable")):
        monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: False)
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", None)
    net = example.model(SIZES, CPU).bfloat16().eval()
    named = example.ways(net, None)
    ids = example.patterns(2, 16, torch.Generator().manual_seed(2), CPU)
    served = {(way, 2): example.serve(named[way][1](), ids, 3, CPU) for way in ("BF16", "nn", "compat")}
    assert torch.equal(served["compat", 2].tokens, served["nn", 2].tokens)
    assert 0 < example.apart(served["BF16", 2], served["nn", 2]) < example.APART["BF16"]
    assert example.apart(served["compat", 2], served["nn", 2]) < example.APART["compat"]
    assert [line.split(" of ")[1].split(";")[0] for line in example.verdict(served)] == ["BF16", "compat"]
    assert len(example.table({way: title for way, (title, _) in named.items()}, served).splitlines()) == 4


def test_what_fails_is_named_and_nothing_begins_late(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parts = example.Parts(60.0)
    assert parts("one", lambda: 1) == 1
    assert parts("two", lambda: [].pop()) is None
    parts.limit = -1.0
    assert parts("three", lambda: 3) is None
    assert capsys.readouterr().out.splitlines() == [
        "two: failed: IndexError: pop from empty list",
        "three: left out, because 0 s of -1 s are over",
    ]


def test_the_loss_curve_has_the_first_and_the_last_step(example: Any) -> None:
    lines = example.curve({"BF16": [3.0, 2.0, 1.0], "FP8": [3.0, 2.5, 1.5]}).splitlines()
    assert [line.split()[-1] for line in lines] == ["2", "1.0000", "1.5000"]
