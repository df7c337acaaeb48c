"""The grouped GEMMs that are timed: sizes, routings, what they compute and move."""

from __future__ import annotations

import functools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from deep_gemm.spec import SCALE_BLOCK, align, ceil_div

KINDS, FORMS = ("fp8", "bf16"), ("contiguous", "masked")
SIZES = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
"""N and K."""
ROUTINGS = {"contiguous": ((4, 8192), (8, 4096), (64, 256)), "masked": ((32, 192), (6, 1024), (32, 20), (6, 20))}
"""Groups, and the mean of their rows."""
K_SIZES = ((4096, 7168, ((4, 8192), (8, 4096), (16, 2048))), (7168, 2048, ((4, 8192), (16, 2048))))
"""For GEMMs grouped along K: M, N, and groups and the mean of their K."""
SPREAD = 0.3
"""The size of a group differs from the mean by up to this part of it."""
MAX_M = 4096
"""Rows that each group has memory for in the masked form."""
ALIGNMENT = 128
"""Groups start at multiples of this many rows in the other forms. K of each group is a multiple of it."""


@dataclass(frozen=True)
class Grouped(ABC):
    """Fields of every grouped GEMM: ``kind`` is "fp8" or "bf16", ``mean`` that of the groups' M, or of their K."""

    kind: str
    form: str
    groups: int
    mean: int

    @property
    @abstractmethod
    def size(self) -> str:
        """The two sizes that all groups share."""

    @property
    def words(self) -> tuple[str, str, str, str]:
        """The words that `--only` matches: kind, form, groups x mean size, and the sizes that all groups share."""
        return self.kind, self.form, f"{self.groups}x{self.mean}", self.size

    def __str__(self) -> str:
        return " ".join(self.words)

    def drawn(self, name: str) -> list[int]:
        """A size for each group: the same in every run, for every kind and all other sizes."""
        rng = random.Random(f"{name} {self.groups}x{self.mean}")
        return [int(self.mean * rng.uniform(1 - SPREAD, 1 + SPREAD)) for _ in range(self.groups)]

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations, without those of padding."""

    @property
    @abstractmethod
    def bytes_moved(self) -> int:
        """Bytes that have to be read and written."""


@dataclass(frozen=True)
class Shape(Grouped):
    """A GEMM grouped by M; ``form`` is "contiguous" or "masked"."""

    n: int
    k: int
    max_m: int = MAX_M

    @property
    def size(self) -> str:
        """N x K."""
        return f"{self.n}x{self.k}"

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The rows of each group."""
        most = self.max_m if self.form == "masked" else math.inf
        return tuple(int(min(max(rows, 1), most)) for rows in self.drawn(self.form))

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


@dataclass(frozen=True)
class KShape(Grouped):
    """A GEMM grouped along K, which adds to D in place; ``form`` is "k"."""

    m: int
    n: int

    @property
    def size(self) -> str:
        """M x N."""
        return f"{self.m}x{self.n}"

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """K of each group, a multiple of 128."""
        return tuple(align(max(k, 1), ALIGNMENT) for k in self.drawn("along k"))

    @property
    def k(self) -> int:
        """The sum over all groups."""
        return sum(self.counts)

    @property
    def flops(self) -> int:
        """Floating-point operations of the product."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes of A and B, of their scales, and of float32 D, which is read and written."""
        of_k = self.k + 4 * self.k // SCALE_BLOCK if self.kind == "fp8" else 2 * self.k
        return of_k * (self.m + self.n) + 2 * 4 * self.groups * self.m * self.n


SHAPES = tuple(
    Shape(kind, form, groups, mean, n, k)
    for kind in KINDS
    for form in FORMS
    for groups, mean in ROUTINGS[form]
    for n, k in SIZES
)
K_SHAPES = tuple(
    KShape(kind, "k", groups, mean, m, n) for kind in KINDS for m, n, routings in K_SIZES for groups, mean in routings
)


def words_of(shapes: Sequence[Grouped]) -> tuple[str, ...]:
    """All words of these shapes."""
    return tuple(dict.fromkeys(word for words in zip(*(s.words for s in shapes), strict=True) for word in words))


S = TypeVar("S", bound=Grouped)


def chosen(only: Sequence[str], shapes: Sequence[S]) -> list[S]:
    """The shapes with one of the given words of each sort. A sort of which no word is given does not count."""
    sorts = [set(words) & set(only) for words in zip(*(s.words for s in shapes), strict=True)]
    return [s for s in shapes if all(not sort or word in sort for word, sort in zip(s.words, sorts, strict=True))]
