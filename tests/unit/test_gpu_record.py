"""When tests/gpu/last_run.json is written, and its content."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_record import GpuRecord

Tests = list[tuple[str, str]]  # file and outcome of each


def play(
    directory: Path, tests: Tests, stop: int | None = None, processes: int = 0, **options: Any
) -> dict[str, Any] | None:
    """The record after a run of ``tests``, of which only the first ``stop`` finish. Several processes run them side by
    side, or this one does."""
    record = GpuRecord(directory)
    option = SimpleNamespace(**({"keyword": "", "markexpr": "", "lf": False} | options))
    config = SimpleNamespace(args=["gpu"], option=option)
    items = [SimpleNamespace(path=directory / name) for name, _ in tests]
    session: Any = SimpleNamespace(items=items, config=config)
    for _ in range(processes):
        node: Any = SimpleNamespace(config=config)
        record.pytest_xdist_node_collection_finished(node, [f"tests/gpu/{name}::test" for name, _ in tests])
    if not processes:
        record.pytest_collection_finish(session)
    for name, outcome in tests[:stop]:
        nodeid = f"tests/gpu/{name}::test"
        phases = [("setup", outcome)] if outcome == "skipped" else [("setup", "passed"), ("call", outcome)]
        for when, result in (*phases, ("teardown", "passed")):
            report: Any = SimpleNamespace(nodeid=nodeid, when=when, outcome=result, passed=result == "passed")
            record.pytest_runtest_logreport(report)
        record.pytest_runtest_logfinish(nodeid)
    elsewhere: Any = SimpleNamespace(nodeid="tests/unit/test_a.py::test", when="call", outcome="passed", passed=True)
    record.pytest_runtest_logreport(elsewhere)
    record.pytest_runtest_logfinish(elsewhere.nodeid)
    return json.loads(record.path.read_text()) if record.path.exists() else None


A: Tests = [("test_a.py", "passed"), ("test_a.py", "failed")]
B: Tests = [("test_b.py", "passed"), ("test_b.py", "skipped")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "gpu"
    folder.mkdir()
    for name in ("test_a.py", "test_b.py"):
        (folder / name).touch()
    return folder


def counts(passed: int, failed: int, skipped: int) -> dict[str, int]:
    return {"passed": passed, "failed": failed, "skipped": skipped}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_whole_run_is_recorded(directory: Path, processes: int) -> None:
    written = play(directory, A + B, processes=processes)
    assert written is not None
    assert written["files"] == {"test_a.py": counts(1, 1, 0), "test_b.py": counts(1, 0, 1)}
    assert {name: written[name] for name in counts(0, 0, 0)} == counts(2, 1, 1)
    assert written["missing"] == []
    place = {"device", "driver", "cuda", "torch", "date", "source_digest", "tests_digest"}
    assert set(written) == {*counts(0, 0, 0), *place, "missing", "files"}
    assert all(isinstance(written[name], str) for name in place)


@pytest.mark.parametrize("options", [{"keyword": "x"}, {"markexpr": "gpu"}, {"lf": True}, {"lf": True, "processes": 2}])
def test_a_selection_is_not_recorded(directory: Path, options: dict[str, Any]) -> None:
    assert play(directory, A + B, **options) is None


def test_files_add_up_over_runs(directory: Path) -> None:
    first = play(directory, A)
    assert first is not None
    assert first["missing"] == ["test_b.py"]
    both = play(directory, B)
    assert both is not None
    assert set(both["files"]) == {"test_a.py", "test_b.py"}
    assert both["missing"] == []
    again = play(directory, A[:1])  # after the failure was fixed: the file has one test now
    assert again is not None
    assert again["files"]["test_a.py"] == counts(1, 0, 0)
    assert again["failed"] == 0


def test_a_run_that_is_cut_short_keeps_the_files_that_it_ended(directory: Path) -> None:
    written = play(directory, A + B, stop=3)
    assert written is not None
    assert set(written["files"]) == {"test_a.py"}
    assert written["missing"] == ["test_b.py"]


@pytest.mark.parametrize("changed", ["source_digest", "tests_digest", "device", "torch"])
def test_what_ran_elsewhere_does_not_add_up(directory: Path, changed: str) -> None:
    play(directory, A)
    path = directory / "last_run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), changed: "another"}))
    written = play(directory, B)
    assert written is not None
    assert set(written["files"]) == {"test_b.py"}


def test_tests_of_another_text_do_not_add_up(directory: Path) -> None:
    play(directory, A)
    (directory / "test_b.py").write_text("# changed\n")
    written = play(directory, B)
    assert written is not None
    assert written["missing"] == ["test_a.py"]


def test_a_run_without_a_gpu_is_not_recorded(directory: Path) -> None:
    assert play(directory, [("test_a.py", "skipped"), ("test_b.py", "skipped")]) is None
