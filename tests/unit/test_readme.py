"""The README says what is true: the example runs, generated parts are fresh, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

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
    row |= {"ratio_tensorwise": 0.9147, "device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0"}
    older = row | {"us": 99.0, "date": "2026-01-01"}
    cost = row | {"mode": "host", "what": "a call", "us": 7.5, "date": "2026-01-02"}
    from deep_gemm.benchmarks.run import append

    append(tmp_path / "reference.jsonl", older)
    append(tmp_path / "reference.jsonl", row | {"date": "2026-01-02"})
    append(tmp_path / "costs.jsonl", cost | {"what": "a kernel of an older version", "source_digest": "0"})
    append(tmp_path / "costs.jsonl", cost | {"source_digest": "1"})
    text = readme.numbers(tmp_path)
    assert "| 64 | 576 x 7168 | 12.0 | 44 | 390 | 0.91 | - |" in text
    assert "| flush | M <= 64 | 1 | **0.915** | 0.915 (64 x 576 x 7168) | - | - | - |" in text
    assert "99" not in text, "a later row replaces an earlier one"
    assert "GPU X, driver 1.2, torch 2.7, 2026-01-02" in text
    assert "| a call | 7.5 us |" in text
    assert "older version" not in text


def test_graph_rows_show_the_promise_and_the_floor(tmp_path: Path) -> None:
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.benchmarks.run import append, make_row

    origin = {"device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0", "date": "2026-01-02"}
    us = {"ours": 5.0, "ours_unpromised": 6.0, "tensorwise": 9.0, "blockwise": 15.0}
    append(tmp_path / "reference.jsonl", make_row(GemmShape(1, 2112, 7168), "graph", us, {}) | origin)
    append(tmp_path / "random.jsonl", make_row(GemmShape(7, 144, 4096), "graph", us, {}) | origin)
    append(tmp_path / "random.jsonl", make_row(GemmShape(1000, 144, 4096), "flush", us, {}) | origin)
    text = readme.numbers(tmp_path)
    assert "| graph | M <= 64 | 1 | **1.800** | 1.800 (1 x 2112 x 7168) | 1.500 | 3.000 | 0.760 |" in text
    assert "| 1 | 2112 x 7168 | 5.0 | 6 | 3031 | 1.80 | 3.00 | 6.0 | 1.50 | 0.76 |" in text
    assert "**2 random shapes**" in text
    assert "| flush | M >= 1000 | 1 | **1.800** | 1.800 (1000 x 144 x 4096) | 1.500 | 3.000 | - |" in text
    assert "| 7 | 144 x 4096" not in text, "random shapes are only summed up"
    assert "None" not in text


def test_deepgemm_has_a_column_and_a_sentence_where_it_was_timed(tmp_path: Path) -> None:
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.benchmarks.run import append, make_row

    origin = {"device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0", "date": "2026-01-02"}
    origin["deepgemm"] = "2.5"
    for m, theirs in ((1, 6.0), (2, 4.86), (3, 4.9)):
        row = make_row(GemmShape(m, 2112, 7168), "flush", {"ours": 5.0, "tensorwise": 9.0, "deepgemm": theirs}, {})
        append(tmp_path / "reference.jsonl", row | origin)
    append(tmp_path / "random.jsonl", make_row(GemmShape(7, 144, 4096), "flush", {"ours": 5.0}, {}) | origin)
    text = readme.numbers(tmp_path)
    assert "torch 2.7, DeepGEMM 2.5, 2026-01-02" in text
    assert "| shapes | against tensorwise | worst | without promise | against blockwise | against DeepGEMM |" in text
    assert "| flush | M <= 64 | 3 | **1.800** | 1.800 (1 x 2112 x 7168) | - | - | 1.046 | - |" in text
    assert "| 1 | 2112 x 7168 | 5.0 | 6 | 3031 | 1.80 | - | 1.20 |" in text
    assert "beside us in 3 of these rows, and was faster by more than 3% in none; the worst is 0.97 (2 x" in text
    slower = make_row(GemmShape(4, 2112, 7168), "graph", {"ours": 5.0, "tensorwise": 9.0, "deepgemm": 4.8}, {})
    append(tmp_path / "reference.jsonl", slower | origin)
    assert "faster by more than 3% in 1; the worst is 0.96 (4 x 2112 x 7168, graph)" in readme.numbers(tmp_path)


def test_the_selector_is_judged_by_what_was_looked_at() -> None:
    rows = [
        {"m": m, "n": 8, "k": 16, "ratio_best": ratio, "device": "X", "driver": "1", "torch": "2", "date": "d"}
        for m, ratio in ((1, 0.9), (2, 0.9))
    ]
    assert "at 0.900 of the best of all that were timed, by geometric mean" in readme.selection_sentence(rows)
    for row, legal in zip(rows, (300, 500), strict=True):
        row["legal"] = legal
    assert "at 0.900 of the best of all 300 to 500 legal ones, by geometric" in readme.selection_sentence(rows)


def test_costs_have_a_table_each(tmp_path: Path) -> None:
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.benchmarks.run import append, make_row

    origin = {"device": "GPU X", "driver": "1.2", "torch": "2.7", "cuda": "13.0", "date": "2026-01-02"}
    append(tmp_path / "reference.jsonl", make_row(GemmShape(1, 128, 128), "flush", {"ours": 5.0}, {}) | origin)
    rows: list[readme.Row] = [
        {"mode": "host", "what": "a call", "us": 6.0},
        {"mode": "compile", "what": "k, nvrtc", "us": 2500.0, "render_ms": 0.5, "ptxas_ms": 2.0},
        {"mode": "dims", "what": "1 x 2 x 3", "us": 8.0, "us_nk": 10.0, "ratio_nk": 1.25},
        {"mode": "dims", "what": "4 x 2 x 3", "us": 10.0, "us_nk": 8.0, "ratio_nk": 0.8},
        {"mode": "kernels", "what": "576 x 7168", "kernels": 4, "kernels_nk": 9, "asked": 800},
    ]
    for row in rows:
        append(tmp_path / "costs.jsonl", row | origin | {"source_digest": "1"})
    # A mode measured again with other sources replaces its own rows, and no other's.
    append(tmp_path / "costs.jsonl", rows[0] | {"what": "a new call", "source_digest": "2"} | origin)
    text = readme.numbers(tmp_path)
    assert "| a new call | 6.0 us |" in text
    assert "| 1 x 2 x 3 | 8.0 | 10.0 | 1.250 |" in text
    assert "| geometric mean | | | 1.000 |" in text
    assert "| a call |" not in text
    assert "| kernel | render, ms | ptxas, ms | all, ms |" in text
    assert "| k, nvrtc | 0.5 | 2.0 | 2.5 |" in text
    assert "| 576 x 7168 | 4 | 9 |" in text


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


def test_the_faults_that_are_survived_have_their_tests() -> None:
    section = README[README.index("## Faults survived") :].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for name in named:
            (file,) = [path for path in (ROOT / "tests").rglob("test_*.py") if f"def {name}(" in path.read_text()]
            assert str(file.relative_to(ROOT / "tests")) in (ROOT / "Makefile").read_text(), "make faults leaves it out"
