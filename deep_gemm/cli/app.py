"""The group of commands. Each lives in a module of its own, which is imported only when it is asked for."""

from __future__ import annotations

import errno
import importlib
import io
import sys

import click

from deep_gemm.errors import DeepGemmError, InvalidInputError, SettingError
from deep_gemm.settings import settings

COMMANDS = {
    "bench": "Time kernels beside cuBLASLt, or sum up recorded rows.",
    "cache": "Show, check, prune or clear stored kernels; make packs.",
    "calibrate": "Measure a GPU and fit the model that chooses configs to it.",
    "compare": "Run the implementations of an operation side by side.",
    "demo": "Compile, check and time one GEMM of DeepSeek-V3.",
    "doctor": "Show what was found and what is used, and say what to do.",
    "inspect": "Show what would run for a shape: configs, source, SASS.",
    "new-kernel": "Write the files of a kernel of your own, with a test.",
    "precompile": "Compile the kernels of a model or of shapes ahead of time.",
    "tune": "Measure configs for a model or shapes, and keep the choices.",
}
GROUPS = {
    "Setup": ("doctor", "demo"),
    "Deployment": ("precompile", "cache"),
    "Speed": ("bench", "compare", "inspect", "calibrate", "tune"),
    "Kernels": ("new-kernel",),
}
"""How help groups the commands. One that is in no group comes under "More"."""

FIRST = (
    ("doctor", "what works here, and what to do"),
    ("demo", "compile, check and time one GEMM"),
    ("precompile --model DIR --dry-run", "which layers have kernels"),
    ("precompile --model DIR --tp 8", "compile them before serving"),
    ("bench --shape 64x7168x2048", "time a shape beside cuBLASLt"),
)
"""What a new user types, in order: arguments, and what they are for."""


def groups() -> dict[str, list[tuple[str, str]]]:
    """Every command, padded to one width, with its line of help, by group."""
    grouped = {name for names in GROUPS.values() for name in names}
    every = {**GROUPS, "More": tuple(sorted(set(COMMANDS) - grouped))}
    width = max(map(len, COMMANDS))
    return {title: [(name.ljust(width), COMMANDS[name]) for name in names] for title, names in every.items() if names}


class Refused(click.ClickException):
    """Arguments, files or settings that cannot be used."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group whose help needs no command's module, so that `--help` starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"deep_gemm.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in groups().items():
            with formatter.section(title):
                formatter.write_dl(commands)

    def invoke(self, ctx: click.Context) -> object:
        # An error of this package, or one about a file, is a sentence for the user; a traceback would hide it.
        try:
            return super().invoke(ctx)
        except (InvalidInputError, SettingError) as error:
            raise Refused(str(error)) from error
        except DeepGemmError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of the pipe has stopped: click ends quietly
                raise
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deep-gemm-jit", prog_name="deep-gemm")
@click.pass_context
def app(ctx: click.Context) -> None:
    """FP8, BF16 and FP16 GEMM kernels for NVIDIA GPUs, compiled when first called.

    Exits with 0 if all was done, with 1 if something failed or there was nothing to do, and with 2 for arguments, files
    or settings that cannot be used.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold bytes that the terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if ctx.invoked_subcommand != "doctor":  # which says so among its findings
        for text in settings.misspelt():
            click.echo(f"Warning: {text}", err=True)
    if ctx.invoked_subcommand is None:
        click.echo(overview(), nl=False)


def overview() -> str:
    """What `deep-gemm` shows without arguments."""
    formatter = click.HelpFormatter(width=80)
    formatter.write(f"{(app.help or '').strip().partition(chr(10))[0]}\n\nStart here:\n")
    with formatter.indentation():
        formatter.write_dl([(f"deep-gemm {arguments}", text) for arguments, text in FIRST], col_max=50)
    for title, commands in groups().items():
        with formatter.section(title):
            formatter.write_dl(commands)
    formatter.write("\nOptions of a command: deep-gemm COMMAND --help\n")
    return formatter.getvalue()
