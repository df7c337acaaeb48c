"""The table that `bench` prints while it runs: cells end under their headings, and rows appear as they are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import costs, run, shapes
from deep_gemm.bench.live import LiveTable
from deep_gemm.cli import bench
from deep_gemm.cli.app import app

SIZES = st.integers(1, 20_000)


def under(heading: str, line: str, title: str) -> str:
    """The cell of `line` that ends where `title` ends in the heading."""
    end = heading.index(title) + len(title)
    return line[:end].split()[-1]


@given(
    st.builds(GemmShape, SIZES, SIZES, SIZES),
    st.floats(20.0, 1500.0),
    st.floats(0.01, 99.0),
    st.sampled_from(["flush", "steady"]),
)
def test_cells_end_where_their_headings_end(shape: GemmShape, tflops: float, ratio: float, mode: str) -> None:
    ours = max(shape.flops / tflops / 1e6, shape.bytes_moved() / 4.8e6)  # no faster than a GPU can be
    row = run.make_row(shape, mode, {"ours": ours, "tensorwise": ratio * ours}, {"blockwise": "N is too small"})
    _, heading, line, why = LiveTable(run.OTHERS).add(row, 9, 10).splitlines()
    assert line.split()[0] == "9/10"
    assert [int(under(heading, line, name)) for name in "MNK"] == [shape.m, shape.n, shape.k]
    assert float(under(heading, line, "tensorwise")) == pytest.approx(row["ratio_tensorwise"], abs=1e-3)
    assert under(heading, line, "blockwise") == "-"
    assert why == "blockwise is not timed: N is too small"


def test_a_heading_comes_once_and_again_where_columns_change() -> None:
    table = LiveTable(run.OTHERS)
    us = {"ours": 5.0, "ours_unpromised": 6.0, "tensorwise": 9.0}
    small, large = GemmShape(1, 2112, 7168), GemmShape(100, 2112, 7184)
    assert len(table.add(run.make_row(small, "flush", us, {})).splitlines()) == 3
    assert len(table.add(run.make_row(large, "flush", us, {})).splitlines()) == 1
    first = table.add(run.make_row(small, "graph", us, {})).splitlines()
    second = table.add(run.make_row(large, "graph", us, {}))
    assert first[0] == "", "tables are set apart"
    assert under(first[2], first[3], "us, no promise") == "6.00"
    assert under(first[2], first[3], "of floor") == "0.76"
    assert under(first[2], second, "of floor") == "-", "a missing number needs no new heading"


def test_an_operation_that_is_not_fp8_is_named() -> None:
    (shape,) = shapes.posed([GemmShape(64, 128, 256)], "bf16_gemm_nn", "", True)
    row = run.make_row(shape, "flush", {"ours": 5.0, "cublaslt": 10.0}, {})
    *_, heading, line = LiveTable(run.OTHERS).add(row).splitlines()
    assert under(heading, line, "cublaslt") == "2.000"
    assert line.endswith("bf16_gemm_nn, added")


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ({"mode": "host", "what": "a call", "us": 6.04}, {"us": "6.0"}),
        ({"mode": "compile", "what": "k, nvrtc", "us": 2500.0, "ptxas_ms": 2.0}, {"all ms": "2.5", "ptxas": "2.0"}),
        ({"mode": "dims", "what": "1 x 2 x 3", "us": 8.0, "us_nk": 10.0, "ratio_nk": 1.25}, {"ratio": "1.250"}),
        ({"mode": "kernels", "what": "576 x 7168", "kernels": 4, "kernels_nk": 9}, {"N, K compiled in": "9"}),
    ],
)
def test_costs_have_columns_of_their_own(row: dict[str, Any], cells: dict[str, str]) -> None:
    _, heading, line = LiveTable().add(row).splitlines()
    assert line.endswith(row["what"])
    for title, cell in cells.items():
        assert under(heading, line, title) == cell


def test_bench_prints_each_row_before_the_next_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a pipe, as on a terminal."""
    path = tmp_path / "printed"
    seen: list[str] = []

    def measure(shape: GemmShape, mode: str, names: Any) -> run.Row:
        seen.append(path.read_text() if path.exists() else "")
        return run.make_row(shape, mode, {"ours": 10.0, "tensorwise": 5.0}, {})

    class Writing:
        def print(self, text: Any) -> None:
            path.write_text((path.read_text() if path.exists() else "") + f"{text}\n")

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(bench, "_need_gpu", lambda modes: None)
    monkeypatch.setattr(bench, "console", Writing)
    result = CliRunner().invoke(app, ["bench", "--shape", "1x128x256", "--shape", "64x128x256"])
    assert result.exit_code == 0, result.output
    assert "1/2" not in seen[0]
    assert "1/2" in seen[1]
    assert "2/2" not in seen[1]
    assert "2/2" in path.read_text()


def test_bench_prints_costs_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(costs.MODES, "cold", lambda: iter([{"mode": "cold", "what": "import", "us": 1234.5}]))
    result = CliRunner().invoke(app, ["bench", "--mode", "cold"])
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.output.splitlines()] == [["cold"], ["us", "what"], ["1234.5", "import"]]
