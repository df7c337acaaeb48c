"""The group of commands. Each lives in a module of its own, which is imported only when it is asked for."""

from __future__ import annotations

import errno
import importlib
import io
import sys

import click

from deep_gemm.errors import DeepGemmError

COMMANDS = {
    "bench": "Time kernels side by side with cuBLASLt; host cost; compile and load times.",
    "cache": "Show, check, prune or clear the cache of compiled kernels; make packs of it, and merge.",
    "calibrate": "Measure a GPU and fit the model that chooses configs to it.",
    "compare": "Run an operation's implementations side by side: checked, timed and ranked.",
    "demo": "Run the main job once: compile, check, time, and run again warm.",
    "doctor": "Say what was found: GPU, driver, compilers, cache, and what is used and why.",
    "inspect": "Show what would run for a shape: configs, estimates, source, registers, SASS.",
    "new-kernel": "Write the files of a kernel of your own, with a test.",
    "precompile": "Compile the kernels of a model or of given shapes ahead of time.",
}


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
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        # An error of ours, or of the system about a file, is a sentence for the caller; a traceback would hide it.
        try:
            return super().invoke(ctx)
        except DeepGemmError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # whom the output went to has read enough: click ends quietly
                raise
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deep-gemm-jit", prog_name="deep-gemm")
def app() -> None:
    """deep_gemm: FP8 GEMM kernels that are compiled when they are first called."""
    for stream in (sys.stdout, sys.stderr):
        # The name of a file need not be text that the terminal can show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
