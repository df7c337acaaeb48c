"""How Sphinx builds these pages: `make docs`."""

import pkgutil
import re
import sys
from pathlib import Path

import deep_gemm

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import doc_charts

project = "deep_gemm"
author = copyright = "deep_gemm authors"
release = version = deep_gemm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"deep_gemm {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_copy_source = False

# Docstrings: a name in single backticks is a link if there is such an object.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
# Types of other packages, and names in prose that have no entry of their own.
nitpick_ignore_regex = [(r"py:.*", r".*")]

_PICTURE = re.compile(
    r"<picture>\s*<source [^>]*srcset=\"(?P<dark>[^\"]+)\">\s*<img [^>]*?src=\"(?P<light>[^\"]+)\"[^>]*?"
    r"alt=\"(?P<alt>[^\"]*)\"[^>]*>\s*</picture>"
)
_CHART = re.compile(r"<!-- chart: (?P<name>[\w-]+): (?P<alt>[^\n]*) -->")
"""The place of a chart that is drawn when pages are built; GitHub shows nothing there."""
_DRAWN = "_charts"
_FUNCTIONS = re.compile(r"```\{functions\}\n(?P<names>.*?)```", re.DOTALL)
"""Names of `deep_gemm` whose docstrings are shown, one after the other."""


def _draw(app):
    doc_charts.draw(Path(app.srcdir, _DRAWN))


def _prepare(app, name, source):
    """Make two images, one a theme, of a chart and of a picture with a dark variant, which GitHub shows as it is."""

    def images(found):
        paths = found.groupdict()
        if "name" in paths:
            paths |= {theme: f"/{_DRAWN}/{paths['name']}-{theme}.svg" for theme in doc_charts.THEMES}
        both = "".join(
            f"```{{image}} {paths[theme]}\n:alt: {paths['alt']}\n:class: only-{theme}\n```\n"
            for theme in doc_charts.THEMES
        )
        return f"````{{container}} chart\n{both}````\n"

    source[0] = _CHART.sub(images, _PICTURE.sub(images, source[0]))
    if name == "api":
        text = source[0] + _other_names(source[0])
        source[0] = _FUNCTIONS.sub(lambda found: _entries(found["names"].split()), text)


def _entries(names):
    """The docstrings of functions, classes and exceptions."""
    lines = ["```{eval-rst}", ".. currentmodule:: deep_gemm"]
    for name in names:
        found = pkgutil.resolve_name(f"deep_gemm.{name.removeprefix('deep_gemm.')}")
        if isinstance(found, type) and issubclass(found, Exception):
            lines += [f".. autoexception:: {name}", "   :show-inheritance:"]
        else:
            lines.append(f".. auto{'class' if isinstance(found, type) else 'function'}:: {name}")
    return "\n".join([*lines, "```"])


def _other_names(text):
    """A section for public names that the API page does not mention, so that none is ever missing."""
    names = [name for name in deep_gemm.__all__ if not re.search(rf"\b{name}\b", text)]
    names = [name for name in names if callable(getattr(deep_gemm, name))]
    return f"\n## Others\n\n```{{functions}}\n{' '.join(names)}\n```\n" if names else ""


def setup(app):
    app.connect("builder-inited", _draw)
    app.connect("source-read", _prepare)
