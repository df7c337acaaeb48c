"""The rows that measure the selector's quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layers
import pytest
import selection

from deep_gemm.bench import survey
from deep_gemm.bench.provenance import environment
from deep_gemm.select import calibration

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_shapes_are_those_of_the_rows_and_no_survey_has_them() -> None:
    surveys = sorted(RESULTS.glob("survey*.jsonl"))
    assert surveys
    found = [(shape.m, shape.n, shape.k) for shape in selection.unseen(surveys)]
    rows = [json.loads(line) for line in (RESULTS / "selection.jsonl").read_text().splitlines()]
    assert len(set(found)) == selection.COUNT
    assert found == [(row["m"], row["n"], row["k"]) for row in rows]


def test_what_is_kept_out_of_fits_is_in_no_survey_that_a_calibration_names() -> None:
    files = {
        name for path in calibration.FOLDER.glob("*.json") for name in json.loads(path.read_text())["survey"]["files"]
    }
    assert "survey-h100.jsonl" in files
    seen = {(row["n"], row["k"]) for row in survey.load(RESULTS / name for name in sorted(files))}
    kept, others = set(layers.layers(kept_out=True)), set(layers.layers(kept_out=False))
    assert len(kept) > 100
    assert kept.isdisjoint(seen | others)
    assert {(shape.n, shape.k) for shape in layers.draw(500, 1, kept_out=True)} <= kept


def test_a_row_compares_the_selected_config_with_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "environment", lambda: {"device": "x"})
    row = {"m": 1, "n": 2, "k": 3, "selected": "a", "times": {"a": 10.04, "b": 8.032, "c": 9.0}, "device": "a GPU"}
    made = selection.judged(row)
    assert (made["selected"], made["us"], made["best"], made["us_best"]) == ("a", 10.0, "b", 8.0)
    assert made["ratio_best"] == 0.8
    assert (made["timed"], made["device"]) == (3, "a GPU")
    assert "legal" not in made
    assert selection.judged(row | {"legal": 17})["legal"] == 17


def test_the_command_judges_by_all_legal_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Configs that the model ranks well cannot judge the model."""
    asked: list[tuple[Any, Any, dict[str, Any]]] = []

    class Fake:
        def __init__(self, shapes: Any, modes: Any, **options: Any) -> None:
            asked.append((shapes, modes, options))

        def rows(self) -> Iterator[survey.Row]:
            row = {"m": 4, "n": 256, "k": 15872, "selected": "a", "times": {"a": 8.0, "b": 6.0}, "legal": 596}
            yield row | dict.fromkeys(environment(), "")

    monkeypatch.setattr(survey, "Survey", Fake)
    output = tmp_path / "selection.jsonl"
    output.write_text("rows of before\n")
    assert selection.main([str(output)]) == 0
    assert asked == [(selection.unseen([]), ("flush",), {"everything": True})]
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (row["legal"], row["timed"], row["best"], row["ratio_best"]) == (596, 2, "b", 0.75)


def test_rows_on_disk_have_the_fields_of_new_ones() -> None:
    rows = [json.loads(line) for line in (RESULTS / "selection.jsonl").read_text().splitlines()]
    survey_row = {"m": 1, "n": 2, "k": 3, "selected": "a", "times": {"a": 1.0}} | dict.fromkeys(environment(), "")
    survey_row |= {"legal": 1} if "legal" in rows[0] else {}  # older rows had only configs that the model ranked well
    assert all(row.keys() == selection.judged(survey_row).keys() for row in rows)
