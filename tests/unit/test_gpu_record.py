"""When tests/gpu/last_run.json is written, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_record import GpuRecord


def report(outcome: str, when: str = "call", nodeid: str = "tests/gpu/test_x.py::test") -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, outcome=outcome, passed=outcome == "passed")


def session(paths: list[Path], **options: Any) -> Any:
    option = SimpleNamespace(**({"keyword": "", "markexpr": "", "lf": False} | options))
    config = SimpleNamespace(args=["gpu"], option=option)
    return SimpleNamespace(items=[SimpleNamespace(path=path) for path in paths], config=config)


@pytest.fixture
def record(tmp_path: Path) -> GpuRecord:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).touch()
    return GpuRecord(tmp_path)


def test_a_whole_run_is_recorded(record: GpuRecord, tmp_path: Path) -> None:
    record.pytest_collection_finish(session([tmp_path / "test_a.py", tmp_path / "test_b.py"]))
    for outcome, when in (("passed", "setup"), ("passed", "call"), ("passed", "teardown"), ("failed", "call")):
        record.pytest_runtest_logreport(report(outcome, when))
    record.pytest_runtest_logreport(report("skipped", "setup"))
    record.pytest_runtest_logreport(report("passed", nodeid="tests/unit/test_y.py::test"))
    record.pytest_sessionfinish()
    written = json.loads(record.path.read_text())
    assert (written["passed"], written["failed"], written["skipped"]) == (1, 1, 1)
    assert set(written) == {
        *("passed", "failed", "skipped"),
        *("device", "driver", "cuda", "torch", "date", "source_digest"),
    }
    assert all(isinstance(value, (int, str)) for value in written.values())


@pytest.mark.parametrize("options", [{"keyword": "x"}, {"markexpr": "gpu"}, {"lf": True}])
def test_a_selection_is_not_recorded(record: GpuRecord, tmp_path: Path, options: dict[str, Any]) -> None:
    record.pytest_collection_finish(session([tmp_path / "test_a.py", tmp_path / "test_b.py"], **options))
    record.pytest_runtest_logreport(report("passed"))
    record.pytest_sessionfinish()
    assert not record.path.exists()


def test_one_file_of_two_is_not_recorded(record: GpuRecord, tmp_path: Path) -> None:
    record.pytest_collection_finish(session([tmp_path / "test_a.py"]))
    record.pytest_runtest_logreport(report("passed"))
    record.pytest_sessionfinish()
    assert not record.path.exists()


def test_a_run_without_a_gpu_is_not_recorded(record: GpuRecord, tmp_path: Path) -> None:
    record.pytest_collection_finish(session([tmp_path / "test_a.py", tmp_path / "test_b.py"]))
    record.pytest_runtest_logreport(report("skipped", "setup"))
    record.pytest_sessionfinish()
    assert not record.path.exists()
