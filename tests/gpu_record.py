"""The record of a run of tests/gpu: what passed, on what, when, for which sources."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "skipped")
"""What is counted, in the order of the numbers of a file."""


class GpuRecord:
    """A pytest plugin: writes `last_run.json` into `directory` after each test file that ran completely on a GPU.

    Counts of files add up over runs on the same machine with the same sources and tests, so that the suite can be run
    file by file. Files that have not run yet are listed as missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "last_run.json"
        self.left: Counter[str] = Counter()  # tests to come, by file, of files that are run whole
        self.outcomes: dict[str, Counter[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._is_whole(session.config):
            self.left = Counter(item.path.name for item in session.items if item.path.parent == self.directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Side by side, other processes collect and run tests, and each tells this one what it collected: the same."""
        if not self.left and self._is_whole(node.config):
            self.left = Counter(name for test in ids if (name := self._file(test)))

    @staticmethod
    def _is_whole(config: pytest.Config) -> bool:
        """Whether all tests of files are run."""
        narrowed = any("::" in argument for argument in config.args)
        options = config.option
        selected = options.keyword or options.markexpr not in ("", "not long") or getattr(options, "lf", False)
        return not (narrowed or selected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (name := self._file(report.nodeid)) and (report.when == "call" or not report.passed):
            self.outcomes.setdefault(name, Counter())[report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = self._file(nodeid)
        if name not in self.left:
            return
        self.left[name] -= 1
        # Neither a pass nor a failure: everything was skipped, so there is no GPU.
        if not self.left[name] and any(counts["passed"] + counts["failed"] for counts in self.outcomes.values()):
            self._write()

    @staticmethod
    def _file(nodeid: str) -> str:
        path = Path(nodeid.split("::")[0])
        return path.name if path.parent == Path("tests/gpu") else ""

    def _write(self) -> None:
        from deep_gemm.bench.provenance import environment

        place = {**environment(), "tests_digest": self._tests_digest()}
        ended = {name: _counts(self.outcomes[name]) for name, left in self.left.items() if not left}
        files = {**self._known(place), **ended}
        total = {outcome: sum(counts[at] for counts in files.values()) for at, outcome in enumerate(OUTCOMES)}
        missing = sorted({path.name for path in self.directory.glob("test_*.py")} - set(files))
        record = {**total, **place, "missing": missing, "files": dict(sorted(files.items()))}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def _known(self, place: dict[str, str]) -> dict[str, list[int]]:
        """The record of an earlier run, if nothing but the date has changed since."""
        try:
            written: dict[str, Any] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        same = all(written.get(name) == value for name, value in place.items() if name != "date")
        return written["files"] if same else {}

    def _tests_digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted([*self.directory.glob("*.py"), *self.directory.parent.glob("*.py")]):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def _counts(outcomes: Counter[str]) -> list[int]:
    return [outcomes[outcome] for outcome in OUTCOMES]
