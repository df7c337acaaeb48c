"""How Sphinx builds these pages: `make docs`."""

import re

import deep_gemm

project = "deep_gemm"
author = copyright = "deep_gemm authors"
release = version = deep_gemm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "attrs_inline"]
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


def _pictures(app, name, source):
    """A picture with a dark variant, which GitHub shows as it is written, as two images of the theme."""

    def images(found):
        light, dark, alt = found["light"], found["dark"], found["alt"]
        return (
            f"```{{image}} {light}\n:alt: {alt}\n:class: only-light\n```\n\n"
            f"```{{image}} {dark}\n:alt: {alt}\n:class: only-dark\n```\n"
        )

    source[0] = _PICTURE.sub(images, source[0])


def setup(app):
    app.connect("source-read", _pictures)
