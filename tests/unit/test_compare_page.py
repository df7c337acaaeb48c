"""The page on comparing backends: its Python runs from the top to the bottom, and its commands do."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from comparisons import registry_is_left_alone

from deep_gemm import backends
from deep_gemm.cli.app import app

__all__ = ["registry_is_left_alone"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_examples_run() -> None:
    code = "\n".join(blocks("python"))
    exec(compile(code, "docs/compare.md", "exec"), {})


def test_the_commands_run() -> None:
    for line in "".join(blocks("bash")).splitlines():
        program, *arguments = shlex.split(line)
        if program == "python":
            assert (ROOT / arguments[0]).exists()
            continue
        assert program == "deep-gemm"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def test_the_example_of_an_operation_is_right_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """With a GPU its kernel is launched, and else the reference runs."""
    runpy.run_path(str(ROOT / "examples" / "own_operation.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[4].rstrip(",") in ("ok", "absent", "skipped") for line in lines), lines
    assert {"torch:", "mine:"} <= {line.split()[3] for line in lines if " ok, " in line}


def test_the_table_has_every_backend() -> None:
    named = set(re.findall(r"^\| `([\w:]+)` \|", PAGE, flags=re.MULTILINE))
    assert named == {*backends.names(), "tilelang", "cublaslt:tensorwise", "torch:grouped_mm", "torch:compile"}
