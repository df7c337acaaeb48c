"""The options of several commands that name shapes or a model."""

from __future__ import annotations

from pathlib import Path

import click

shape_option = click.option("--shape", "texts", multiple=True, metavar="MxNxK|NxK", help="A shape; repeatable.")
model_option = click.option(
    "--file",
    "--model",
    "path",
    type=click.Path(path_type=Path),
    help="A checkpoint's directory or safetensors, its config.json, or a JSON or YAML list of shapes.",
)
tp_option = click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel GPUs of a model."
)
