"""Examples of the pages on own kernels, fallbacks, debugging and fused functions run as they stand."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest
import torch

import deep_gemm
from deep_gemm.cli.app import COMMANDS
from deep_gemm.custom.parameters import ELEMENTS, MAP_ELEMENTS, NUMBERS
from deep_gemm.settings import FALLBACKS, settings

ROOT = Path(__file__).parents[2]
NAMES = ("own_kernels", "fallback", "debugging", "epilogues", "fused")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in NAMES}


def examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", TEXTS[name], flags=re.DOTALL | re.MULTILINE)


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader does it. Each page has some."""
    assert examples(name)
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(examples(name)), f"{name}.md", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", NAMES)
def test_variables_and_names_and_links_are_true(name: str) -> None:
    text = TEXTS[name]
    known = {variable for line in settings.describe() for variable in line.variable.split(" or ")}
    assert set(re.findall(r"\bDG_\w+", text)) <= known
    for attribute in re.findall(r"`deep_gemm\.(\w+)", text):
        assert hasattr(deep_gemm, attribute) or attribute in ("arch", "backends")
    for link in re.findall(r"\]\(([\w.]+)\)", text):
        assert (ROOT / "docs" / link).exists()
    for command in re.findall(r"`deep-gemm ([\w-]+)", text):
        assert command in COMMANDS


def test_lists_of_types_and_ways_are_whole() -> None:
    table = TEXTS["own_kernels"]
    assert all(f'`"{name}"`' in table for name in (*NUMBERS, "f32"))
    assert ", ".join(ELEMENTS) in table
    assert ", ".join(MAP_ELEMENTS) in table
    assert re.findall(r"^\| `(\w+)` \|", TEXTS["fallback"], flags=re.MULTILINE) == [*FALLBACKS, "error"]


def test_the_docstring_of_the_decorator_has_ten_lines_that_run() -> None:
    doc = deep_gemm.kernel.__doc__ or ""
    example = doc[doc.index("::\n") + 3 : doc.index("Args:")]
    lines = [line[8:] for line in example.splitlines() if line.strip()]
    assert len(lines) <= 10
    namespace: dict[str, object] = {"deep_gemm": deep_gemm}
    exec("\n".join(lines[:-1]), namespace)
    x = torch.ones(1000)
    assert "f32* out, const f32* x, const f32* y, f32 scale, u32 n" in namespace["scale_add"].source(x, x, x, 2.0)  # type: ignore[attr-defined]


def test_errors_and_levels_of_the_page_exist() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = re.findall(r"^\| `(\w+Error)` \| ([\w`, ]+) \|", page, flags=re.MULTILINE)
    errors = {name for name in deep_gemm.__all__ if name.endswith("Error") and name != "DeepGemmError"}
    assert {error for error, _ in listed} == errors
    for error, bases in listed:
        for base in re.findall(r"\w+", bases):
            assert issubclass(getattr(deep_gemm, error), getattr(builtins, base)), error


def test_the_api_reference_has_every_public_name() -> None:
    assert set(deep_gemm.__all__) <= set(re.findall(r"\w+", (ROOT / "docs" / "api.md").read_text()))


# Pages are short, and those for users answer a question.


PAGES = sorted((ROOT / "docs").glob("*.md"))
INSIDE = ("adding", "faults", "architecture", "api")
"""Pages for who changes the package, and the API, which is made from docstrings."""


def words(page: Path) -> int:
    """Words of a page outside of its examples."""
    return len(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split())


def test_pages_are_short() -> None:
    long = {page.stem: words(page) for page in PAGES if page.stem not in (*INSIDE, "performance")}
    assert {name: count for name, count in long.items() if count > 900} == {}
    assert words(ROOT / "docs" / "performance.md") <= 1200
    assert sum(map(words, PAGES)) <= 20_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_for_users_hold_no_history(page: Path) -> None:
    """Dates, versions of DeepGEMM and names of tests stand where they were measured, or inside."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    if page.stem not in (*INSIDE, "performance"):
        assert re.findall(r"\b20\d\d-\d\d-\d\d\b|`test_\w+`|was tried|\b0\.1\.4\b|\b2\.[568]\.\d\b", text) == []


def test_deepgemm_is_named_by_its_own_version() -> None:
    """The page on performance says once which builds were timed."""
    pages = [page for page in [*PAGES, *(ROOT / "docs" / "measurements").glob("*.md")] if page.stem != "performance"]
    builds = re.compile(r"0\.1\.4\.post|2\.5\.0\.post|sgl-deep-gemm`? \d")
    assert [page.stem for page in pages if builds.search(page.read_text())] == []


def test_each_page_of_measurements_links_records() -> None:
    pages = [page for page in (ROOT / "docs" / "measurements").glob("*.md") if page.stem != "index"]
    assert pages
    assert [page.stem for page in pages if "](../../benchmarks/results/" not in page.read_text()] == []
