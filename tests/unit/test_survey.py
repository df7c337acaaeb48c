"""Surveys: shapes, modes, and the time of a config."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pack
import pytest
import torch
import tuned
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import ops, options, select
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.bench import backends, provenance, survey
from deep_gemm.bench.modes import LAUNCH_MODES, SURVEY_MODES
from deep_gemm.cli.app import app
from deep_gemm.cli.calibrate import CALIBRATION_M, RANGES, command, range_of, surveyed
from deep_gemm.errors import InvalidInputError
from deep_gemm.runtime import measuring
from deep_gemm.runtime.timer import middle_mean, times_of
from deep_gemm.select import tuner
from deep_gemm.select.calibration import default


def test_quality_is_best_over_selected() -> None:
    row: survey.Row = {"mode": "flush", "m": 4, "n": 256, "k": 15872, "selected": "a", "times": {"a": 4.0, "b": 3.0}}
    assert survey.quality(row) == 0.75
    assert "2 configs" in survey.line(row)
    assert "0.750" in survey.line(row)
    assert "2 of 596 configs" in survey.line(row | {"legal": 596})


def test_packed_rows_are_the_same_rows(tmp_path: Path) -> None:
    """With plain rows after them, as `calibrate survey` appends."""
    row: dict[str, Any] = {"mode": "flush", "m": 1, "n": 8, "k": 16, "selected": "b", "device": "x"}
    some = [row | {"times": {"a": 2.0, "b": 1.5}}, row | {"times": {"b": 3.0}, "date": "today"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(pack.pack(some))
    assert path.read_text().count('"b"') == 3, "once as a name, and selected twice"
    with path.open("a") as file:
        file.write(json.dumps(some[0]) + "\n")
    assert survey.load([path]) == [*some, some[0]]


@pytest.mark.parametrize("times", [[[7], [1.0]], [[0], [1.0, 2.0]], [[0]], [["a"], [1.0]], [1, 2]])
def test_packed_times_without_a_config_are_refused(tmp_path: Path, times: Any) -> None:
    lines = [{"mode": "packed", "configs": ["a"]}, {"mode": "flush", "m": 1, "n": 8, "k": 16, "times": times}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidInputError, match=r"times in line 2 of .* must be two lists of one length"):
        survey.load([tmp_path / "rows.jsonl"])


def test_a_lucky_time_is_taken_back() -> None:
    """The least of many noisy times is too low: contenders are timed again, and configs far behind are not."""
    readings = {
        "lucky": [3.0, 4.0, 4.1, 4.2],
        "steady": [3.1, 3.1, 3.2, 3.1],
        "far": [5.0],
        "selected": [6.0, 5.5, 5.6, 5.4],
    }
    left = {name: iter(values) for name, values in readings.items()}
    times = times_of({name: left[name].__next__ for name in left}, "selected")
    assert times == {"lucky": 4.1, "steady": 3.1, "far": 5.0, "selected": 5.5}
    assert all(next(values, None) is None for values in left.values())  # exactly this often


def test_a_survey_has_as_many_shapes_as_asked_for_in_any_order() -> None:
    found = surveyed(50, seed=3, public=True, min_m=65, max_m=500)
    drawn = [shape for shape in found if shape.source != "DeepSeek-V3"]
    public = [shape for shape in found if shape.source == "DeepSeek-V3"]
    assert (len(drawn), len(public)) == (50, 7 * sum(65 <= m <= 500 for m in CALIBRATION_M))
    assert all(65 <= shape.m <= 500 and shape.n % 8 == 0 for shape in found)
    assert found == surveyed(50, seed=3, public=True, min_m=65, max_m=500)
    assert found != sorted(found, key=lambda shape: shape.source == "DeepSeek-V3")
    # More shapes begin with the same ones.
    more = surveyed(80, seed=3, public=False, min_m=65, max_m=500)
    assert set(drawn) < set(more)
    assert surveyed(0, seed=3, public=False, min_m=1, max_m=8192) == []


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_a_survey_as_it_comes_has_rows_enough_for_all_constants(seed: int) -> None:
    """With fewer rows, `fit` keeps the constants of an H200. If M were drawn evenly, most rows would have few
    tokens."""
    defaults = {option.name: option.default for name in ("survey", "fit") for option in command.commands[name].params}
    found = surveyed(defaults["count"], seed, public=True, min_m=1, max_m=8192)
    rows = Counter(range_of(s.m) for s in found for mode in LAUNCH_MODES if survey.is_surveyed(s, mode))
    assert set(rows) == {range_of(m) for m in (*RANGES, RANGES[-1] + 1)}
    assert min(rows.values()) >= defaults["least"]
    drawn = [shape for shape in found if shape.source != "DeepSeek-V3"]
    of = Counter(range_of(s.m) for s in drawn for mode in LAUNCH_MODES if survey.is_surveyed(s, mode))
    assert max(of.values()) - min(of.values()) <= 3
    assert len(drawn) == defaults["count"]


def test_a_survey_without_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, *_: Any) -> None: ...

        def rows(self) -> list[dict[str, Any]]:
            return []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(survey, "Survey", Fake)
    result = CliRunner().invoke(command, ["survey", "--output", str(tmp_path / "rows.jsonl"), "--seconds", "1"])
    assert result.exit_code == 1
    assert "nothing was timed" in result.output
    assert "all of the 1 s" in result.output


def test_only_long_problems_are_timed_back_to_back() -> None:
    def modes(*shape: int) -> list[str]:
        return [mode for mode in SURVEY_MODES if survey.is_surveyed(GemmShape(*shape, "test"), mode)]

    assert modes(1, 7168, 2048) == ["flush", "promised", "unpromised"]
    assert modes(512, 7168, 2048) == ["flush"]
    assert modes(4096, 7168, 2048) == ["flush", "steady"]
    assert modes(4096, 576, 7168) == ["flush"]


@pytest.fixture
def surveyable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which nothing is built or timed."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(survey.archs, "for_device", lambda device: SM90)
    monkeypatch.setattr(survey.options, "num_sms_for", lambda device: SM90.num_sms)
    monkeypatch.setattr(survey.engine, "calibration_of", lambda device: default())
    monkeypatch.setattr(survey.Survey, "_build", lambda *_: None)


def test_a_survey_times_each_shape_in_the_modes_that_are_about_it(
    surveyable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timers(shape: GemmShape, asked: Any, configs: Any, *rest: Any) -> Any:
        return ((survey.name_of(config, asked, SM90), lambda: 1.0) for config in configs)

    monkeypatch.setattr(survey, "timers_of", timers)
    shapes = [GemmShape(512, 7168, 2048), GemmShape(4096, 7168, 2048)]
    rows = list(survey.Survey(shapes, SURVEY_MODES, within=1.01, progress=lambda text: None).rows())
    assert [(row["m"], row["mode"]) for row in rows] == [(512, "flush"), (4096, "flush"), (4096, "steady")]
    # Even if the model ranks configs outside of the serving set higher.
    assert all(row["selected"] in row["times"] for row in rows)


def test_a_mean_of_the_middle_half_is_between_two_values_that_take_turns() -> None:
    assert middle_mean([3.5, 4.3] * 10) == pytest.approx(3.9)
    assert middle_mean([1.0, 900.0, 2.0, 3.0]) == 2.5  # outliers do not count
    assert middle_mean([7.0]) == 7.0


class Look:
    """A fake timer: the time of a first look, then those of full measurements."""

    def __init__(self, look: float, us: float) -> None:
        self._look, self.us, self.timed = look, us, 0

    def look(self) -> float:
        return self._look

    def __call__(self) -> float:
        self.timed += 1
        return self.us


def test_what_is_far_behind_at_first_sight_is_not_timed() -> None:
    timers = {"best": Look(11.0, 10.0), "lucky": Look(10.0, 12.0), "slow": Look(13.6, 9.0), "near": Look(13.4, 13.0)}
    assert list(survey.promising(timers, "near")) == ["best", "lucky", "near"]
    assert "slow" in survey.promising(timers, "slow")


def test_with_everything_the_model_has_no_say(surveyable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config that the model ranks last may be the best one."""
    shape = GemmShape(300, 2112, 1152)
    asked = survey.spec_of(shape, SM90.num_sms)
    names = [survey.name_of(config, asked, SM90) for config in select.legal(asked, SM90)]
    ranked = [survey.name_of(choice.config, asked, SM90) for choice in select.rank(asked, SM90)]
    best = next(name for name in names if name not in ranked)
    looks = {name: Look(50.0, 50.0) for name in names} | {best: Look(5.0, 5.0), ranked[0]: Look(40.0, 40.0)}

    def timers(shape: GemmShape, asked: Any, configs: Any, *rest: Any) -> Any:
        return ((survey.name_of(config, asked, SM90), looks[survey.name_of(config, asked, SM90)]) for config in configs)

    monkeypatch.setattr(survey, "timers_of", timers)
    (row,) = survey.Survey([shape], everything=True, progress=lambda text: None).rows()
    assert row["legal"] == len(names) > len(ranked)
    assert row["times"] == {best: 5.0, ranked[0]: 40.0}
    assert survey.quality(row) == 0.125


NOISE = 0.05
"""Single calls on an H200 differ by 2 to 5%."""


@given(
    st.lists(st.tuples(st.floats(2.0, 5000.0), st.floats(1 - NOISE, 1 + NOISE)), min_size=1, max_size=40),
    st.integers(0, 39),
)
def test_noise_of_single_calls_hides_neither_the_best_nor_the_selected(
    configs: list[tuple[float, float]], selected: int
) -> None:
    timers = {
        f"{i}": SimpleNamespace(look=lambda us=us, noise=noise: us * noise) for i, (us, noise) in enumerate(configs)
    }
    chosen = f"{selected % len(configs)}"
    found = survey.promising(timers, chosen)
    best = min(range(len(configs)), key=lambda index: configs[index][0])
    assert {f"{best}", chosen} <= found.keys()
    assert all(found[name] is timers[name] for name in found)


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
