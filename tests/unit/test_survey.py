"""Surveys: shapes, modes, and the time of a config."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pack
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import select
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.bench import survey
from deep_gemm.bench.modes import LAUNCH_MODES, SURVEY_MODES
from deep_gemm.cli.calibrate import CALIBRATION_M, RANGES, command, range_of, surveyed
from deep_gemm.errors import InvalidInputError
from deep_gemm.runtime.timer import middle_mean, times_of
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
