"""What `make` installs is what the package declares, and the project names no package index."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "new"),
    [("3.12.0", False), ("3.20.0", False), ("3.2.1", False), ("3.20.1", True), ("3.25.2", True), ("4.3.1", True)],
)
def test_an_old_filelock_counts_as_missing(version: str, new: bool) -> None:
    """One before 3.20.1 follows a link in place of a lock, and is part of many an installation that is shared."""
    (ways,) = [ways for requirement, ways in bootstrap().BASE.items() if requirement.startswith("filelock")]
    patterns = [way.removeprefix("file:") for way in ways]
    assert any(fnmatch.fnmatch(f"filelock-{version}.dist-info", pattern) for pattern in patterns) == new


def listed(name: str) -> set[str]:
    """A list of requirements in pyproject.toml, read without tomllib, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(rf"^{name} = \[(.*?)\]$", text, flags=re.DOTALL | re.MULTILINE)
    assert match
    return set(re.findall(r'"([^"]+)"', match.group(1)))


def test_what_make_installs_is_what_the_package_declares() -> None:
    module = bootstrap()
    assert set(module.BASE) == listed("dependencies")
    assert set(module.TEST) == listed("test")
    assert set(module.LINT) == listed("lint")
    assert set(module.DOCS) == listed("docs")
    assert set(module.DASK) == listed("dask")
    assert set(module.XDIST) == listed("xdist")
    assert set(module.SANITIZE) == listed("sanitize")
    assert listed("cli") <= listed("test"), "the tests run the command line"


def test_the_readme_names_what_an_install_without_dependencies_needs() -> None:
    """All but torch, which is there, and the NVRTC of CUDA 12, which torch's replaces."""
    (line,) = re.findall(r"^pip install ('?cuda-python.+)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=]", requirement)[0] for requirement in requirements}

    needed = names(sorted(listed("dependencies") | listed("cli"))) - {"torch", "nvidia-cuda-nvrtc-cu12"}
    assert names(shlex.split(line)) == needed


@pytest.mark.parametrize(
    ("option", "group"),
    [("--lint", "LINT"), ("--docs", "DOCS"), ("--dask", "DASK"), ("--xdist", "XDIST"), ("--sanitizer", "SANITIZE")],
)
def test_an_option_installs_its_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, group: str) -> None:
    def wanted(*arguments: str) -> set[str]:
        module, found = bootstrap(), set[str]()
        monkeypatch.setattr(module, "cuda_torch", lambda: None)
        monkeypatch.setattr(module, "create", lambda directory, shared: directory)
        monkeypatch.setattr(module, "missing", lambda python, groups: found.update(groups))
        monkeypatch.setattr(module, "install_project", lambda python, mode: None)
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(tmp_path), *arguments])
        module.main()
        return found

    assert wanted(option) - wanted() == set(getattr(bootstrap(), group))


def test_no_index_is_named() -> None:
    for path in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        ".ci/run",
        ".ci/bootstrap.py",
        ".pre-commit-config.yaml",
    ):
        text = (ROOT / path).read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), path
