"""The record of a run of tests/gpu: what passed, on what, when, for which sources."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest


class GpuRecord:
    """A pytest plugin: writes `last_run.json` into `directory` when all of its tests, not some, ran on a GPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "last_run.json"
        self.outcomes: Counter[str] = Counter()
        self.complete = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        files = {item.path for item in session.items if item.path.parent == self.directory}
        narrowed = any("::" in argument for argument in session.config.args)
        options = session.config.option
        deselected = options.keyword or options.markexpr or getattr(options, "lf", False)
        self.complete = files == set(self.directory.glob("test_*.py")) and not narrowed and not deselected

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith("tests/gpu/") and (report.when == "call" or not report.passed):
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        # Neither a pass nor a failure: everything was skipped, so there is no GPU to report about.
        if not self.complete or not self.outcomes["passed"] + self.outcomes["failed"]:
            return
        from deep_gemm.benchmarks.provenance import environment

        counts = {name: self.outcomes[name] for name in ("passed", "failed", "skipped")}
        self.path.write_text(json.dumps(counts | environment(), indent=2) + "\n")
