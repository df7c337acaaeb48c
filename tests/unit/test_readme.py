"""README and documentation: examples run, commands and links exist, generated parts are up to date."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click
import doc_charts
import pytest
import readme

from deep_gemm.bench import shapes
from deep_gemm.bench.run import append, make_row

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *PAGES]
ORIGIN = {"device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0", "date": "2026-01-02"}

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


def test_the_example_can_fail() -> None:
    with pytest.raises(AssertionError):
        exec(compile(example().replace("x.float() @", "2 * x.float() @"), "README.md", "exec"), {})


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


def test_a_block_is_found_and_left_out_as_it_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n<!-- not run: why -->\n```python\ny = x\n```\n```python\nz = x\n```\n")
    assert examples(page) == "x = 1\n\nz = x\n"


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


def test_a_chart_of_other_rows_is_out_of_date() -> None:
    rows = doc_charts.rows_of("fp8-flush-ratio", RESULTS)
    assert doc_charts.digest(rows) != doc_charts.digest([*rows[1:], rows[0] | {"us": 1.0}])


@pytest.mark.parametrize("name", doc_charts.EVERY)
def test_a_chart_is_drawn_in_both_variants(name: str) -> None:
    pytest.importorskip("matplotlib")
    rows = doc_charts.rows_of(name, RESULTS)
    light, dark = (doc_charts.svg(rows, theme) for theme in doc_charts.THEMES.values())
    assert light.lstrip().startswith("<?xml")
    assert light != dark
    assert f"rows {doc_charts.digest(rows)}" in light
    assert rows[0]["device"] in light
    assert rows[0]["date"] in light


def test_losses_are_drawn_as_means_and_a_band(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    origin = {"mode": "losses", "device": "a card", "date": "2026-11-28", "every": 10}
    curves = {("BF16", 0): [4.0, 2.0], ("BF16", 1): [4.0, 1.0], ("FP8", 0): [5.0, 3.0], ("FP8 mixed", 0): [6.0, 0.5]}
    rows = [{"way": way, "seed": seed, "losses": found, **origin} for (way, seed), found in curves.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(doc_charts.EVERY, doc_charts.LOSSES, "rows")
        assert doc_charts.rows_of(doc_charts.LOSSES, tmp_path) == rows
    theme = doc_charts.THEMES["light"]
    figure = doc_charts.new_figure(theme, 8, 4)
    doc_charts.losses(figure, rows, theme)
    (axis,) = figure.axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[4.0, 1.5], [5.0, 3.0], [6.0, 0.5]]
    assert list(axis.lines[0].get_xdata()) == [5.0, 15.0]
    band = axis.collections[0].get_paths()[0].vertices
    assert set(band[band[:, 0] == 15][:, 1]) == {1.0, 2.0}
    text = doc_charts.svg(rows, theme)
    assert all(word in text for word in ("FP8, mixed", "a card", "2026-11-28", f"rows {doc_charts.digest(rows)}"))


def test_the_overview_shows_means_and_a_band_and_fits_a_phone() -> None:
    pytest.importorskip("matplotlib")

    rows, theme = doc_charts.rows_of(doc_charts.OVERVIEW, RESULTS), doc_charts.THEMES["light"]
    figure = doc_charts.new_figure(theme, *doc_charts.PHONE)
    doc_charts.overview(figure, rows, theme)
    assert doc_charts.PHONE[0] * 96 < 420
    for axis, mode in zip(figure.axes, ("graph", "flush"), strict=True):
        (ours,) = [line for line in axis.lines if line.get_color() == theme.ours]
        found = [row["us_tensorwise"] / row["us"] for row in rows if (row["mode"], row["m"]) == (mode, 128)]
        assert ours.get_ydata()[list(ours.get_xdata()).index(128)] == pytest.approx(geometric_mean(found))
        band = axis.collections[0].get_paths()[0].vertices
        assert {min(found), max(found)} <= set(band[band[:, 0] == 128][:, 1])


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
    assert set(listed) == {*refused, "... has compute capability 8.9"}
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


# How tables are made.


def test_a_recorded_row_reaches_the_tables(tmp_path: Path) -> None:
    row = {"mode": "flush", "m": 64, "n": 576, "k": 7168, "us": 12.0, "tflops": 44.0, "gbps": 390.5}
    row |= {"ratio_tensorwise": 0.9147} | ORIGIN
    cost = row | {"mode": "host", "what": "a call", "us": 7.5}
    append(tmp_path / "reference.jsonl", row | {"us": 99.0, "date": "2026-01-01"})
    append(tmp_path / "reference.jsonl", row)
    append(tmp_path / "costs.jsonl", cost | {"what": "a kernel of an older version", "source_digest": "0"})
    append(tmp_path / "costs.jsonl", cost | {"source_digest": "1"})
    text, costs = readme.numbers(tmp_path), readme.costs(tmp_path)
    assert "| flush | <= 64 | 1 | **0.915** | 0.915 (64 x 576 x 7168) |" in text
    assert "2026-01-01" not in text, "a later row replaces an earlier one"
    assert "GPU X, driver 1.2, torch 2.7, 2026-01-02" in text
    assert "| a call | 7.5 us |" in costs
    assert "older version" not in costs


def test_rows_of_another_operation_do_not_replace_each_other(tmp_path: Path) -> None:
    row = make_row(shapes.GemmShape(4096, 2112, 7168), "flush", {"ours": 5.0, "tensorwise": 9.0}, {}) | ORIGIN
    append(tmp_path / "reference.jsonl", row)
    for form, ours in (("nt", 5.0), ("tn", 10.0)):
        problem = shapes.posed([shapes.GemmShape(4096, 8192, 7168)], f"bf16_gemm_{form}")[0]
        for file in ("bf16.jsonl", "models-h100.jsonl"):
            append(tmp_path / file, make_row(problem, "flush", {"ours": ours, "cublaslt": 10.0}, {}) | ORIGIN)
    text = readme.numbers(tmp_path)
    assert "| bf16_gemm_nt, flush | >= 1000 | 1 | **2.000** |" in text
    assert "| bf16_gemm_tn, flush | >= 1000 | 1 | **1.000** |" in text


def test_rows_of_a_surveyed_n_and_k_are_in_no_table_of_drawn_products(tmp_path: Path) -> None:
    """Rows stay where they are when a later survey has their N x K. No fit may have seen what a claim is made on."""
    for m, n, k, ours in ((64, 8192, 7168, 5.0), (65, 7168, 8192, 20.0), (66, 57344, 8192, 20.0)):
        row = make_row(shapes.GemmShape(m, n, k), "flush", {"ours": ours, "tensorwise": 10.0}, {})
        append(tmp_path / "models-h200.jsonl", row | ORIGIN)
        append(tmp_path / "models-h200.jsonl", row | ORIGIN | {"m": m + 100})
    assert "| `fp8_gemm_nt`, GPU, single calls | 129 to 512 | 1 | 2.000 | 2.000 |" in readme.drawn_table(tmp_path)
    assert "65 to 128" not in readme.drawn_table(tmp_path)


def test_the_table_of_the_readme_has_means_and_the_slowest(tmp_path: Path) -> None:
    (n, k), file = min(readme.layers.layers(kept_out=True)), tmp_path / "readme-h200.jsonl"
    for m, theirs in ((4, 16.0), (64, 9.0), (65, 10.0)):
        us = {"ours": 10.0, "blockwise": theirs, "tensorwise": 10.0, "deepgemm": 12.0}
        append(file, make_row(shapes.GemmShape(m, n, k), "flush", us, {}) | ORIGIN)
    append(file, make_row(shapes.GemmShape(4, n + 1, k), "flush", {"ours": 10.0, "blockwise": 1.0}, {}) | ORIGIN)
    for ratio in (0.9, 1.6):
        row = {"mode": "experts", "op": f"x{ratio}", "m": 100, "n": n, "k": k, "us": 1.0, "ratio_deepgemm": ratio}
        append(tmp_path / "experts-h200.jsonl", row | ORIGIN)
    for way, speed in (("nn", 30.0), ("Transformers", 20.0)):
        row = {"mode": "transformers", "part": "serving", "way": way, "batch": 8, "generated_per_s": speed}
        append(tmp_path / "transformers-h200.jsonl", row | ORIGIN)
    text = readme.speed_table(tmp_path)
    assert (
        "(single calls); cuBLASLt, block scales | 4 to 64 | **1.20** (0.90) | **1.00** (1.00) | **1.20** (1.20) |"
        in text
    )
    assert "| 65 to 65 | **1.00** (1.00) |" in text
    assert "| FP8 and BF16 experts (single calls) | 100 to 100, 1 sets of groups | | | **1.20** (0.90) |" in text
    assert "| batch 8 | **1.50** | | |" in text


def test_graph_rows_show_the_promise_and_the_floor(tmp_path: Path) -> None:
    us = {"ours": 5.0, "ours_unpromised": 6.0, "tensorwise": 9.0, "blockwise": 15.0}
    append(tmp_path / "reference.jsonl", make_row(shapes.GemmShape(1, 2112, 7168), "graph", us, {}) | ORIGIN)
    append(tmp_path / "random.jsonl", make_row(shapes.GemmShape(7, 144, 4096), "graph", us, {}) | ORIGIN)
    append(tmp_path / "random.jsonl", make_row(shapes.GemmShape(1000, 144, 4096), "flush", us, {}) | ORIGIN)
    text = readme.numbers(tmp_path)
    assert "| graph | <= 64 | 1 | **1.800** | 1.800 (1 x 2112 x 7168) | 1.500 | 3.000 | 0.760 |" in text
    assert "2 shapes (M 1..8192" in text
    assert "| flush | >= 1000 | 1 | **1.800** | 1.800 (1000 x 144 x 4096) | 1.500 | 3.000 |" in text
    assert "None" not in text


def test_deepgemm_has_a_column_and_a_sentence_where_it_was_timed(tmp_path: Path) -> None:
    origin = ORIGIN | {"deepgemm": "2.5"}
    for m, theirs in ((1, 6.0), (2, 4.86), (3, 4.9)):
        us = {"ours": 5.0, "tensorwise": 9.0, "deepgemm": theirs}
        append(tmp_path / "reference.jsonl", make_row(shapes.GemmShape(m, 2112, 7168), "flush", us, {}) | origin)
    text = readme.numbers(tmp_path)
    assert "torch 2.7, DeepGEMM 2.5, 2026-01-02" in text
    assert "| flush | <= 64 | 3 | **1.800** | 1.800 (1 x 2112 x 7168) | 1.046 |" in text
    assert "more than 3% in none of them. The worst is 0.97 (2 x" in text
    slower = make_row(shapes.GemmShape(4, 2112, 7168), "graph", {"ours": 5.0, "tensorwise": 9.0, "deepgemm": 4.8}, {})
    append(tmp_path / "reference.jsonl", slower | origin)
    assert "more than 3% in 1 of them. The worst is 0.96 (4 x 2112 x 7168, graph)" in readme.numbers(tmp_path)


def test_the_selector_is_judged_by_what_was_looked_at() -> None:
    rows = [{"m": m, "n": 8, "k": 16, "ratio_best": 0.9} | ORIGIN for m in (1, 2)]
    assert "0.900 of the speed of the best of all that were timed" in readme.selection_sentence(rows)
    for row, legal in zip(rows, (300, 500), strict=True):
        row["legal"] = legal
    assert "0.900 of the speed of the best of all 300 to 500 legal ones" in readme.selection_sentence(rows)


def test_costs_have_a_table_each(tmp_path: Path) -> None:
    rows: list[readme.Row] = [
        {"mode": "host", "what": "a call", "us": 6.0},
        {"mode": "compile", "what": "k, nvrtc", "us": 2500.0, "render_ms": 0.5, "ptxas_ms": 2.0},
        {"mode": "dims", "what": "1 x 2 x 3", "us": 8.0, "us_nk": 10.0, "ratio_nk": 1.25},
        {"mode": "dims", "what": "4 x 2 x 3", "us": 10.0, "us_nk": 8.0, "ratio_nk": 0.8},
        {"mode": "kernels", "what": "576 x 7168", "kernels": 4, "kernels_nk": 9, "asked": 800},
    ]
    for row in rows:
        append(tmp_path / "costs.jsonl", row | ORIGIN | {"source_digest": "1"})
    # A mode measured again with other sources replaces its own rows, and no other's.
    append(tmp_path / "costs.jsonl", rows[0] | {"what": "a new call", "source_digest": "2"} | ORIGIN)
    text = readme.costs(tmp_path)
    assert "| a new call | 6.0 us |" in text
    assert "| 1 x 2 x 3 | 8.0 | 10.0 | 1.250 |" in text
    assert "| geometric mean | | | 1.000 |" in text
    assert "| a call |" not in text
    assert "| kernel | render, ms | ptxas, ms | all, ms |" in text
    assert "| k, nvrtc | 0.5 | 2.0 | 2.5 |" in text
    assert "| 576 x 7168 | 4 | 9 |" in text


def test_fill_refuses_a_file_without_the_marks() -> None:
    with pytest.raises(ValueError, match=r"page\.md must have <!-- numbers:begin -->"):
        readme.fill("nothing", {"numbers": "x"}, "page.md")
    assert readme.fill("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb", {"x": r"\1"}) == (
        "a\n<!-- x:begin -->\n\\1\n<!-- x:end -->\nb"
    )
