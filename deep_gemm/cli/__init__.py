"""The command line: `deep-gemm` and `python -m deep_gemm`. It is loaded only when it is run."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line and end the process with its exit status."""
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
