"""Options of several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from deep_gemm import arch

PATH = click.Path(path_type=Path)


class NewFile(click.Path):
    """A file to write, in a directory that exists: a mistyped one is no reason to make it, after minutes of work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no directory {path.parent}: make it first.", param, ctx)
        return path


NEW_FILE = NewFile(path_type=Path, dir_okay=False)

shape_option = click.option("--shape", "texts", multiple=True, metavar="MxNxK|NxK", help="A shape; repeatable.")
model_option = click.option(
    "--file",
    "--model",
    "path",
    type=PATH,
    help="A checkpoint's directory or safetensors, its config.json, or a JSON or YAML list of shapes.",
)
tp_option = click.option("--tp", type=click.IntRange(1), default=1, help="Tensor-parallel GPUs.")
op_option = click.option(
    "--op",
    default="",
    show_default=False,
    metavar="NAME",
    help="Operation of shapes and of unquantised models. [FP8; the model's dtype]",
)
sms_option = click.option("--num-sms", type=click.IntRange(1, 4096), help="SMs that calls may use. [all]")
arch_option = click.option("--arch", default=arch.DEFAULT.name, help="The target; its GPU need not be here.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
