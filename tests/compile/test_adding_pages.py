"""The pages on adding a kernel, an epilogue and an architecture: what they add works, in a copy of the sources."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_gemm.settings import child_environment

ROOT = Path(__file__).parents[2]
PAGES = ("adding", "adding_epilogue", "adding_architecture")

_BLOCK = re.compile(r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def copy(tree: Path) -> None:
    """The sources in the layout of the installed package, which hides the package that is installed here."""
    out = shutil.ignore_patterns("__pycache__", "results", "last_run.json")
    for name in ("deep_gemm", "tests", "jit", "templates", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=out)
    for name in ("jit", "templates"):
        (tree / "deep_gemm" / name).symlink_to(tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_adds_compiles_and_passes_its_tests(page: str, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("diffs are applied by git")
    tree = tmp_path / "tree"
    copy(tree)
    environment = child_environment() | {
        "PYTHONPATH": str(tree),
        "DG_JIT_CACHE_DIR": str(tmp_path / "cache"),
        "DG_JIT_USE_NVRTC": "1",
    }

    def run(*command: str, cwd: Path = tree, text: str | None = None) -> None:
        done = subprocess.run(
            command, cwd=cwd, env=environment, input=text, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (
            f"{shlex.join(command)}\n{text or ''}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )

    run("git", "init", "--quiet")
    blocks = list(_BLOCK.finditer((ROOT / "docs" / f"{page}.md").read_text()))
    for block in blocks:
        if block["file"]:
            path = tree / block["file"]
            assert not path.exists()
            path.write_text(block["text"])
        elif block["language"] == "diff":
            run("git", "apply", text=block["text"])
    for block in blocks:
        if block["language"] == "python" and not block["file"]:
            run(sys.executable, "-c", block["text"])
        elif block["language"] == "bash":
            folder, *commands = block["text"].splitlines()
            assert folder == "cd tests"
            for line in commands:
                program, *arguments = shlex.split(line)
                assert program == "python"
                run(
                    sys.executable,
                    *arguments,
                    *(["-p", "no:cacheprovider"] if "pytest" in line else []),
                    cwd=tree / "tests",
                )
