"""FP8 products into heads with columns that are left out, with exact results; and one call of each kernel on them."""

from typing import Any

import torch
from batched_cases import DEVICE, integers, scaled, scaled_product, surrounded
from grouped_runs import launch
from torch import Tensor

from deep_gemm.jit import Builder
from deep_gemm.ops.skip_head_mid import SkipHeadMid, kept
from deep_gemm.ops.table import SKIP_HEAD_MID
from deep_gemm.params import KernelParams
from deep_gemm.testing import Guarded, guarded

Splits = tuple[int, int, int]
BF16 = torch.bfloat16
WHOLE: tuple[Splits, ...] = ((128, 64, 128), (64, 8, 192), (0, 72, 64))
"""Whose parts are whole boxes."""
ODD: tuple[Splits, ...] = ((100, 3, 50), (1, 8, 0), (64, 4, 64))


def operands(m: int, heads: int, splits: Splits, k: int) -> dict[str, Tensor]:
    """FP8 operands and their scales."""
    return {name: x[0] for name, x in scaled(1, m, heads * (splits[0] + splits[2]), k).items()}


def check(d: Guarded, x: dict[str, Tensor], splits: Splits, before: Tensor) -> None:
    """Raises AssertionError unless the kept columns are exact, and all others as they were."""
    product = scaled_product({name: each[None] for name, each in x.items()})[0].to(BF16)
    heads = product.shape[1] // (splits[0] + splits[2])
    wanted = before.clone()
    for part, found in zip(
        kept(wanted, splits), product.unflatten(1, (heads, -1)).split((splits[0], splits[2]), 2), strict=True
    ):
        part.copy_(found)
    d.check("d")
    assert torch.equal(d.tensor, wanted)


def output(m: int, heads: int, splits: Splits, gap: int = 8) -> tuple[Guarded, Tensor]:
    """A guarded d, and what is in it."""
    columns = heads * sum(splits)
    d, before = guarded((m, columns), BF16, DEVICE, (columns + gap, 1)), integers(m, columns, seed=7)
    d.tensor.copy_(before)
    return d, before


def is_right(params: KernelParams, builder: Builder) -> bool:
    """Whether the kernel's results are exact, and nothing else was written."""
    try:
        for splits in WHOLE if params.store == "tma" else ODD:
            for m, heads, k in ((200, 3, 272), (40, 5, 128)):
                run(params, builder, m, heads, splits, k)
    except AssertionError:
        return False
    return True


def run(params: KernelParams, builder: Builder, m: int, heads: int, splits: Splits, k: int) -> None:
    """Raises AssertionError."""
    x = operands(m, heads, splits, k)
    given: dict[str, Any] = {}
    for name in "ab":
        values = surrounded(x[name][None]).tensor[0]
        given[name] = values, x["sf" + name]
    d, before = output(m, heads, splits)
    launch(SkipHeadMid(SKIP_HEAD_MID), {**given, "d": d.tensor, "head_splits": splits}, params.config, builder)
    check(d, x, splits, before)
