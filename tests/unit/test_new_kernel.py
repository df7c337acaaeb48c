"""`deep-gemm new-kernel`: three files, whose test passes as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deep_gemm.cli.app import app
from deep_gemm.settings import child_environment


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new-kernel", *arguments])


@pytest.mark.long
@pytest.mark.compile
def test_its_own_test_passes(tmp_path: Path) -> None:
    """Without a GPU by compiling, and with one by running too."""
    folder = tmp_path / "new" / "kernels"
    result = run("blend", "--directory", str(folder))
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"blend.cu.jinja", "blend.py", "test_blend.py"}
    assert f"cd {folder} && python -m pytest test_blend.py" in result.output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_blend.py"]
    done = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout or "6 passed" in done.stdout


def test_without_pytest_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" not in run("blend", "--directory", str(tmp_path / "one")).output
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert "Try it: pip install pytest && cd" in run("blend", "--directory", str(tmp_path / "two")).output


def test_no_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_blend.py").write_text("mine")
    result = run("blend", "--directory", str(tmp_path))
    assert result.exit_code == 1
    assert "test_blend.py exists, and nothing was written" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_blend.py"]


@pytest.mark.parametrize("name", ["two words", "9lives", "float", "lambda", "bf16", "../up", "json", "torch", ""])
def test_a_name_that_is_none_is_a_usage_error(tmp_path: Path, name: str) -> None:
    result = run(name, "--directory", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert "NAME must" in result.output
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run("blend", "--directory", str(tmp_path / "file")).exit_code == 2
