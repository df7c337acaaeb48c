"""Surveys for the tuner: what they say of measured choices, and `deep-gemm tune`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pack
import pytest
import torch
import tuned
from click.testing import CliRunner

from deep_gemm import ops, options, select
from deep_gemm.arch import SM90
from deep_gemm.bench import backends, provenance, survey
from deep_gemm.cli.app import app
from deep_gemm.runtime import measuring
from deep_gemm.select import tuner
from deep_gemm.select.calibration import default

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HALF = RESULTS / "survey-half-h100.jsonl"
DEVICE = "NVIDIA H200"


@pytest.fixture(autouse=True)
def _own_cache(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.current(), "measured_times", False)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> list[tuned.Shape]:
    """Of every other row, which is enough for the order; docs/tuning.md has all."""
    path = tmp_path_factory.mktemp("survey") / "rows.jsonl"
    path.write_text(pack.pack([row for row in survey.load([HALF]) if row["mode"] == "flush"][::2]))
    return tuned.shapes_of(path)


def row(m: int = 64, **changes: Any) -> dict[str, Any]:
    """A survey's row, in which the model's third choice is the fastest."""
    asked = ops.spec(m, 7168, 2048, 132)
    names = [survey.name_of(each.config, asked, SM90) for each in select.rank(asked, SM90)]
    times = {name: 10.0 - (index == 2) for index, name in enumerate(names[:6])}
    about = {"mode": "flush", "device": DEVICE, "source_digest": provenance.source_digest(), "selected": names[0]}
    return {"m": m, "n": 7168, "k": 2048, "times": times} | about | changes


def write(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return path


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", *(row(m) for m in range(8, 200, 8)))
    assert tuned.main([str(path)]) == 0
    assert "rows.jsonl, 24 rows | 0.9000 (0.90) | 1.0000 (1.00) |" in capsys.readouterr().out


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_a_survey_is_kept_for_the_tuner_unless_other_sources_measured_it(tmp_path: Path) -> None:
    incomplete = row(m=96)
    del incomplete["times"][next(iter(incomplete["times"]))]
    given = [
        row(),
        row(mode="promised"),
        row(m=128, source_digest="another"),
        incomplete | {"selected": "other"},
        row(device=7),
    ]
    given[3]["times"]["other"] = 9.5
    path = write(tmp_path / "rows.jsonl", *given)
    report = json.loads(tune("--learn", str(path), "--json").output)["learned"][str(path)]
    assert report == {
        "kept": 1,
        "left out, not single calls": 1,
        "left out, measured by other sources": 1,
        "left out, measured on a GPU without a name": 1,
        "left out, without the model's choice": 1,
    }
    spec, other = ops.spec(64, 7168, 2048, 132), ops.spec(128, 7168, 2048, 132)
    assert tuner.rank(spec, SM90, default(), DEVICE)[0].config == select.rank(spec, SM90)[2].config
    assert tuner.rank(other, SM90, default(), DEVICE)[0].config == select.rank(other, SM90)[0].config
    assert "2 records kept" in tune("--learn", str(path), "--stale").output
    assert tuner.rank(other, SM90, default(), DEVICE)[0].config == select.rank(other, SM90)[2].config


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"source_digest": "another"}, "--stale learns from records that other sources measured too"),
        ({"mode": "promised"}, "survey with --mode flush"),
        ({"device": 7}, "must be the name of the GPU"),
    ],
)
def test_a_survey_that_teaches_nothing_is_no_success(changes: dict[str, Any], advice: str, tmp_path: Path) -> None:
    """Beside one that is learned from, too."""
    useless = write(tmp_path / "rows.jsonl", row(**changes), row(m=96, **changes))
    useful = write(tmp_path / "more.jsonl", row())
    for more in ((), ("--json",), ("--learn", str(useful))):
        found = tune("--learn", str(useless), *more)
        assert found.exit_code == 1, found.output
        assert f"Nothing was learned from {useless}: 2 records left out, " in found.output
        assert advice in found.output
    assert tune("--learn", str(useful)).exit_code == 0


def test_a_survey_can_teach_a_config_outside_the_serving_set(tmp_path: Path) -> None:
    spec = ops.spec(64, 7168, 2048, 132)
    served = [choice.config for choice in select.rank(spec, SM90)]
    best = next(config for config in select.legal(spec, SM90) if config not in served)
    one = row()
    one["times"][survey.name_of(best, replace(spec, m=1, n=128, k=128, expected_m=0), SM90)] = 1.0
    assert "1 record kept" in tune("--learn", str(write(tmp_path / "rows.jsonl", one))).output
    assert tuner.rank(spec, SM90, default(), DEVICE)[0].config == best


def test_shapes_need_a_gpu_and_something_must_be_asked_for() -> None:
    assert (tune().exit_code, "nothing to tune" in tune().output) == (2, True)
    found = tune("--shape", "64x128x256")
    assert (found.exit_code, "torch sees none" in found.output) == (1, not torch.cuda.is_available())


def test_each_measurement_is_a_line_and_what_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a dense layer, a layer of experts, and a shape for which there is no memory."""
    path = tmp_path / "shapes.json"
    entries = [{"n": 4096, "k": 512, "m": [1, 64]}, {"name": "experts", "n": 512, "k": 512, "groups": 4, "m": 64}]
    path.write_text(json.dumps(entries))

    def ours(shape: Any) -> Any:
        def call() -> None:
            if shape.m == 64:
                raise torch.cuda.OutOfMemoryError("no memory")
            spec = ops.spec(shape.m, shape.n, shape.k, 132)
            one, other = (choice.config for choice in select.rank(spec, SM90)[:2])
            for each in measuring._listening:
                each.append(measuring.Tuned(spec, {one: 12.0, other: 10.0}, one, other))

        return call

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "make_operands", lambda shape, sets: [SimpleNamespace(**vars(shape))])
    monkeypatch.setattr(backends, "ours", ours)
    found = tune("--model", str(path))
    text = found.output
    assert found.exit_code == 1
    assert "1 shape of 2 could not be measured" in text
    assert "1 x 4096 x 512: " in text
    assert "12.0 us -> " in text
    assert "10.0 us (1.200), 2 configs in 0.0 s" in text
    assert "left out: 64 x 4096 x 512: no memory" in text
    assert "left out: experts: experts" in text
    assert "1 shape of 2 measured" in text
    report = json.loads(tune("--model", str(path), "--json", "--seconds", "0").output)
    assert report["shapes"] == []
    assert "2 shapes: the time ran out" in report["left_out"]
