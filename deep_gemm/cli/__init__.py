"""The command line: `deep-gemm` and `python -m deep_gemm`. It is loaded only when it is run."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line and end the process with its exit status, which is 130 after Ctrl-C."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, interrupt)
    try:
        _main()
    finally:
        # What an exception at exit would be raised in ignores it.
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if interrupts:  # also where something has caught the exception
            sys.exit(INTERRUPTED)


def _main() -> None:
    try:
        import click
        import rich
    except ImportError as error:
        print(
            f"deep-gemm: the command line needs {error.name}, which is not installed. "
            "Install it with: pip install click rich pyyaml",
            file=sys.stderr,
        )
        sys.exit(2)
    del click, rich
    from deep_gemm.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may hold bytes that it cannot show
    app(prog_name="deep-gemm")
