"""The Jinja environment: C++ stays as it is, and anything ambiguous is an error."""

from pathlib import Path

import pytest

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit import include_dir, render, template_dir, variables
from deep_gemm.jit.generator import filled, names_in

TEMPLATE = """\
/*# a note for the reader of the template #*/
#include "x.cuh"
// an ordinary comment, and /* another */
constexpr int kTable[2][1] = {{0}, {1}}, kMask = 5 % 3;
/*% if wide %*/
constexpr int kWide = /*{ width }*/;
/*% endif %*/
constexpr bool kFlag = /*{ flag }*/;
extern "C" __global__ void /*{ name }*/() {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernel.cu.jinja").write_text(TEMPLATE)
    return tmp_path


def test_cpp_survives_and_fields_become_cpp(folder: Path) -> None:
    source = render("kernel.cu.jinja", {"wide": True, "width": 128, "flag": False, "name": "k"}, folder)
    assert source == (
        '#include "x.cuh"\n'
        "// an ordinary comment, and /* another */\n"
        "constexpr int kTable[2][1] = {{0}, {1}}, kMask = 5 % 3;\n"
        "constexpr int kWide = 128;\n"
        "constexpr bool kFlag = false;\n"
        'extern "C" __global__ void k() {}\n'
    )


def test_a_missing_field_is_named(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"'kernel\.cu\.jinja' uses flag, which its fields lack"):
        render("kernel.cu.jinja", {"wide": False, "width": 1, "name": "k"}, folder)


@pytest.mark.parametrize("value", [1.5, None, ["a"]])
def test_a_field_of_another_type_is_refused(folder: Path, value: object) -> None:
    with pytest.raises(InvalidInputError, match="can print str, int and bool"):
        render("kernel.cu.jinja", {"wide": False, "flag": value, "name": "k"}, folder)  # type: ignore[dict-item]


def test_a_syntax_error_tells_the_line(folder: Path) -> None:
    (folder / "bad.cu.jinja").write_text("int a;\n/*% if %*/\n")
    with pytest.raises(InvalidInputError, match=r"bad\.cu\.jinja:2 is not valid Jinja"):
        render("bad.cu.jinja", {}, folder)


def test_an_unknown_template_lists_the_known_ones(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no template 'nope\.cu\.jinja' in .*: kernel\.cu\.jinja"):
        render("nope.cu.jinja", {}, folder)
    with pytest.raises(InvalidInputError, match="no template"):
        variables("nope.cu.jinja", folder)


def test_variables_follow_includes(folder: Path) -> None:
    assert variables("kernel.cu.jinja", folder) == {"wide", "width", "flag", "name"}
    (folder / "outer.cu.jinja").write_text("/*% include 'kernel.cu.jinja' %*/\n/*{ extra }*/\n")
    assert variables("outer.cu.jinja", folder) == {"wide", "width", "flag", "name", "extra"}


def test_rendering_is_deterministic_and_a_changed_template_is_seen(folder: Path) -> None:
    fields = {"wide": True, "width": 8, "flag": True, "name": "k"}
    assert render("kernel.cu.jinja", fields, folder) == render(
        "kernel.cu.jinja", dict(reversed(fields.items())), folder
    )
    (folder / "kernel.cu.jinja").write_text("int changed_and_longer;\n")
    assert render("kernel.cu.jinja", fields, folder) == "int changed_and_longer;\n"


def test_the_packages_own_directories_exist() -> None:
    assert template_dir().is_dir()
    assert include_dir().is_dir()
    for path in template_dir().glob("*.jinja"):
        assert variables(path.name), path.name


PAYLOADS = [
    "cycler.__init__.__globals__.os.system('touch {0}')", "self.__init__.__globals__.__builtins__.open('{0}', 'w')",
    "''.__class__.__mro__[1].__subclasses__()", "name|attr('format')", "'%s'.__mod__(name)", "7 * 7", "name.upper()",
    "range(1 << 40)|list|length", "name[0]", "{{1}}", "",
]  # fmt: skip


FORMS = ("// /*{{ {} }}*/", "a; /*% if {} %*/ b; /*% endif %*/", "/*% set x = {} %*/", "/*{{{}\n}}*/")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_of_a_user_is_never_run(payload: str, tmp_path: Path) -> None:
    for form in FORMS:
        text = "first\n" + form.format(payload.replace("{0}", str(tmp_path / "made")))
        with pytest.raises(InvalidInputError, match=r"k:2 has .*, but text may only have /\*\{ NAME \}\*/"):
            filled(text, {"name": "k"}, "k")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "text",
    [
        "int a[] = {{0}, {1}}; // {{ name }} {% if name %} {# name #}",
        "# for x in name\n## name\n% name",
        "/*# name #*/ /* { name } */ /*{ a */ name }*/ /*% b */ c %*/",
        "  a;\n\n",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert filled(text, {"name": "k"}, "k") == text
    assert names_in(text, "k") == set()


def test_fields_of_text_are_filled_in_once() -> None:
    fields = {"name": "/*{ flag }*/", "flag": True, "rows": 3}
    assert filled("/*{name}*/ /*{ flag }*/\n/*{ rows }*/", fields, "k") == "/*{ flag }*/ true\n3"
    assert names_in("/*{ name }*/ /*{rows}*/", "k") == {"name", "rows"}
    with pytest.raises(InvalidInputError, match="Template 'k' uses rows, which its fields lack"):
        filled("/*{ rows }*/", {"name": "k"}, "k")
    with pytest.raises(InvalidInputError, match="can print str, int and bool"):
        filled("/*{ rows }*/", {"rows": 1.5}, "k")  # type: ignore[dict-item]


FORMATTED = """('{0.__class__.__init__.__globals__}'|attr('format'))(cycler)"""
"""What escaped the sandbox of Jinja before 3.1.6."""


@pytest.mark.parametrize(
    "payload", [*PAYLOADS[:3], FORMATTED, "range(2 ** 40)|list", "1 // 0", "name + 1", "cycler.x()"]
)
def test_a_template_reaches_no_python(payload: str, tmp_path: Path) -> None:
    text = "/*{ " + payload.replace("{0}", str(tmp_path / "made")) + " }*/"
    (tmp_path / "k.cu.jinja").write_text(text)
    with pytest.raises(InvalidInputError, match=r"Template 'k\.cu\.jinja' (cannot be rendered|uses)|can print"):
        render("k.cu.jinja", {"name": "k"}, tmp_path)
    assert not (tmp_path / "made").exists()
