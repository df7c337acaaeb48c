"""The training example runs without a GPU, through the reference, and says whether losses differ."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_linear.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_linear", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WAYS = ("BF16", "FP8", "FP8 mixed")


def test_all_ways_learn_alike() -> None:
    module = example()
    losses = {way: module.train(way, 2, "cpu", width=64, length=16, size=1) for way in WAYS}
    for way in WAYS[1:]:
        assert losses[way][0] != losses["BF16"][0], "FP8 rounds"
        torch.testing.assert_close(losses[way], losses["BF16"], rtol=0.02, atol=0.0)
        assert losses[way][1] != losses[way][0], "weights change"
    assert losses["FP8"][0] == losses["FP8 mixed"][0], "only the weight gradient differs"
    assert losses["FP8"][1] != losses["FP8 mixed"][1]


def test_seeds_have_other_weights_and_other_patterns() -> None:
    """A loss of the first step depends on both, and on nothing else."""
    module = example()
    first = [module.train("BF16", 1, "cpu", seed, width=64, length=16, size=1) for seed in (0, 1, 0)]
    assert first[0] == first[2] != first[1]


def test_without_a_gpu_the_loss_falls_and_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With new patterns in each step, it rose during the first steps."""
    module, curves = example(), dict[str, list[list[float]]]()
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


def test_a_long_curve_is_recorded_as_means() -> None:
    module = example()
    (row,) = module.rows({"FP8": [[float(step) for step in range(2000)]]})
    assert (row["every"], row["last"]) == (10, 1899.5)
    assert row["losses"] == [10 * point + 4.5 for point in range(200)]


def runs(generator: random.Random, by: float = 0.0) -> list[list[float]]:
    """Of three seeds, with losses at the end that lie apart by 0.01."""
    return [[9.0] * 90 + [generator.gauss(1, 0.01) + by] * 10 for _ in range(3)]


def test_the_noise_is_what_chance_makes_of_equal_ways() -> None:
    module, generator = example(), random.Random(0)
    said = [module.verdict({"BF16": runs(generator), "FP8": runs(generator)}) for _ in range(1000)]
    assert 30 < sum("FP8 NO" in text for text in said) < 70  # 5% of them
    assert all(("FP8 NO" in text) != ("FP8 yes" in text) for text in said)


@pytest.mark.parametrize("by", [0.2, -0.2, float("nan")])
def test_a_way_that_differs_by_more_is_told(by: float) -> None:
    module, generator = example(), random.Random(1)
    bf16 = runs(generator)
    *_, line = module.verdict({"BF16": bf16, "FP8": bf16, "FP8 mixed": runs(generator, by)}).splitlines()
    assert line.startswith("within the noise of BF16, 0.0")
    assert "FP8 yes (+0.0000, by seed +0.0000 to +0.0000), FP8 mixed NO (" in line


def test_a_chart_has_a_line_for_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example().draw({way: runs(random.Random(0)) for way in WAYS}, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert text.count("stroke: #0b6e4f") >= 2, "the line and its legend"
