"""Serving sets judged by shapes that they were not searched on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import crossed
import pytest
import torch

from deep_gemm import select
from deep_gemm.arch import SM90
from deep_gemm.bench import fit, survey
from deep_gemm.ops import half_dense
from deep_gemm.select import calibration
from deep_gemm.select.model import estimate

ESTIMATES = torch.log(torch.tensor([[1.0, 1.02, 1.2], [1.5, 1.0, 1.04], [1.0, 1.1, 1.05]], dtype=torch.float64))
LOST = torch.log(torch.tensor([[1.3, 1.0, 1.1], [1.0, 1.2, 1.1], [1.0, 1.1, 1.4]], dtype=torch.float64))
DEVICE = "NVIDIA H100 80GB HBM3"


def test_rare_configs_are_chosen_beyond_their_handicap() -> None:
    assert crossed.choices(ESTIMATES, [0, 1, 2], 1.0).tolist() == [0, 1, 0]
    assert crossed.choices(ESTIMATES, [1], 1.03).tolist() == [1, 1, 0]
    assert crossed.choices(ESTIMATES, [2], math.inf).tolist() == [2, 2, 2]


def test_a_searched_set_is_the_one_whose_choices_lose_least() -> None:
    """Of two configs, 1 and 2 are worse than 0 and 1 in the last row, and 0 and 2 choose 0 in the first."""

    def lost(chosen: list[int]) -> float:
        return float(LOST[torch.arange(3), crossed.choices(ESTIMATES, chosen, math.inf)].sum())

    found = crossed.search(ESTIMATES, LOST, 2, math.inf)
    assert lost(found) == min(lost([0, 1]), lost([0, 2]), lost([1, 2]))
    assert crossed.search(ESTIMATES, LOST, 1, math.inf, fixed=[0, 1]) == [2]
    assert sorted(crossed.search(ESTIMATES, LOST, 9, math.inf)) == [0, 1, 2]


def rows() -> list[dict[str, Any]]:
    """A survey of BF16 on a GPU that behaves as the model predicts. cuBLASLt takes as long as the best."""
    found, known = [], calibration.of(DEVICE)
    for m in (72, 1024, 2048, 3072, 4096, 6144):
        for n, k in ((1024, 512), (2112, 7168)):
            asked = half_dense.spec("bf16_gemm_nt", m, n, k, 132)
            speed = known.named("of 16-bit tiles")
            times = {
                survey.name_of(config, asked, SM90): estimate(asked, config, speed).total_us
                for config in select.candidates(asked, SM90)[::9]
            }
            row = {"m": m, "n": n, "k": k, "op": "bf16_gemm_nt", "mode": "flush", "times": times, "device": DEVICE}
            found.append(row | {"selected": next(iter(times)), "cublaslt": min(times.values())})
    return found


def test_each_shape_is_judged_by_what_was_learned_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    table, known = crossed.Table(rows(), select.candidates), calibration.of(DEVICE)
    learned = []
    monkeypatch.setattr(fit, "fit", lambda data, start: learned.append(len(data.rows)) or start)
    masks = []

    def choose(estimates: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        masks.append(seen)
        return estimates.argmin(1)

    lost = crossed.crossed(table, None, choose, known.named("of 16-bit tiles"))
    assert learned == [int(mask.sum()) for mask in masks]
    assert torch.stack([~mask for mask in masks]).sum(0).tolist() == [1] * len(table.rows)
    assert float(lost.max()) < 1e-9  # the constants are those that made the times


def test_the_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crossed, "SIZES", (2,))
    monkeypatch.setattr(fit, "_fit", lambda data, start, steps: start)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    assert crossed.main([str(path), "--common", "2"]) == 0
    printed = capsys.readouterr().out
    assert "12 rows" in printed
    assert "| fitted | all " in printed
    assert " offered | 1.0000 | 1.0000 | 0 |" in printed
    assert len([each for each in printed.splitlines() if each.startswith("turned ")]) == 2
