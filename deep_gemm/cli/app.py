"""The group of commands. Each lives in a module of its own, which is imported only when it is asked for."""

from __future__ import annotations

import errno
import importlib
import io
import sys

import click

from deep_gemm.errors import DeepGemmError, InvalidInputError, SettingError
from deep_gemm.settings import settings

GROUPS = {
    "Setup": {
        "doctor": "Show what was found and what is used, and say what to do.",
        "demo": "Compile, check and time one GEMM of DeepSeek-V3.",
    },
    "Deployment": {
        "precompile": "Compile the kernels of a model or of shapes ahead of time.",
        "cache": "Show, check, prune or clear stored kernels; make packs.",
    },
    "Speed": {
        "bench": "Time kernels beside cuBLASLt, or sum up records.",
        "compare": "Run the implementations of an operation side by side.",
        "inspect": "Show what would run for a shape: configs, source, SASS.",
        "calibrate": "Measure a GPU and fit the model that chooses configs to it.",
        "tune": "Measure configs for a model or shapes, and keep the choices.",
    },
    "Kernels": {"new-kernel": "Write the files of a kernel of your own, with a test."},
}
"""The commands as help shows them, by group."""
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}

FIRST = (
    ("doctor", "what works here, and what to do"),
    ("demo", "compile, check and time one GEMM"),
    ("precompile --model DIR --dry-run", "which layers have kernels"),
    ("precompile --model DIR --tp 8", "compile them before serving"),
    ("bench --shape 64x7168x2048", "time a shape beside cuBLASLt"),
)
"""What a new user types, in order: arguments, and what they are for."""


def write_groups(formatter: click.HelpFormatter) -> None:
    """Every command with its line of help, padded to one width, by group."""
    width = max(map(len, COMMANDS))
    for title, commands in GROUPS.items():
        with formatter.section(title):
            formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


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
        write_groups(formatter)

    def invoke(self, ctx: click.Context) -> object:
        # An error of this package, or one about a file, is a sentence for the user; a traceback would hide it.
        try:
            return super().invoke(ctx)
        except (InvalidInputError, SettingError) as error:
            raise Refused(_visible(error)) from error
        except DeepGemmError as error:
            raise click.ClickException(_visible(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of the pipe has stopped: click ends quietly
                raise
            raise click.ClickException(_visible(error)) from error


def _visible(error: Exception) -> str:
    """Its text with escapes for control characters, which a path may hold."""
    from deep_gemm.aot.inputs import printable

    return "\n".join(map(printable, str(error).expandtabs().split("\n")))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
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
    write_groups(formatter)
    formatter.write("\nOptions of a command: deep-gemm COMMAND --help\n")
    return formatter.getvalue()
