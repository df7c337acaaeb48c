"""The files around the package agree with it: workflow, issue forms, citation, what `make` installs."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import yaml
from scripts import module_of

import deep_gemm
from deep_gemm.cli.app import app
from deep_gemm.settings import settings

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def listed(name: str) -> set[str]:
    """A list of requirements in pyproject.toml, read without tomllib, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(rf"^{name} = \[(.*?)\]$", text, flags=re.DOTALL | re.MULTILINE)
    assert match
    return set(re.findall(r'"([^"]+)"', match.group(1)))


def test_the_workflow_runs_the_ci_script_with_each_python_that_the_package_declares() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    prefix = "Programming Language :: Python :: 3."
    declared = {line.rpartition(" ")[2] for line in listed("classifiers") if line.startswith(prefix)}
    assert set(job["strategy"]["matrix"]["python"]) == declared
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]


def test_the_wheel_with_kernels_is_built_after_every_change_of_what_it_holds() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "kernels.yml").read_text())
    paths = workflow[True]["pull_request"]["paths"]  # "on" is a truth value of YAML 1.1
    packages = re.findall(r'^"deep_gemm[\w.]*" = "(\w+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(packages) == 3
    tools = {".ci/**", "Makefile", "pyproject.toml", "constraints.txt", "tests/shipped_calls.py"}
    assert {f"{package}/**" for package in packages} | tools <= set(paths)
    runs = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    assert runs.index("make shipped-calls") < runs.index("make wheel-with-kernels")


def test_the_wheel_with_kernels_keeps_no_kernels_unless_it_is_asked_to() -> None:
    """argparse would make a path of a default that is a text, and the build would fill the current directory."""
    parse = module_of(".ci/wheel_with_kernels.py").parse
    assert parse([]).cache is None
    assert parse(["--cache", "kept"]).cache == Path.cwd() / "kept"


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == deep_gemm.__version__


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", [*FORMS, ROOT / "SECURITY.md"], ids=lambda path: path.stem)
def test_the_commands_that_a_reporter_is_asked_for_exist(path: Path) -> None:
    text = path.read_text()
    assert isinstance(app, click.Group)
    for words in re.findall(r"`deep-gemm ([^`]+)`", text):
        group, *rest = words.split()
        command = app.get_command(click.Context(app), group) if not group.startswith("-") else app
        assert command is not None, words
        known = {option for param in command.params for option in param.opts} | {"--version"}
        assert {word for word in rest if word.startswith("--")} <= known, words
    known = {variable for info in settings.describe() for variable in info.variable.split(" or ")}
    assert set(re.findall(r"\bDG_[A-Z_]+", text)) <= known


def test_what_make_installs_is_what_the_package_declares() -> None:
    module = module_of(".ci/bootstrap.py")
    assert set(module.BASE) == listed("dependencies")
    assert set(module.TEST) == listed("test")
    assert set(module.LINT) == listed("lint")
    assert set(module.DIST) == listed("dist")
    assert set(module.DOCS) == listed("docs")
    assert set(module.XDIST) == listed("xdist")
    assert set(module.SANITIZE) == listed("sanitize")
    assert listed("cli") <= listed("test"), "the tests run the command line"


@pytest.mark.parametrize(
    ("option", "group"),
    [
        ("--lint", "LINT"), ("--dist", "DIST"), ("--docs", "DOCS"), ("--xdist", "XDIST"), ("--sanitizer", "SANITIZE"),
    ],
)  # fmt: skip
def test_an_option_installs_its_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, group: str) -> None:
    def wanted(*arguments: str) -> set[str]:
        module, found = module_of(".ci/bootstrap.py"), set[str]()
        monkeypatch.setattr(module, "cuda_torch", lambda: None)
        monkeypatch.setattr(module, "create", lambda directory, shared: directory)
        monkeypatch.setattr(module, "missing", lambda python, groups: found.update(groups))
        monkeypatch.setattr(module, "install_project", lambda python, mode: None)
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(tmp_path), *arguments])
        module.main()
        return found

    assert wanted(option) - wanted() == set(getattr(module_of(".ci/bootstrap.py"), group))


def test_no_index_is_named() -> None:
    for path in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        ".ci/run",
        ".ci/bootstrap.py",
        ".pre-commit-config.yaml",
        ".github/workflows/ci.yml",
    ):
        text = (ROOT / path).read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), path


def test_serving_names_what_an_install_without_dependencies_needs() -> None:
    """All but torch, which is there, and the NVRTC of CUDA 12, which torch's replaces."""
    text = (ROOT / "docs" / "serving.md").read_text()
    (line,) = re.findall(r"^pip install ('?cuda-python.+)$", text, flags=re.MULTILINE)

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=]", requirement)[0] for requirement in requirements}

    needed = names(sorted(listed("dependencies") | listed("cli"))) - {"torch", "nvidia-cuda-nvrtc-cu12"}
    assert names(shlex.split(line)) == needed
