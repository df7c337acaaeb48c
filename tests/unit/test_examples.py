"""The examples of training, of a mixture of experts and of a model of Transformers run without a GPU."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import module_of

import deep_gemm
from deep_gemm import nn

pytestmark = pytest.mark.long

TRAIN = "examples/train_linear.py"
WAYS = ("BF16", "FP8", "FP8 mixed")


def test_all_ways_to_train_learn_alike() -> None:
    module: Any = module_of(TRAIN)
    losses = {way: module.train(way, 2, "cpu", width=64, length=16, size=1) for way in WAYS}
    for way in WAYS[1:]:
        assert losses[way][0] != losses["BF16"][0], "FP8 rounds"
        torch.testing.assert_close(losses[way], losses["BF16"], rtol=0.02, atol=0.0)
        assert losses[way][1] != losses[way][0], "weights change"
    assert losses["FP8"][0] == losses["FP8 mixed"][0], "only the weight gradient differs"
    assert losses["FP8"][1] != losses["FP8 mixed"][1]


def test_the_loss_of_training_falls_and_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With new patterns in each step, it rose during the first steps."""
    module, curves = module_of(TRAIN), dict[str, list[list[float]]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["train_linear.py", "--steps", "4", "--record", str(tmp_path / "rows.jsonl")])
    monkeypatch.setattr(module, "draw", lambda found, path: curves.update(found))
    module.main()
    assert tuple(curves) == WAYS
    for (losses,) in curves.values():
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] - 0.2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["way"], row["seed"], row["steps"], row["every"]) for row in rows] == [(way, 0, 4, 1) for way in WAYS]
    for row in rows:
        assert row["losses"] == pytest.approx(curves[row["way"]][0], abs=1e-4)
        assert (row["device"], row["mode"]) == ("cpu", "losses")
    assert capsys.readouterr().out.splitlines()[-1] == "One seed says nothing of noise: pass --seeds 2 or more."


def runs(generator: random.Random, by: float = 0.0) -> list[list[float]]:
    """Of three seeds, with losses at the end that lie apart by 0.01."""
    return [[9.0] * 90 + [generator.gauss(1, 0.01) + by] * 10 for _ in range(3)]


def test_the_noise_is_what_chance_makes_of_equal_ways() -> None:
    module, generator = module_of(TRAIN), random.Random(0)
    said = [module.verdict({"BF16": runs(generator), "FP8": runs(generator)}) for _ in range(1000)]
    assert 30 < sum("FP8 NO" in text for text in said) < 70  # 5% of them
    assert all(("FP8 NO" in text) != ("FP8 yes" in text) for text in said)


@pytest.mark.parametrize("by", [0.2, -0.2, float("nan")])
def test_a_way_that_differs_by_more_is_told(by: float) -> None:
    module, generator = module_of(TRAIN), random.Random(1)
    bf16 = runs(generator)
    *_, line = module.verdict({"BF16": bf16, "FP8": bf16, "FP8 mixed": runs(generator, by)}).splitlines()
    assert line.startswith("within the noise of BF16, 0.0")
    assert "FP8 yes (+0.0000, by seed +0.0000 to +0.0000), FP8 mixed NO (" in line


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("transformers")
    return module_of("examples/transformers_model.py")


def test_both_precisions_learn_and_generate_alike(transformers: Any) -> None:
    models = {name: transformers.model(SIZES, "cpu") for name in ("BF16", "FP8")}
    report = deep_gemm.nn.convert(models["FP8"])
    assert len(report.converted) == 7
    assert [*report.kept] == ["lm_head"]
    losses = {name: transformers.train(net, 2, 1, 16, "cpu")[0] for name, net in models.items()}
    torch.testing.assert_close(losses["FP8"], losses["BF16"], rtol=0.02, atol=0.0)
    assert losses["FP8"] != losses["BF16"], "FP8 rounds"

    deep_gemm.nn.convert(models["FP8"].bfloat16(), mode="inference")
    assert models["FP8"].model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    ids = transformers.patterns(1, 16, torch.Generator().manual_seed(2), "cpu")
    found = transformers.serve(models["FP8"].eval(), ids, 2, "cpu")
    assert found.tokens.shape == (1, 2)
    assert found.logits.shape == (1, 16, transformers.TOKENS)
    assert found.prefill > 0 < found.rate


def test_transformers_own_layers_call_this_library(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import deepgemm, finegrained_fp8

    for module, name in ((deepgemm, "is_sm100"), (finegrained_fp8, "is_sm100"), (deepgemm, "is_deepgemm_loadable")):
        monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: False)
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", None)
    net = transformers.model(SIZES, "cpu").bfloat16().eval()
    named = transformers.ways(net, None)
    ids = transformers.patterns(2, 16, torch.Generator().manual_seed(2), "cpu")
    served = {(way, 2): transformers.serve(named[way][1](), ids, 3, "cpu") for way in ("BF16", "nn", "compat")}
    assert torch.equal(served["compat", 2].tokens, served["nn", 2].tokens)
    assert 0 < transformers.apart(served["BF16", 2], served["nn", 2]) < transformers.APART["BF16"]
    assert transformers.apart(served["compat", 2], served["nn", 2]) < transformers.APART["compat"]
    assert [line.split(" of ")[1].split(";")[0] for line in transformers.verdict(served)] == ["BF16", "compat"]
    assert len(transformers.table({way: title for way, (title, _) in named.items()}, served).splitlines()) == 4


@pytest.fixture(scope="module")
def moe() -> Any:
    return module_of("examples/moe_layer.py")


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
    layers = sys.modules[nn.MoE.__module__]
    right = layers._recorded
    monkeypatch.setattr(layers, "_recorded", lambda x, *rest: right(x.flip(0), *rest))
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
