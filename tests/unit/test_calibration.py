"""Calibrations: their files, the survey that they are fitted to, and the fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from deep_gemm import arch
from deep_gemm.aot.workload import GemmShape
from deep_gemm.benchmarks import fit, survey
from deep_gemm.benchmarks.modes import LAUNCH_MODES, SURVEY_MODES, WITHIN
from deep_gemm.cli.calibrate import command, surveyed
from deep_gemm.errors import InvalidInputError
from deep_gemm.kernels.features import Features
from deep_gemm.params import UprightConfig
from deep_gemm.select import calibration, candidates, legal
from deep_gemm.select.calibration import (
    BATCH_TOKENS,
    FEW_TOKENS,
    KINDS,
    SOME_TOKENS,
    Calibration,
    Calibrations,
    default,
    file_of,
    kind_of,
)
from deep_gemm.select.model import estimate, features, parts
from deep_gemm.select.power import Power

MANY = default().many_tokens
SHAPES = [
    GemmShape(m, n, k, "test")
    for m in (1, 24, 100, 300, 600, 1000, 1500)
    for n, k in ((2112, 7168), (4096, 512), (7168, 2048))
]


def rows(calibration: Calibrations, kind: str = "") -> list[dict[str, Any]]:
    """What a survey would find on a GPU that does as the model says, for one of `KINDS` or for all of them."""
    out = []
    for shape in SHAPES:
        if kind and kind != kind_of(shape.m):
            continue
        asked = survey.spec_of(shape, 132)
        configs = candidates(asked, arch.SM90)
        times = {
            survey.name_of(c, asked, arch.SM90): round(estimate(asked, c, calibration.of(shape.m)).total_us, 4)
            for c in configs
        }
        row = {"m": shape.m, "n": shape.n, "k": shape.k, "mode": "flush", "times": times}
        out.append(row | {"selected": min(times, key=times.__getitem__), "device": "a model", "date": "never"})
    return out


def test_the_h200_has_a_file() -> None:
    assert file_of("NVIDIA H200").is_file()
    assert default() == Calibrations.from_json(json.loads(file_of("NVIDIA H200").read_text())["constants"])


def test_files_are_named_after_the_gpu() -> None:
    assert file_of("NVIDIA H100 80GB HBM3").name == "nvidia_h100_80gb_hbm3.json"


def test_constants_survive_a_file() -> None:
    assert Calibrations.from_json(json.loads(json.dumps(default().to_json()))) == default()


@pytest.mark.parametrize(
    "wrong",
    [{"clock_ghz": 1.0}, MANY.to_json() | {"speed": 1.0}, MANY.to_json() | {"launch_us": -1.0}],
    ids=["missing", "unknown", "negative"],
)
def test_a_file_with_other_constants_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="holds positive numbers named clock_ghz"):
        Calibration.from_json(wrong)


def test_a_file_for_one_kind_of_problem_is_refused() -> None:
    with pytest.raises(
        InvalidInputError,
        match="for few_tokens, batch_tokens, some_tokens, many_tokens, power, but this one for many_tokens",
    ):
        Calibrations.from_json({"many_tokens": MANY.to_json()})


@pytest.mark.parametrize("kind", KINDS)
def test_every_constant_has_bounds_and_lies_in_them(kind: str) -> None:
    constants = default().to_json()[kind]
    assert set(fit.BOUNDS) == set(constants)
    for name, value in constants.items():
        low, high = fit.BOUNDS[name]
        assert low * 0.999 <= value <= high * 1.001, name


def test_the_number_of_tokens_says_which_constants() -> None:
    assert default().of(FEW_TOKENS) is default().few_tokens
    assert default().of(FEW_TOKENS + 1) is default().of(BATCH_TOKENS) is default().batch_tokens
    assert default().of(BATCH_TOKENS + 1) is default().of(SOME_TOKENS) is default().some_tokens
    assert default().of(SOME_TOKENS + 1) is default().many_tokens


def test_many_pairs_at_once_are_estimated_as_one_by_one() -> None:
    asked = survey.spec_of(SHAPES[-5], 132)
    configs = candidates(asked, arch.SM90)
    together = Features(*(np.array(column) for column in zip(*(features(asked, c) for c in configs), strict=True)))
    totals = parts(together, MANY, np.maximum)["total"]
    alone = [estimate(asked, c, MANY).total_us for c in configs]
    assert np.allclose(totals, alone, rtol=1e-9)


def test_weights_that_several_tiles_ask_for_cost_again() -> None:
    asked = survey.spec_of(GemmShape(200, 2112, 7168, "test"), 132)
    dear = replace(MANY, again=1.0)
    seen = set()
    for config in legal(asked, arch.SM90):
        several = config.block_m * config.cluster_m < asked.m
        seen.add(several)
        assert (estimate(asked, config, dear).hbm_us > estimate(asked, config, MANY).hbm_us) == several, config
    assert seen == {False, True}


def test_wide_tiles_wait_longer_for_their_first_stage() -> None:
    """What all CTAs begin with comes from HBM before any of it is worked on."""
    asked = survey.spec_of(GemmShape(128, 32768, 512, "test"), 132)
    alone = [c for c in legal(asked, arch.SM90) if c.cluster_size == c.ctas_per_sm == 1]
    lone = {(c.block_m, c.block_n): features(asked, c) for c in alone if isinstance(c, UprightConfig)}
    # 128 CTAs with 256 rows of B each, 132 with 64: all have the same rows of A.
    assert lone[128, 256].first == 128 * (128 * 256 + 128)
    assert lone[128, 64].first == 128 * (132 * 64 + 128)
    assert {x.first + x.traffic for x in lone.values()} == {128 * 512 + 32768 * 512 + 2 * 128 * 32768}
    slow = replace(MANY, start_gb_per_s=MANY.start_gb_per_s / 2)
    for x in lone.values():
        later = parts(x, slow)["total"] - parts(x, MANY)["total"]
        assert math.isclose(later, x.first / (MANY.start_gb_per_s * 1e3), rel_tol=1e-6)


def test_rows_that_begin_inside_lines_are_asked_for_twice_but_less_often_by_clusters() -> None:
    # Where lines cost so much that nothing else of the way from L2 matters.
    dear = replace(MANY, line_cycles=1e6, hanging_cycles=2e6, crowded_cycles=1e-6)
    whole = survey.spec_of(GemmShape(4096, 4096, 512, "test"), 132)
    alone = {(c.block_m, c.block_n): c for c in legal(whole, arch.SM90) if c.cluster_size * c.ctas_per_sm == 1}
    # Four blocks each, of which the last ends past K. Rows of 400 bytes: seven of eight begin at another multiple of 16
    # than lines, and four of them inside a sector.
    for k, inside, torn in ((448, 1 / 2, 0), (480, 3 / 4, 0), (400, 7 / 8, 1 / 2)):
        other = survey.spec_of(GemmShape(4096, 4096, k, "test"), 132)
        lines = 1 + (MANY.unaligned - 1) * inside + MANY.torn * torn
        runs = set(legal(other, arch.SM90))
        for config in legal(whole, arch.SM90):
            if config in runs:
                once, more = (estimate(asked, config, dear).shared_us for asked in (whole, other))
                assert math.isclose(more / once, lines + 2 * min(config.cluster_k, 4) / 4, rel_tol=1e-5), config
    pair = next(c for c in legal(whole, arch.SM90) if c.cluster_m == 2)
    single = alone[pair.block_m, pair.block_n]
    asked = (features(whole, c).asked for c in (pair, single))
    assert tuple(asked) == (pair.block_m + pair.block_n / 2, pair.block_m + pair.block_n)


def test_rows_that_begin_inside_sectors_crowd_the_l2_less_where_clusters_share_them() -> None:
    # 98 CTAs want all of A, in steps of eight rows; or 49 pairs of them; or 65 in each of two rows of tiles.
    asked = {k: survey.spec_of(GemmShape(198, 12480, k, "test"), 132) for k in (144, 288, 160, 192, 256)}
    lone = {
        (c.block_m, c.block_n, c.cluster_n): c for c in legal(asked[144], arch.SM90) if c.cluster_m * c.k_shares == 1
    }
    every, pairs, halves = (lone[key] for key in ((256, 128, 1), (256, 128, 2), (128, 192, 1)))
    crowded = {k: features(problem, every).crowded for k, problem in asked.items()}
    assert math.isclose(crowded[144], 200 * 98 / 132 / 2)
    assert math.isclose(features(asked[144], pairs).crowded, crowded[144] / 4)  # half as many, of half the rows each
    assert math.isclose(features(asked[144], halves).crowded, 128 * 65 / 132 / 2)
    assert math.isclose(crowded[160], 0.4 * 200 * 98 / 132 / 2)
    assert math.isclose(crowded[288], 0.4 * 200 * 98 / 132 / 3)
    assert crowded[192] == crowded[256] == 0
    # More tiles than run at a time: 16 rows of 128, in 16 waves.
    many = survey.spec_of(GemmShape(4096, 16384, 144, "test"), 132)
    assert math.isclose(features(many, every).crowded, 256 * 8 / 132 / 2)
    # Where it costs so much that nothing else of the way from L2 matters: two blocks.
    dear = estimate(asked[144], every, replace(MANY, crowded_cycles=1e6)).shared_us
    assert math.isclose(dear, 2 * crowded[144] * 1e6 * 1e-3 / MANY.clock_ghz, rel_tol=1e-3)


def test_tiles_are_stored_while_the_next_are_multiplied() -> None:
    asked = survey.spec_of(GemmShape(4096, 4096, 512, "test"), 132)
    slow = replace(MANY, epilogue_us=100.0)
    waves = set()
    for config in legal(asked, arch.SM90):
        more, less = (estimate(asked, config, c) for c in (slow, MANY))
        seen = (more.epilogue_us - less.epilogue_us) / (100 - MANY.epilogue_us)
        assert math.isclose(seen, 1 + (less.waves - 1) * (1 - MANY.epilogue_hidden), rel_tol=1e-6), config
        waves.add(less.waves)
    assert len(waves) > 4


def test_ctas_that_share_an_sm_share_its_way_out() -> None:
    asked = survey.spec_of(GemmShape(4096, 4096, 512, "test"), 132)
    slow = replace(MANY, epilogue_elements_per_us=MANY.epilogue_elements_per_us / 10)
    found = {}
    for c in legal(asked, arch.SM90):
        if isinstance(c, UprightConfig) and (c.block_m, c.block_n, c.cluster_size) == (64, 64, 1):
            x = features(asked, c)
            stored = parts(x, slow)["epilogue"] - parts(x, MANY)["epilogue"]
            found[c.ctas_per_sm] = stored / (1 + (x.waves - 1) * (1 - MANY.epilogue_hidden))
    assert math.isclose(found[2], 2 * found[1], rel_tol=1e-6)


def test_a_climb_loses_less_and_sees_only_its_shapes_and_their_weights() -> None:
    all_rows = rows(default(), "many_tokens")
    data = fit.Data.of(all_rows, arch.SM90)
    start = replace(MANY, promote_cycles=MANY.promote_cycles * 2, line_cycles=MANY.line_cycles * 3, epilogue_us=0.05)
    found = fit.climb(data, start, tries=60)
    assert data.felt(found) < data.felt(start)
    assert found == fit.climb(data, start, tries=60)
    for name, (low, high) in fit.BOUNDS.items():
        assert low <= getattr(found, name) <= high or getattr(found, name) == getattr(start, name), name
    kept = torch.arange(len(data.held_out)) % 3 > 0
    other = replace(data, log_lost=data.log_lost + torch.where(kept[data.shape], 0.0, 1.0))
    assert fit.climb(data, start, kept, tries=60) == fit.climb(other, start, kept, tries=60)
    weighted = fit.Data.of([row | {"weight": 3.0 * (index == 0)} for index, row in enumerate(all_rows)], arch.SM90)
    first = torch.arange(len(data.held_out)) == 0
    assert weighted.felt(start) == pytest.approx(data.felt(start, first))


def test_a_gpu_that_does_as_the_model_says_is_selected_for_perfectly() -> None:
    data = fit.Data.of(rows(default(), "many_tokens"), arch.SM90)
    assert data.selected(MANY).min() > 0.9999
    right = data.loss(MANY)
    for name in ("tensor_ghz", "promote_cycles", "epilogue_us", "l2_gb_per_s", "launch_us"):
        wrong = replace(MANY, **{name: getattr(MANY, name) * 3})
        assert data.loss(wrong) > right, name


def test_the_fit_finds_constants_that_select_well() -> None:
    other = replace(MANY, promote_cycles=MANY.promote_cycles * 1.3, hbm_gb_per_s=3000.0)
    data = fit.Data.of(rows(replace(default(), many_tokens=other), "many_tokens"), arch.SM90)
    threads = torch.get_num_threads()
    found = fit.fit(data, MANY)
    assert data.loss(found) < data.loss(fit.middle())
    assert data.loss(found) < 0.7 * data.loss(MANY)
    assert torch.get_num_threads() == threads


def test_launches_that_overlap_are_shorter_and_no_less_right() -> None:
    alone = rows(default(), "many_tokens")
    hidden = {"flush": 0.0, "promised": 3.0, "unpromised": 2.0}
    for index, row in enumerate(alone):
        row["mode"] = LAUNCH_MODES[index % 3]
        row["times"] = {name: us - hidden[row["mode"]] for name, us in row["times"].items()}
    data = fit.Data.of(alone, arch.SM90)
    right, least = (data.loss(MANY, hidden=torch.tensor(us)) for us in ([0.0, 3.0, 2.0], [0.0, 0.0, 0.0]))
    swapped = data.loss(MANY, hidden=torch.tensor([0.0, 2.0, 3.0]))
    assert right < 0.9 * swapped < 0.9 * least


def test_a_fit_does_not_see_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "STEPS", 40)
    data = fit.Data.of(rows(default(), "many_tokens"), arch.SM90)
    kept = torch.arange(len(data.held_out)) % 3 > 0
    other = replace(data, log_us=data.log_us + torch.where(kept[data.shape], 0.0, 1.0))
    found, blind = (fit.fit(some, fit.middle(), kept) for some in (data, other))
    assert found == blind
    assert fit.fit(other, fit.middle()) != blind


@pytest.mark.parametrize(
    ("kind", "files", "worst"),
    [
        ("few_tokens", ["survey-few.jsonl"], 0.67),
        ("batch_tokens", ["survey.jsonl", "survey-batch.jsonl"], 0.86),
        ("some_tokens", ["survey.jsonl"], 0.89),
        ("many_tokens", ["survey.jsonl"], 0.85),
    ],
)
def test_the_h200s_constants_select_no_worse_than_its_file_says(kind: str, files: list[str], worst: float) -> None:
    """On the surveys that they were fitted to, of which a few rows have no two configs any more: a change of the model
    that loses by it needs another fit. The file's worst rows are of more configs than calls choose among now."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found = survey.load([results / file for file in files])
    data = fit.Data.of([row for row in found if kind_of(row["m"]) == kind], arch.SM90)
    selected = data.selected(getattr(default(), kind)).tolist()
    written = json.loads(file_of("NVIDIA H200").read_text())["fit"][kind]
    assert 0.97 * written["shapes"] < len(selected) <= written["shapes"]
    assert geometric_mean(selected) >= written["selected_over_best"]
    assert min(selected) > worst


def test_calibrate_alone_surveys_as_its_first_step_would_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Fake:
        def __init__(self, *arguments: Any) -> None:
            asked.extend(arguments)

        def rows(self) -> list[dict[str, Any]]:
            return rows(default(), "many_tokens") * 10

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a model")
    monkeypatch.setattr(survey, "Survey", Fake)
    names = {"a model": tmp_path / "calibrations" / "a_model.json"}
    monkeypatch.setattr(calibration, "file_of", lambda name: names.get(name) or file_of(name))
    monkeypatch.setattr(fit, "STEPS", 2)
    result = CliRunner().invoke(command, ["--seconds", "7"])
    assert result.exit_code == 0, result.output
    shapes, modes, within, seconds, _ = asked
    assert shapes == surveyed(160, seed=1, public=True, min_m=1, max_m=8192)
    assert (modes, within, seconds) == (SURVEY_MODES, WITHIN, 7.0)
    assert json.loads(names["a model"].read_text())["fit"]["many_tokens"]["shapes"] == 90


def test_check_reports_each_mode(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(default())))
    result = CliRunner().invoke(command, ["check", str(path)])
    assert result.exit_code == 0, result.output
    assert f"flush: selected / best 1.0000 over {len(SHAPES)} shapes, worst 1.000" in result.output


@pytest.fixture
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is written of a fit, not how good it is."""
    monkeypatch.setattr(fit, "STEPS", 20)
    monkeypatch.setattr(fit, "TRIES", 100)


@pytest.mark.usefixtures("short_fits")
def test_fit_writes_a_file_that_loads(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out" / "gpu.json"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(default())))
    arguments = ["fit", str(source), "--output", str(output), "--least", "3"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    Calibrations.from_json(written["constants"])
    assert sum(part["shapes"] for part in written["fit"].values()) == len(SHAPES)
    assert Power.from_json(written["constants"]["power"]) == default().power  # nothing was timed back to back
    assert written["survey"]["device"] == "a model"
    assert written["survey"]["files"] == ["rows.jsonl"]


@pytest.mark.usefixtures("short_fits")
def test_constants_that_graphs_count_for_are_climbed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From known ones, and blind: two climbs each for few tokens and for a batch, none for more."""
    source, climbed = tmp_path / "rows.jsonl", []

    def climb(data: fit.Data, start: Calibration, shapes: torch.Tensor | None = None) -> Calibration:
        climbed.append([kind for kind in KINDS if getattr(default(), kind) == start] if shapes is None else "blind")
        return start

    monkeypatch.setattr(fit, "climb", climb)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(default())))
    arguments = ["fit", str(source), "--output", str(tmp_path / "gpu.json"), "--least", "3"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert climbed == [["few_tokens"], "blind", ["batch_tokens"], "blind"]


@pytest.mark.usefixtures("short_fits")
def test_constants_without_rows_are_kept(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "gpu.json"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(default(), "many_tokens")))
    result = CliRunner().invoke(command, ["fit", str(source), "--output", str(output)])
    assert result.exit_code == 1
    assert "too few rows to fit any constants: 9 in all" in result.output
    assert not output.exists()
    result = CliRunner().invoke(command, ["fit", str(source), "--output", str(output), "--least", "3"])
    assert result.exit_code == 0, result.output
    assert "few_tokens: constants are as they were, since 0 rows are too few" in result.output.replace("\n", " ")
    written = json.loads(output.read_text())
    made = Calibrations.from_json(written["constants"])
    assert [getattr(made, kind) for kind in KINDS[:-1]] == [getattr(default(), kind) for kind in KINDS[:-1]]
    assert set(written["fit"]) == {"many_tokens"}


def test_what_is_multiplied_in_two_parts_takes_longer() -> None:
    """A consumer of a 128 x 256 tile has more columns than fit one instruction, one of 256 x 128 twice the rows."""
    asked = survey.spec_of(GemmShape(4096, 4096, 7168, "test"), 132)
    configs = {survey.name_of(c, asked, arch.SM90): c for c in legal(asked, arch.SM90)}
    wide, tall = configs["fp8_gemm_128x256_s3_p1_tma"], configs["fp8_gemm_256x128_s3_p1_tma"]
    assert (features(asked, wide).in_parts, features(asked, tall).in_parts) == (1, 0)
    dear = replace(MANY, parts_cycles=10 * MANY.parts_cycles)
    assert estimate(asked, wide, MANY).total_us > estimate(asked, tall, MANY).total_us
    assert estimate(asked, wide, dear).total_us > estimate(asked, wide, MANY).total_us
    assert estimate(asked, tall, dear) == estimate(asked, tall, MANY)
