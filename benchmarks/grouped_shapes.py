"""The grouped GEMMs that are timed: sizes, routings, what they compute and move."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from deep_gemm.spec import SCALE_BLOCK, align, ceil_div

KINDS, FORMS = ("fp8", "bf16"), ("contiguous", "masked")
SIZES = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
"""N and K."""
ROUTINGS = {"contiguous": ((4, 8192), (8, 4096), (64, 256)), "masked": ((32, 192), (6, 1024), (32, 20), (6, 20))}
"""Groups, and the mean of their rows."""
SPREAD = 0.3
"""Rows of a group differ from the mean by up to this part of it."""
MAX_M = 4096
"""Rows that each group has memory for in the masked form."""
ALIGNMENT = 128
"""Groups start at multiples of this many rows in the other forms."""


@dataclass(frozen=True)
class Shape:
    """A grouped GEMM. ``kind`` is "fp8" or "bf16", ``form`` "contiguous" or "masked", ``mean`` the mean of the rows of
    a group."""

    kind: str
    form: str
    groups: int
    mean: int
    n: int
    k: int
    max_m: int = MAX_M

    @property
    def words(self) -> tuple[str, str, str, str]:
        """What `--only` chooses by: kind, form, groups x mean rows, and N x K."""
        return self.kind, self.form, f"{self.groups}x{self.mean}", f"{self.n}x{self.k}"

    def __str__(self) -> str:
        return " ".join(self.words)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The rows of each group: the same in every run, and for every kind, N and K."""
        rng = random.Random(f"{self.form} {self.groups}x{self.mean}")
        drawn = (int(self.mean * rng.uniform(1 - SPREAD, 1 + SPREAD)) for _ in range(self.groups))
        return tuple(min(max(rows, 1), self.max_m) if self.form == "masked" else max(rows, 1) for rows in drawn)

    @property
    def starts(self) -> list[int]:
        """The first row of each group, where groups lie one after the other."""
        return [sum(align(rows, ALIGNMENT) for rows in self.counts[:group]) for group in range(self.groups)]

    @property
    def m(self) -> int:
        """Rows without padding."""
        return sum(self.counts)

    @property
    def padded_m(self) -> int:
        """Rows with padding, where groups lie one after the other."""
        return sum(align(rows, ALIGNMENT) for rows in self.counts)

    @property
    def flops(self) -> int:
        """Floating-point operations of rows that are no padding."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes of rows of A and D that are no padding, of all B, and of scales."""
        size = 1 if self.kind == "fp8" else 2
        total = size * (self.m * self.k + self.groups * self.n * self.k) + 2 * self.m * self.n
        if self.kind == "fp8":
            blocks = ceil_div(self.k, SCALE_BLOCK)
            total += 4 * blocks * (self.m + self.groups * ceil_div(self.n, SCALE_BLOCK))
        return total


SHAPES = tuple(
    Shape(kind, form, groups, mean, n, k)
    for kind in KINDS
    for form in FORMS
    for groups, mean in ROUTINGS[form]
    for n, k in SIZES
)
WORDS = tuple(dict.fromkeys(word for words in zip(*(shape.words for shape in SHAPES), strict=True) for word in words))


def chosen(only: Sequence[str]) -> list[Shape]:
    """The shapes with one of the given words of each sort. A sort of which no word is given does not count."""
    sorts = [set(words) & set(only) for words in zip(*(shape.words for shape in SHAPES), strict=True)]
    return [s for s in SHAPES if all(not sort or word in sort for word, sort in zip(s.words, sorts, strict=True))]
