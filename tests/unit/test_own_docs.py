"""Examples of pages with tests of their own, and those of docstrings, run as they stand."""

import builtins
import doctest
import inspect
import operator
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from comparisons import registry_is_left_alone

import deep_gemm
from deep_gemm import backends
from deep_gemm.cli.app import COMMANDS, app
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


PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "measurements"} & {*page.parts})
INSIDE = ("adding", "faults", "architecture", "api")
"""Pages for who changes the package, and the API, which is made from docstrings."""


def words(page: Path) -> int:
    """Words of a page outside of its examples."""
    return len(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split())


def test_pages_are_short() -> None:
    long = {page.stem: words(page) for page in PAGES if page.stem not in (*INSIDE, "performance")}
    assert {name: count for name, count in long.items() if count > 900} == {}
    assert words(ROOT / "docs" / "performance.md") <= 1200
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert sum(map(words, [*others, *(page for page in PAGES if page.stem != "api")])) <= 20_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_for_users_hold_no_history(page: Path) -> None:
    """Dates, versions of DeepGEMM, times of kernels and names of tests stand where they were measured, or inside."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    if page.stem not in INSIDE:
        assert re.findall(r"\d us\b|\btests?[_/]\w+|was tried", text) == []
    if page.stem not in (*INSIDE, "performance"):
        assert re.findall(r"\b20\d\d-\d\d-\d\d\b|\b0\.1\.4\b|\b2\.[568]\.\d\b", text) == []


def test_deepgemm_is_named_by_its_own_version() -> None:
    """The page on performance says once which builds were timed."""
    pages = [page for page in [*PAGES, *(ROOT / "docs" / "measurements").glob("*.md")] if page.stem != "performance"]
    builds = re.compile(r"0\.1\.4\.post|2\.5\.0\.post|sgl-deep-gemm`? \d")
    assert [page.stem for page in pages if builds.search(page.read_text())] == []


def test_each_page_of_measurements_links_records() -> None:
    pages = [page for page in (ROOT / "docs" / "measurements").glob("*.md") if page.stem != "index"]
    assert pages
    assert [page.stem for page in pages if "](../../benchmarks/results/" not in page.read_text()] == []


__all__ = ["registry_is_left_alone"]

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


MODULES = [name for name in deep_gemm.__all__ if inspect.ismodule(getattr(deep_gemm, name))]
"""Public modules whose functions are counted too."""
ELSEWHERE = {
    "CustomKernel": "deep_gemm.kernel makes it",
    "backends.backend": "it changes what all see; docs/compare.md says how to use it",
    "backends.kernel": "as the one before; docs/compare.md has an example",
    "backends.operation": "as the one before; examples/own_operation.py has an example",
    "kernel": "its example has ten lines, and a test of its own",
    "monitor": "its example calls a model; docs/debugging.md has more",
}

ON_A_GPU = ("testing.bench", "testing.bench_flushed", "testing.bench_kineto", "testing.get_arch_major")
"""Functions that need one, which examples have not."""


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their class methods by name, but for errors. Names of one function are one."""
    seen = set()
    for name in deep_gemm.__all__:
        value = getattr(deep_gemm, name)
        names = getattr(value, "__all__", ()) if name in MODULES else ()
        if name == "settings":  # an object, whose methods are public
            names = [each for each, x in vars(type(value)).items() if inspect.isfunction(x) and each[0] != "_"]
        if name == "quantize":
            names = [each for each, x in vars(value).items() if inspect.isfunction(x) and not each.startswith("_")]
        found = [(f"{name}.{each}", operator.attrgetter(each)(value)) for each in names] or [(name, value)]
        for each, x in found:
            error = inspect.isclass(x) and issubclass(x, Exception)
            if callable(x) and not error and id(x) not in seen and getattr(x, "__module__", "").startswith("deep_gemm"):
                seen.add(id(x))
                yield each, x
                makers = [name for name, made in vars(x).items() if isinstance(made, classmethod) and name[0] != "_"]
                yield from ((f"{each}.{name}", getattr(x, name)) for name in makers)


FUNCTIONS = {
    name: value
    for name, value in public()
    if not {name, name.partition(".")[0]} & {*ELSEWHERE}
    and name not in ("quantize.Quantized", "testing.Operand", *ON_A_GPU)
}


@pytest.fixture(autouse=True)
def _choices_stay() -> Iterator[None]:
    sms = deep_gemm.get_num_sms()
    yield
    deep_gemm.set_num_sms(sms)
    deep_gemm.set_batch_invariant(False)


@pytest.mark.compile
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    run_example(name, FUNCTIONS[name])


@pytest.mark.long
def test_the_examples_of_divided_layers_run() -> None:
    """Importing them imports DTensors, which takes a second."""
    for name in deep_gemm.nn.parallel.__all__:
        run_example(name, getattr(deep_gemm.nn.parallel, name))


def run_example(name: str, value: Any) -> None:
    torch.manual_seed(0)
    text = inspect.getdoc(inspect.unwrap(value)) or ""
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "deep_gemm": deep_gemm}, name, name, 0)
    assert test.examples, "a docstring needs an example: lines that begin with >>>"
    said: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
    assert not failed, "".join(said)


def test_exceptions_to_the_rule_exist() -> None:
    assert all(operator.attrgetter(name)(deep_gemm) for name in ELSEWHERE)
    assert len(FUNCTIONS) > 80


def test_an_example_that_is_wrong_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
