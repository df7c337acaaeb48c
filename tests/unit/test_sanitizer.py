"""What counts as a failure of `make sanitize`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import sanitizer
import torch
from racecheck_headers import RACES

TOOL = Path("compute-sanitizer")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def as_it_should(kind: str, *arguments: str) -> int:
    return sanitizer.REPORTED if "--race" in arguments else 0


def test_nothing_reported_but_races_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(sanitizer, "ends", lambda tool, *run: runs.append(run) or as_it_should(*run))
    assert sanitizer.failures(TOOL) == []
    assert runs[:2] == [("memcheck",), ("racecheck", "--racecheck")]
    assert [run[-1] for run in runs[2:]] == list(RACES)


@pytest.mark.parametrize("wrong", ["memcheck", "--racecheck", *RACES])
@pytest.mark.parametrize("other", [0, 1, sanitizer.REPORTED])
def test_anything_else_fails(monkeypatch: pytest.MonkeyPatch, wrong: str, other: int) -> None:
    """For a race, it is also a failure if the program itself fails or does not start."""

    def ends(tool: Path, *run: str) -> int:
        return other if run[-1] == wrong else as_it_should(*run)

    monkeypatch.setattr(sanitizer, "ends", ends)
    should = sanitizer.REPORTED if wrong in RACES else 0
    found = sanitizer.failures(TOOL)
    assert len(found) == (other != should)
    assert not found or (wrong.strip("-") in found[0] and str(other) in found[0])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        sanitizer.tool()


@pytest.mark.usefixtures("gpu")
def test_without_the_package_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(SystemExit, match="make sanitize"):
        sanitizer.tool()


@pytest.mark.usefixtures("gpu")
def test_the_tool_is_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "nvidia_cuda_sanitizer_api-13.5.25.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-sanitizer-api\nVersion: 13.5.25\n")
    paths = "nvidia/cu13/compute-sanitizer/compute-sanitizer", "nvidia/cu13/bin/compute-sanitizer"
    (record / "RECORD").write_text("".join(f"{path},,\n" for path in paths))
    for path in paths:  # importlib_metadata, which some packages put in the place of Python's own, lists what is there
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert sanitizer.tool() == tmp_path / paths[1]


def test_what_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake tool that logs its arguments."""
    tool, log = tmp_path / "tool", tmp_path / "log"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > {log}\nexit 7\n')
    tool.chmod(0o755)
    assert sanitizer.ends(tool, "racecheck", "--race", "exchange") == 7
    words = log.read_text().split()
    assert words[:3] == ["1", "--tool", "racecheck"]
    assert words[5:7] == ["--error-exitcode", str(sanitizer.REPORTED)]
    assert words[-3:] == [str(Path(sanitizer.__file__).with_name("sanitize.py")), "--race", "exchange"]
