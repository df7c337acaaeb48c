"""FP8 products whose columns belong to heads, with room in the middle of each head that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import BLOCKS, fp8_gemm_reference
from deep_gemm.runtime.calls import Parameter, make_entry

from ..errors import InvalidInputError
from ..records import record
from . import checks, layouts, scales
from .checks import shape_of
from .dense import Dense
from .gemm import COMPILED_DIMS, RECIPES, GemmOperands
from .layouts import Preparation, is_k_major
from .table import SKIP_HEAD_MID

BOX = 64
"""Columns of D that TMA stores at once: parts of heads are multiples of it, or consumers store them."""


@record(frozen=True, eq=False)
class HeadOperands(GemmOperands):
    """Checked operands; ``splits`` are the columns of a head of d on the left, in the middle and on the right."""

    splits: tuple[int, int, int] = (0, 0, 0)


class SkipHeadMid(Dense):
    """See `deep_gemm.fp8_gemm_nt_skip_head_mid`."""

    kept = ("d",)  # columns in the middle of heads

    def __init__(self, name: str) -> None:
        super().__init__(name)
        splits, cast = Parameter("head_splits", "tuple[int, int, int]"), self.options[-1]
        self.parameters = (*self.first, splits, RECIPES[0], COMPILED_DIMS, cast)
        self.absent, self.fallbacks = (), MappingProxyType({})

    def check(self, *arguments: Any, **named_arguments: Any) -> HeadOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        splits = check_splits(given["head_splits"])
        asked, dims = scales.check_recipe(given["recipe"]), checks.check_compiled_dims(given["compiled_dims"])
        checks.check_bool("disable_ue8m0_cast", given["disable_ue8m0_cast"])
        scales.check_blocks(asked, given, "products that skip columns")
        named = self.named(given)
        device = checks.check_tensors(self.name, named, {}, (2,))
        self._check_values(named, "nt")
        scales.check_dense(named, BLOCKS)
        heads = _heads(named, splits)
        self._check_output_dtypes(named, "nt")
        if checks.is_fake(named.values()):
            return None
        for name in ("a", "b"):
            if named[name].numel() and is_k_major(named[name]):
                layouts.check_start(name, named[name])
        checks.check_places(named)
        (m, k), n = named["a"].shape, named["b"].shape[0]
        if m == 0 or n == 0:
            return None
        if k == 0:
            with torch.inference_mode():  # d may be an inference tensor
                for part in kept(named["d"], splits):
                    part.zero_()
            return None
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return HeadOperands(self.name, tensors, device, m, n, k, dims, BLOCKS, groups=heads, splits=splits)

    def place_outputs(self, prepared: Preparation, x: GemmOperands) -> bool:
        assert isinstance(x, HeadOperands)
        prepared.numbers["heads"] = x.splits
        whole = all(columns % BOX == 0 for columns in (x.splits[0], x.splits[2]))
        return super().place_outputs(prepared, x) and whole and x.splits[1] * x.tensors["d"].element_size() % 16 == 0

    def special(self, x: GemmOperands) -> str:
        return "columns that are left out"

    def reference(self, x: GemmOperands) -> None:
        """The dense product, copied to its columns."""
        assert isinstance(x, HeadOperands)
        a, sfa, b, sfb, d = x.tensors.values()
        product = torch.empty(x.m, x.n, dtype=d.dtype, device=d.device)
        fp8_gemm_reference(a, sfa, b, sfb, product)
        with torch.inference_mode():
            sizes = (x.splits[0], x.splits[2])
            for part, found in zip(
                kept(d, x.splits), product.unflatten(1, (x.groups, -1)).split(sizes, 2), strict=True
            ):
                part.copy_(found)


def kept(d: Tensor, splits: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The left and the right columns of all heads of d, (M, heads, columns)."""
    left, _, right = d.unflatten(1, (-1, sum(splits))).split(splits, 2)
    return left, right


def check_splits(head_splits: Any) -> tuple[int, int, int]:
    """The columns of a head on the left, in the middle and on the right."""
    right = isinstance(head_splits, (tuple, list)) and len(head_splits) == 3
    for x in head_splits if right else ():
        right = right and isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= checks.MAX_SIZE
    if not right or head_splits[0] + head_splits[2] == 0:
        raise InvalidInputError(
            "head_splits must be (left, mid, right), columns of a head of d, integers from 0 on, with left + right "
            f"above 0, but it is {checks.shown(head_splits)}."
        )
    left, mid, last = head_splits
    return left, mid, last


def _heads(named: Mapping[str, Tensor], splits: tuple[int, int, int]) -> int:
    """The number of heads. Refuses a b and a d that do not have whole heads."""
    (left, mid, right), b, d = splits, named["b"], named["d"]
    n, each = b.shape[0], left + right
    if n % each:
        raise InvalidInputError(
            f"N, the rows of b, must be a multiple of the {left} + {right} columns of a head in head_splits, but b is "
            f"{shape_of(b)}."
        )
    wanted = (named["a"].shape[0], n + n // each * mid)
    if tuple(d.shape) != wanted:
        raise InvalidInputError(
            f"d must have the shape {wanted}, rows of a by {n // each} heads of {left} + {mid} + {right} columns, but "
            f"it has {shape_of(d)}."
        )
    for name in ("a", "b", "d"):
        checks.check_sizes(name, named[name])
    return n // each


fp8 = make_entry(SkipHeadMid(SKIP_HEAD_MID))
"""The function behind the public one."""
