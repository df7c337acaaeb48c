"""The README and the packaging say what is true: the example runs, generated parts are fresh, lists agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from deep_gemm.benchmarks import readme

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def part(name: str) -> str:
    match = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", README, flags=re.DOTALL)
    assert match, f"README.md has no part {name}"
    return match.group(1).strip()


def example() -> str:
    match = re.fullmatch(r"```python\n(.*)```", part("example"), flags=re.DOTALL)
    assert match
    return match.group(1)


def test_the_example_is_short_and_runs() -> None:
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    # Smaller sizes on the CPU: it is the calls that are tested here, not the reference's speed.
    exec(compile(code.replace("7168", "256").replace("2112", "192"), "README.md", "exec"), {})


def test_the_example_can_fail() -> None:
    code = example().replace("7168", "256").replace("2112", "192").replace("x.float() @", "2 * x.float() @")
    with pytest.raises(AssertionError):
        exec(compile(code, "README.md", "exec"), {})


def test_the_environment_table_is_generated() -> None:
    assert part("environment") == readme.environment_table(), "run: make readme"


def test_the_numbers_are_generated() -> None:
    assert part("numbers") == readme.numbers(ROOT / "benchmarks" / "results"), "run: make readme"


def test_a_recorded_row_reaches_the_tables(tmp_path: Path) -> None:
    row = {"mode": "flush", "m": 64, "n": 576, "k": 7168, "us": 12.0, "tflops": 44.0, "gbps": 390.5}
    row |= {"ratio_tensorwise": 0.91, "device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0"}
    older = row | {"us": 99.0, "date": "2026-01-01"}
    cost = row | {"mode": "host", "what": "a call", "us": 7.5, "date": "2026-01-02"}
    from deep_gemm.benchmarks.run import append

    append(tmp_path / "reference.jsonl", older)
    append(tmp_path / "reference.jsonl", row | {"date": "2026-01-02"})
    append(tmp_path / "costs.jsonl", cost | {"what": "a kernel of an older version", "source_digest": "0"})
    append(tmp_path / "costs.jsonl", cost | {"source_digest": "1"})
    text = readme.numbers(tmp_path)
    assert "| 64 | 576 x 7168 | 12.0 | 44 | 390 | 0.91 | - |" in text
    assert "**0.91**" in text
    assert "99" not in text, "a later row replaces an earlier one"
    assert "GPU X, driver 1.2, torch 2.7, 2026-01-02" in text
    assert "| a call | 7.5 us |" in text
    assert "older version" not in text


def test_fill_refuses_a_readme_without_the_marks() -> None:
    with pytest.raises(ValueError, match="numbers"):
        readme.fill("nothing", {"numbers": "x"})
    assert readme.fill("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb", {"x": r"\1"}) == (
        "a\n<!-- x:begin -->\n\\1\n<!-- x:end -->\nb"
    )


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b(?= |`|$)", README, flags=re.MULTILINE)) <= targets
    from deep_gemm.cli.app import COMMANDS

    table = README[README.index("| command | what it does |") :]
    named = set(re.findall(r"^\| `(\w+)", table[: table.index("\n\n")], flags=re.MULTILINE))
    assert named == set(COMMANDS)


def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert listed("cli") <= listed("test"), "the tests run the command line"


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
