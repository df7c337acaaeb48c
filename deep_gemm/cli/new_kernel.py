"""`deep-gemm new-kernel`: the files of a kernel of one's own, to begin with."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import sys
from pathlib import Path

import click

from deep_gemm.cli.console import console


def _has_pytest() -> bool:
    try:
        return importlib.util.find_spec("pytest") is not None
    except ValueError:  # a module that is set to None
        return False


@click.command("new-kernel")
@click.argument("name")
@click.option(
    "--directory",
    default=".",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the files go; it is made if it is not there.",
)
def command(name: str, directory: Path) -> None:
    """Write NAME.cu.jinja, NAME.py and test_NAME.py: a kernel that works, to be changed into one of your own.

    The test compiles the kernel, and runs it where there is a GPU. No file is replaced.
    """
    from deep_gemm.names import is_name

    if not is_name(name) or keyword.iskeyword(name):
        raise click.UsageError(f"NAME must be a name that C++ and Python can have, but it is {name!r}.")
    if name in sys.stdlib_module_names or name in ("torch", "deep_gemm", "pytest"):
        raise click.UsageError(f"NAME must not be that of a module that exists, but it is {name!r}.")
    starter = importlib.resources.files("deep_gemm.cli") / "starter"
    files = (f"{name}.cu.jinja", f"{name}.py", f"test_{name}.py")
    sources = ("NAME.cu.jinja", "NAME.py.txt", "test_NAME.py.txt")
    texts = {file: (starter / source).read_text() for file, source in zip(files, sources, strict=True)}
    there = [file for file in texts if (directory / file).exists()]
    if there:
        raise click.ClickException(f"{directory / there[0]} exists, and nothing was written: choose another name.")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        with (directory / file).open("x") as opened:
            opened.write(text.replace("@NAME@", name))
    shown = console()
    shown.print(f"Wrote {', '.join(texts)} into {directory}.")
    pytest = "" if _has_pytest() else "pip install pytest && "
    shown.print(f"Try it: {pytest}cd {directory} && python -m pytest test_{name}.py")
