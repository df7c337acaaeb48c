"""The benchmarks' own arithmetic: shapes, rows, budgets, summaries. Timing itself needs a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.benchmarks import provenance, run, shapes, timing
from deep_gemm.workload import GemmShape


def test_random_shapes_are_the_same_for_a_seed_and_spread_evenly_in_the_logarithm() -> None:
    first = shapes.log_uniform(400, seed=3)
    assert first == shapes.log_uniform(400, seed=3)
    assert first != shapes.log_uniform(400, seed=4)
    assert all(1 <= s.m <= 8192 and 64 <= s.n <= 32768 and 128 <= s.k <= 16384 for s in first)
    assert all(s.n % 16 == 0 and s.k % 16 == 0 for s in first)
    # Half of the logarithm's range lies below sqrt(8192).
    assert 0.4 < sum(s.m < 90 for s in first) / len(first) < 0.6
    assert any(s.k % 128 for s in first)


def test_named_sets_hold_legal_shapes() -> None:
    for name, make in shapes.SETS.items():
        found = make()
        assert found, name
        assert all(s.m >= 1 and s.n >= 1 and s.k % 16 == 0 for s in found), name
    assert len(shapes.reference()) == 28


def test_bytes_and_flops() -> None:
    shape = GemmShape(2, 128, 256)
    assert shape.flops == 2 * 2 * 128 * 256
    assert shape.bytes_moved() == 2 * 256 + 128 * 256 + 2 * 2 * 128 + 4 * (2 * 2 + 1 * 2)


def test_a_row_says_how_fast_and_against_what() -> None:
    row = run.make_row(GemmShape(4096, 4096, 7168), "flush", {"ours": 200.0, "tensorwise": 180.0}, {"blockwise": "no"})
    assert row["ratio_tensorwise"] == 0.9
    assert row["tflops"] == pytest.approx(2 * 4096 * 4096 * 7168 / 200e-6 / 1e12, rel=1e-3)
    assert "ratio_blockwise" not in row
    assert row["refused_blockwise"] == "no"
    assert "0.900 of tensorwise" in run.line(row)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GemmShape, str]]:
    done: list[tuple[GemmShape, str]] = []

    def measure(shape: GemmShape, mode: str, names: Any) -> run.Row:
        done.append((shape, mode))
        return run.make_row(shape, mode, {"ours": 10.0, "tensorwise": 5.0 * len(done)}, {})

    monkeypatch.setattr(run, "measure", measure)
    return done


def test_rows_are_on_disk_before_the_next_is_measured(measured: list[Any], tmp_path: Path) -> None:
    path, seen = tmp_path / "results" / "rows.jsonl", []
    work = [GemmShape(1, 128, 128), GemmShape(4096, 128, 128)]
    plan = run.Run(work, ("flush", "graph"), output=path, progress=lambda text: seen.append(len(run.load(path))))
    rows = plan.execute()
    # Graph mode is for small M.
    assert [(row["m"], row["mode"]) for row in rows] == [(1, "flush"), (4096, "flush"), (1, "graph")]
    assert seen == [1, 2, 3]
    assert run.load(path) == rows
    assert {"device", "driver", "torch", "date", "source_digest"} <= set(rows[0])


def test_the_time_limit_leaves_out_the_rest_and_says_what(measured: list[Any]) -> None:
    plan = run.Run([GemmShape(1, 128, 128)], seconds=-1.0, progress=lambda text: None)
    assert plan.execute() == []
    assert plan.left_out == ["1 x 128 x 128 flush"]
    assert not measured


def test_summary() -> None:
    assert run.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(run.geometric_mean([]))
    rows = [
        run.make_row(GemmShape(m, 128, 128), "flush", {"ours": 10.0, "tensorwise": 10.0 * ratio}, {})
        for m, ratio in ((1, 0.5), (64, 2.0), (128, 3.0))
    ]
    small, middle = run.summary(rows)
    assert small == {
        "mode": "flush",
        "range": "M <= 64",
        "against": "tensorwise",
        "shapes": 2,
        "geomean": 1.0,
        "worst": 0.5,
        "worst_shape": "1 x 128 x 128",
    }
    assert middle["geomean"] == 3.0


def test_host_time_is_of_one_call() -> None:
    calls = []
    us = timing.host(lambda: calls.append(None), calls=10, rounds=2)
    assert 0 < us < 1e4
    assert len(calls) == 20 + 2 * 10


def test_flush_refuses_too_few_repeats() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        timing.flush({}, repeats=5)


def test_the_source_digest_changes_with_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    def digest(text: str) -> str:
        (tmp_path / "x.cuh").write_text(text)
        return provenance.source_digest()

    assert provenance.source_digest() == provenance.source_digest()
    package = types.SimpleNamespace(__path__=[str(tmp_path)])
    monkeypatch.setattr(provenance.importlib, "import_module", lambda name: package)
    assert digest("a") != digest("b")


def test_what_is_installed_is_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a wheel this says that nothing was forgotten, and that a digest means the same everywhere."""
    import types

    installed = provenance.source_digest()
    root = Path(__file__).parents[2]
    tree = {"deep_gemm": "deep_gemm", "deep_gemm.jit": "jit", "deep_gemm.templates": "templates"}

    def from_tree(name: str) -> Any:
        return types.SimpleNamespace(__path__=[str(root / tree[name])])

    monkeypatch.setattr(provenance.importlib, "import_module", from_tree)
    assert provenance.source_digest() == installed
