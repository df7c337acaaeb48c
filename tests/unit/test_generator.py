"""The Jinja environment: C++ stays as it is, and anything ambiguous is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit import include_dir, render, template_dir, variables
from deep_gemm.jit.generator import render_text

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


def test_a_template_may_be_text(folder: Path) -> None:
    (folder / "part.jinja").write_text("int part = /*{ rows }*/;\n")
    text = '/*% include "part.jinja" %*/\nvoid /*{ name }*/();'
    assert render_text(text, {"name": "k", "rows": 3}, "k", folder) == "int part = 3;\nvoid k();"
    assert variables("k", folder, text) == {"name", "rows"}
    with pytest.raises(InvalidInputError, match="Template 'k' uses rows, which its fields lack"):
        render_text(text, {"name": "k"}, "k", folder)
    with pytest.raises(InvalidInputError, match="Template k:2 is not valid Jinja"):
        render_text("a\n/*% if %*/", {}, "k", folder)
