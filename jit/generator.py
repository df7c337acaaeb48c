"""The one Jinja environment: a template's name and its fields in, CUDA C++ out.

The delimiters are C++ comments, `/*{ name }*/`, `/*% if ... %*/` and `/*# note #*/`: C++ braces such as `{{0}}`
survive, and an editor still highlights a template as C++. The environment is Jinja's sandbox: a template, which may be
somebody else's, reaches no Python but the methods of its fields. Text that is no template only has names filled in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.forking import late

if TYPE_CHECKING:
    import jinja2


@functools.lru_cache(maxsize=1)
def template_dir() -> Path:
    """The directory of the package's own kernel templates."""
    return _templates_root() / "kernels"


@functools.lru_cache(maxsize=1)
def include_dir() -> Path:
    """The directory of the package's own device headers: the one `-I` that a compiler is given."""
    return _templates_root() / "include"


def render(template: str, fields: Mapping[str, str | int | bool], directory: Path | None = None) -> str:
    """The source of `template` ("sm90_fp8_gemm.cu.jinja"), found in `directory` or among the package's templates.

    Booleans become `true` and `false`. Raises InvalidInputError for a template that does not exist, a field that it
    uses and `fields` lacks, or a field of another type, since a guess would be a wrong kernel.
    """
    jinja2 = late("jinja2")
    try:
        return _environment(directory or template_dir()).get_template(template).render(fields)
    except jinja2.TemplateNotFound as error:
        raise _no_template(template, directory, error) from error
    except jinja2.TemplateSyntaxError as error:
        raise _no_jinja(template, error) from error
    except jinja2.UndefinedError as error:
        missing = ", ".join(sorted(variables(template, directory) - fields.keys())) or "an attribute"
        raise _lacking(template, missing) from error
    except InvalidInputError:
        raise
    except Exception as error:  # of the sandbox, and of the template's own arithmetic
        what = f"{type(error).__name__}: {error}"
        raise InvalidInputError(f"Template {template!r} cannot be rendered ({what}). Compute it in Python.") from error


def filled(text: str, fields: Mapping[str, str | int | bool], name: str) -> str:
    """``text``, called ``name`` in messages, with a field in the place of each ``/*{ field }*/``, and nothing else of
    Jinja: text of a user is never run. Raises as `render`, also for what a template would run."""
    names_in(text, name)
    return _MARKED.sub(lambda found: str(_to_cpp(_field(found[1].strip(), fields, name))), text)


def names_in(text: str, name: str) -> frozenset[str]:
    """The fields that `filled` needs."""
    found = set()
    for place in _MARKED.finditer(text):
        field = (place[1] or "").strip()
        if not field.isidentifier():
            line = text.count("\n", 0, place.start()) + 1
            raise InvalidInputError(
                f"{name}:{line} has {place[0][:80]!r}, but text may only have /*{{ NAME }}*/, the name of a field. "
                "Give a file with template= for more of Jinja, or write the comment in another way."
            )
        found.add(field)
    return frozenset(found)


_MARKED = re.compile(r"/\*(?:\{((?:(?!\*/).)*)\}|%(?:(?!\*/).)*%)\*/", re.DOTALL)
"""Comments that a template would print or run."""


def _field(field: str, fields: Mapping[str, str | int | bool], name: str) -> str | int | bool:
    if field not in fields:
        raise _lacking(name, field)
    return fields[field]


def _lacking(template: str, missing: str) -> InvalidInputError:
    return InvalidInputError(f"Template {template!r} uses {missing}, which its fields lack.")


def _no_jinja(template: str, error: jinja2.TemplateSyntaxError) -> InvalidInputError:
    return InvalidInputError(f"Template {error.name or template}:{error.lineno} is not valid Jinja: {error.message}")


def variables(template: str, directory: Path | None = None) -> frozenset[str]:
    """The names that `template`, and whatever it includes, expects from outside."""
    jinja2, meta = late("jinja2"), late("jinja2.meta")
    environment = _environment(directory or template_dir())
    assert environment.loader is not None
    names: set[str] = set()
    seen: set[str] = set()
    pending = [template]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        try:
            source = environment.loader.get_source(environment, current)[0]
        except jinja2.TemplateNotFound as error:
            raise _no_template(current, directory, error) from error
        try:
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise _no_jinja(current, error) from error
        names |= meta.find_undeclared_variables(tree)
        pending += [name for name in meta.find_referenced_templates(tree) if name is not None]
    return frozenset(names)


@functools.lru_cache(maxsize=8)
def _environment(directory: Path) -> jinja2.Environment:
    jinja2 = late("jinja2")
    return late("jinja2.sandbox").ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(directory),
        undefined=jinja2.StrictUndefined,
        finalize=_to_cpp,
        block_start_string="/*%",
        block_end_string="%*/",
        variable_start_string="/*{",
        variable_end_string="}*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _to_cpp(value: object) -> object:
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int | str):
        return value
    if type(value).__name__ == "StrictUndefined":
        return value  # raises when it is printed, with a better message than ours
    raise InvalidInputError(
        f"A template can print str, int and bool, but a field is {type(value).__name__}: {value!r}."
    )


def _no_template(template: str, directory: Path | None, error: jinja2.TemplateNotFound) -> InvalidInputError:
    folder = directory or template_dir()
    have = ", ".join(sorted(path.name for path in folder.glob("*.jinja"))) or "none"
    return InvalidInputError(f"There is no template {error.name or template!r} in {folder}; the templates are: {have}.")


def _templates_root() -> Path:
    # Beside this package, in the sources and where it is installed. Importing it as a package would take 0.4 ms.
    return Path(__file__).absolute().parents[1] / "templates"
