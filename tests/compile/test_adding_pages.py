"""The page on adding to the package: what each part adds works, in a copy of the sources, and changes few files."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_gemm.settings import child_environment

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PARTS = re.split(r"^## ", (ROOT / "docs" / "adding.md").read_text(), flags=re.M)[1:]
MOST = {"An activation": 2, "A tensor of an epilogue": 4, "A kernel and its operation": 3}
MOST |= {"A GEMM family": 1, "An option of one family": 2, "An architecture": 1, "A family for another GPU": 1}
"""How many existing files each part may change."""

_BLOCK = re.compile(r"^(?:`(?P<file>\S+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def copy(tree: Path) -> None:
    """The sources in the layout of the installed package, which hides the package that is installed here."""
    out = shutil.ignore_patterns("__pycache__", "results", "last_run.json")
    for name in ("deep_gemm", "tests", "jit", "templates"):
        shutil.copytree(ROOT / name, tree / name, ignore=out)
    for name in ("jit", "templates"):
        (tree / "deep_gemm" / name).symlink_to(tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)


@pytest.mark.parametrize("part", PARTS, ids=[part.partition("\n")[0] for part in PARTS])
def test_a_part_changes_few_files_compiles_and_passes_its_tests(part: str, tmp_path: Path) -> None:
    changed = set(re.findall(r"^--- a/(\S+)$", part, re.M))
    assert len(changed) <= MOST[part.partition("\n")[0]]

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
    blocks = list(_BLOCK.finditer(part))
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
