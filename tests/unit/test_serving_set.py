"""The worth of config features, and the best small sets of configs, on made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.benchmarks import serving_set
from deep_gemm.errors import DeepGemmError

PLAIN, TWO, ONCE = "fp8_gemm_128x128_s5_p2_tma", "fp8_gemm_64x32_s8_p2_r2_direct", "fp8_gemm_64x128_s9_p2_once_tma"
SPLIT, GONE = "fp8_gemm_swapped_16x64_s20_p2_k2x2_tma_n2112_k7168", "fp8_gemm_small_64x16_s16_k2_tma"


def row(m: int, times: dict[str, float], mode: str = "flush") -> dict[str, Any]:
    return {"m": m, "n": 8, "k": 128, "mode": mode, "selected": min(times), "times": times}


ROWS = [
    row(16, {SPLIT: 4.0, TWO: 5.0, PLAIN: 8.0, GONE: 2.0}),
    row(64, {SPLIT: 9.0, TWO: 6.0, PLAIN: 12.0}),
    row(64, {SPLIT: 2.0, TWO: 2.2}, "promised"),
    row(4096, {PLAIN: 100.0, ONCE: 110.0}),
]


@pytest.mark.parametrize(
    ("name", "features"),
    [
        (PLAIN, {"upright", "upright 128x128"}),
        (TWO, {"upright", "upright 64x32", "upright r2"}),
        (ONCE, {"upright", "upright 64x128", "upright once"}),
        (SPLIT, {"swapped", "swapped 16x64", "swapped k2x2"}),
        ("fp8_gemm_128x192_s4_p1_c2x1_tma", {"upright", "upright 128x192", "upright c2x1"}),
    ],
)
def test_names_tell_features(name: str, features: set[str]) -> None:
    assert serving_set.features_of(serving_set.config_of(name)) == features


def test_another_name_is_refused_in_words() -> None:
    with pytest.raises(DeepGemmError, match="'transpose_scales' is no name of a GEMM kernel"):
        serving_set.config_of("transpose_scales")


def test_stores_of_one_config_are_one() -> None:
    (times,) = serving_set.by_config([row(1, {PLAIN: 3.0, PLAIN.replace("tma", "direct"): 2.0, TWO: 4.0})])
    assert times == {"upright 128x128": 1.0, "upright 64x32 r2": 2.0}


def test_a_feature_is_worth_what_rows_take_without_it() -> None:
    worth = serving_set.worth(ROWS, serving_set.by_config(ROWS, serving_set.legal_configs(ROWS)))
    assert set(worth["swapped"]) == {"flush, M <= 64", "promised, M <= 64", "flush, M >= 1000"}
    # One of two rows takes 5 instead of 4 without it; the other is best without it.
    assert worth["swapped"]["flush, M <= 64"] == pytest.approx(1.25**0.5)
    assert worth["swapped k2x2"]["promised, M <= 64"] == pytest.approx(1.1)
    assert worth["upright r2"] == pytest.approx(
        {"flush, M <= 64": 1.5**0.5, "promised, M <= 64": 1.0, "flush, M >= 1000": 1.0}
    )
    # Nothing else was timed there.
    assert worth["upright"]["flush, M >= 1000"] == serving_set.MISSING


def test_the_first_serves_best_alone_and_the_others_beside_it() -> None:
    table = serving_set.by_config(ROWS, serving_set.legal_configs(ROWS))
    chosen = serving_set.greedy(table, 10)
    assert chosen[:3] == ["upright 64x32 r2", "swapped 16x64 k2x2", "upright 128x128"]
    assert sorted(chosen) == sorted({config for times in table for config in times})


RATIOS = st.lists(st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 3.0), min_size=1), min_size=1, max_size=8)


@given(RATIOS, st.integers(1, 6))
def test_more_kernels_never_lose_more(table: list[dict[str, float]], count: int) -> None:
    chosen = serving_set.greedy(table, count)
    losses = [serving_set.loss(table, set(chosen[:size]).__contains__) for size in range(len(chosen) + 1)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(chosen)) == len(chosen) == min(count, len({config for times in table for config in times}))


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    assert serving_set.main(["--list", "1", str(path)]) == 0
    said = capsys.readouterr().out
    assert "(2) flush, M >= 1000" in said
    assert [line.split() for line in said.splitlines() if line.startswith("the best 24")] == [
        ["the", "best", "24", *["0.00"] * 4]
    ]
    assert said.endswith("\nupright 64x32 r2\n")
    assert "small" not in said
    serving_set.main(["--all", str(path)])
    assert "small 64x16" in capsys.readouterr().out
    path.write_text(json.dumps(row(1, {GONE: 1.0})))
    with pytest.raises(DeepGemmError, match="no row of a config that is legal"):
        serving_set.main([str(path)])
