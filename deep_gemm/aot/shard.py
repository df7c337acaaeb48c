"""One part of a list of kernels, for tasks that cannot talk to each other, such as those of a Slurm array."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from deep_gemm import kernels
from deep_gemm.aot.inputs import shown
from deep_gemm.errors import InvalidInputError
from deep_gemm.params import KernelParams


def parse(text: str) -> tuple[int, int]:
    """ "2/8" is (2, 8): the third of eight parts. Raises InvalidInputError for anything else."""
    match = re.fullmatch(r"([0-9]{1,20})/([0-9]{1,20})", text.strip())
    if not match:
        raise InvalidInputError(f"A shard must look like 0/8, the first of eight parts, but it is {shown(text)}.")
    index, count = int(match.group(1)), int(match.group(2))
    check(index, count)
    return index, count


def pair(shard: Any) -> tuple[int, int]:
    """The two numbers of a shard (i, n). Raises InvalidInputError for anything else."""
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise InvalidInputError(f"shard must be (i, n), part i of n parts, such as (0, 8), but it is {shown(shard)}.")
    check(*shard)
    return shard[0], shard[1]


def check(index: int, count: int) -> None:
    """Raises InvalidInputError unless both are whole numbers and 0 <= index < count."""
    if not (isinstance(index, int) and isinstance(count, int) and 0 <= index < count):
        raise InvalidInputError(
            f"A shard i/n must have 0 <= i < n, but it is {index}/{count}: parts are counted from 0, so a Slurm array "
            "of 8 tasks needs --array=0-7."
        )


def order(params: Iterable[KernelParams]) -> list[KernelParams]:
    """The same in every process, largest tiles first: dealt out one by one, parts take equally long."""

    def place(one: KernelParams) -> tuple[int, str, str]:
        identity = json.dumps(one.to_json(), sort_keys=True)
        rows, columns = one.config.tile
        return -rows * columns, kernels.get(one.kernel).kernel_name(one), identity

    return sorted(params, key=place)


def deal(params: Iterable[KernelParams], index: int, count: int) -> list[KernelParams]:
    """Part `index` of `count`; parts differ in size by one at most. Raises InvalidInputError as `check`."""
    check(index, count)
    return order(params)[index::count]
