"""README and documentation: examples run, commands and links exist, generated parts are up to date."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import doc_charts
import pytest
import readme

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *PAGES]
_BLOCK = re.compile(r"^(?P<skip><!-- not run: .+ -->\n)?(?P<indent> *)```python\n(?P<code>.*?)^ *```$", re.M | re.S)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def example() -> str:
    match = re.search(r"<!-- example:begin -->\n```python\n(.*?)```\n<!-- example:end -->", README, flags=re.DOTALL)
    assert match
    # Smaller sizes on the CPU: it is the calls that are tested here, not the reference's speed.
    return match.group(1).replace("7168", "256").replace("2112", "192")


def test_the_example_is_short_and_runs() -> None:
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {})


def examples(page: Path) -> str:
    """The blocks of a page, one after the other, but for those that say why they are not run."""
    return "\n".join(found["code"] for found in _BLOCK.finditer(page.read_text()) if not found["skip"])


OWN = ("compare", "own_kernels", "fallback", "debugging", "adding")
"""Pages with tests of their own: their examples compile, register, change settings, or change the sources."""


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page) and page.stem not in OWN], ids=named)
def test_the_examples_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")  # pages have no block that compiles
    exec(compile(examples(page), named(page), "exec"), {"__name__": "example"})


def test_the_readme_is_short_and_has_no_long_generated_table() -> None:
    assert len(README.splitlines()) <= 120
    for body in re.findall(r"<!-- (?:speed|[a-z]+):begin -->\n(\|.*?)<!--", README, flags=re.DOTALL):
        assert len(body.splitlines()) <= 10


def test_generated_parts_are_up_to_date() -> None:
    for name, parts in readme.parts(RESULTS).items():
        text = (ROOT / name).read_text()
        for part, made in parts.items():
            assert readme.fill(text, {part: made}, name) == text, f"{part} of {name}: run make readme"


def test_the_chart_of_readme_shows_the_rows_of_today(tmp_path: Path) -> None:
    assert doc_charts.outdated(ROOT / "docs" / "charts", RESULTS) == [], "run: make readme"
    assert len(doc_charts.outdated(tmp_path, RESULTS)) == 2, "missing ones are seen"


def test_pages_show_each_chart_that_is_drawn_for_them() -> None:
    named = [name for page in PAGES for name in re.findall(r"^<!-- chart: ([\w-]+): .+ -->$", page.read_text(), re.M)]
    assert sorted(named) == sorted(set(doc_charts.EVERY) - {doc_charts.OVERVIEW})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if at else ()) for at, name in enumerate(doc_charts.EVERY)]
)
def test_a_chart_is_drawn_in_both_variants(name: str) -> None:
    pytest.importorskip("matplotlib")
    rows = doc_charts.rows_of(name, RESULTS)
    light, dark = (doc_charts.svg(rows, theme) for theme in doc_charts.THEMES.values())
    assert light.lstrip().startswith("<?xml")
    assert light != dark
    assert f"rows {doc_charts.digest(rows)}" in light
    assert rows[0]["device"] in light
    assert rows[0]["date"] in light


# What documents name is there.


def links(document: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    return [link for link in found if not link.startswith(("http:", "https:", "mailto:"))]


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_files_of_the_sources_that_a_document_names_are_there(document: Path) -> None:
    folders = ("deep_gemm", "jit", "templates", "benchmarks", "tests", "examples", ".ci")
    there = {f"/{named(path)}" for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    text = document.read_text()
    names = set(re.findall(r"`([\w./-]+\.(?:py|cuh|cu|jinja|jsonl))`", text))
    names |= set(re.findall(r"python ((?:benchmarks|examples|tests)/\w+\.py)", text))
    names -= set(re.findall(r"^`(\S+)`:$", text, flags=re.M))  # files that the page has its reader write
    assert {name for name in names if not any(path.endswith(f"/{name}") for path in there)} == set()


def commands(document: Path) -> list[list[str]]:
    """The calls of `deep-gemm` in a document's shell blocks and in its text."""
    text = document.read_text()
    blocks = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`(deep-gemm [^`]+)`", text)
    found = [shlex.split(line, comments=True) for line in [*blocks, *inline] if line.strip().startswith("deep-gemm ")]
    return [words[1:] for words in found if words]


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if commands(path)], ids=named)
def test_commands_and_their_options_exist(document: Path) -> None:
    from deep_gemm.cli.app import app

    for words in commands(document):
        command: click.Command = app
        context: Any = click.Context(app)
        rest = [word for word in words if word != "..."]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest[0])
            assert found is not None, words
            command, rest = found, rest[1:]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, words


def test_every_command_is_on_a_page() -> None:
    from deep_gemm.cli.app import COMMANDS

    named_somewhere = {words[0] for page in PAGES for words in commands(page) if not words[0].startswith("-")}
    assert named_somewhere == set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_targets_of_make_and_settings_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z]+)*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)) | {
        "readme"
    }
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    variables = set(re.findall(r"\bDG_[A-Z_]+\b", " ".join(info.variable for info in readme.settings.describe())))
    assert set(re.findall(r"\b(DG_(?:JIT|PRINT|FALLBACK|FFMA)[A-Z_]*)\b", text)) <= variables | {"DG_DEBUG"}


def test_refusals_begin_as_the_page_of_errors_says() -> None:
    import torch

    import deep_gemm

    x, w, d = torch.zeros(4, 256).bfloat16(), torch.zeros(128, 256).bfloat16(), torch.empty(4, 128).bfloat16()
    a, b = deep_gemm.per_token_cast_to_fp8(x, False), deep_gemm.per_block_cast_to_fp8(w, False)
    narrow = deep_gemm.per_token_cast_to_fp8(x[:, :200], False), deep_gemm.per_block_cast_to_fp8(w[:, :200], False)
    freed = torch.empty(4, 128).bfloat16()
    freed.untyped_storage().resize_(0)
    fp8 = deep_gemm.fp8_gemm_nt
    refused = {
        "a must be a pair (tensor, scales)": lambda: fp8(x, b, d),  # type: ignore[arg-type]
        "a must have 2 dimensions": lambda: deep_gemm.bf16_gemm_nt(x[None], w, d),
        "c must have the shape": lambda: deep_gemm.bf16_gemm_nt(x, w, d, c=d[:1]),
        "K must be a multiple of 16": lambda: fp8(*narrow, d),
        "a and b must agree in K": lambda: deep_gemm.bf16_gemm_nn(x, w, d),
        "the scales of b must have the shape": lambda: fp8(a, (b[0], torch.ones(127, 2)), d),
        "recipe (1, 1, 32) is not supported": lambda: fp8(a, b, d, recipe=(1, 1, 32)),
        "c must have d's dtype": lambda: fp8(a, b, d, c=d.float()),
        "d has no memory": lambda: fp8(a, b, freed),
        "grouped_layout has the groups 1 and 2 in rows": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
            x, w.expand(3, 128, 256).contiguous(), d, torch.tensor([1, 1, 2, 2], dtype=torch.int32)
        ),
    }
    table = (ROOT / "docs" / "errors.md").read_text().partition("| message begins with |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE)
    assert set(listed) == {*refused, "There is no kernel ... It needs another GPU"}
    for beginning, call in refused.items():
        with pytest.raises(deep_gemm.DeepGemmError) as caught:
            call()
        assert str(caught.value).startswith(beginning), beginning


def test_the_faults_that_are_survived_have_their_tests() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        tests = re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2])
        assert tests, row
        for name in tests:
            (file,) = [path for path in (ROOT / "tests").rglob("test_*.py") if f"def {name}(" in path.read_text()]
            assert str(file.relative_to(ROOT / "tests")) in (ROOT / "Makefile").read_text(), "make faults leaves it out"
