"""Serving sets: the tiles that calls choose from, as arguments of `Template.make`. Chosen by a greedy cover of surveyed
shapes (see ``benchmarks/README.md``), if a set does not say otherwise."""

from __future__ import annotations

from typing import Any

Cluster = tuple[int, int, int]

FP8_GEMM: tuple[tuple[int, int, tuple[int, int, int], int, bool], ...] = (
    (64, 16, (1, 1, 1), 1, False),
    (64, 16, (1, 1, 1), 2, False),
    (64, 32, (1, 1, 1), 1, False),
    (64, 32, (1, 1, 1), 1, True),
    (64, 32, (1, 1, 1), 2, False),
    (64, 32, (1, 1, 1), 2, True),
    (64, 32, (1, 1, 2), 1, True),
    (64, 48, (1, 1, 1), 1, True),
    (64, 64, (1, 1, 1), 1, False),
    (64, 64, (1, 1, 1), 1, True),
    (64, 64, (1, 1, 1), 2, False),
    (64, 64, (1, 1, 1), 2, True),
    (64, 64, (1, 1, 4), 1, True),
    (64, 96, (1, 1, 1), 1, True),
    (64, 96, (1, 1, 1), 2, False),
    (64, 96, (1, 1, 1), 2, True),
    (64, 128, (1, 1, 1), 1, False),
    (64, 128, (1, 1, 1), 1, True),
    (64, 144, (1, 1, 1), 1, False),
    (64, 144, (1, 1, 1), 1, True),
    (128, 32, (1, 1, 2), 1, True),
    (128, 64, (1, 1, 1), 1, False),
    (128, 64, (1, 1, 1), 1, True),
    (128, 64, (1, 1, 4), 1, True),
    (128, 80, (1, 1, 1), 1, False),
    (128, 80, (1, 2, 1), 1, True),
    (128, 96, (1, 1, 1), 1, False),
    (128, 128, (1, 1, 1), 1, False),
    (128, 128, (1, 1, 1), 1, True),
    (128, 128, (1, 1, 4), 1, True),
    (128, 128, (1, 2, 1), 1, True),
    (128, 144, (1, 1, 1), 1, True),
    (128, 160, (1, 1, 1), 1, False),
    (128, 160, (1, 1, 1), 1, True),
    (128, 192, (1, 1, 1), 1, False),
    (128, 192, (1, 1, 1), 1, True),
    (128, 192, (2, 1, 1), 1, True),
    (128, 224, (1, 1, 1), 1, False),
    (128, 224, (1, 1, 1), 1, True),
    (128, 256, (1, 1, 1), 1, True),
    (128, 256, (2, 1, 1), 1, True),
    (256, 128, (1, 1, 1), 1, False),
    (256, 128, (1, 1, 1), 1, True),
    (256, 128, (1, 2, 1), 1, True),
)
"""(block_m, block_n, cluster, CTAs per SM, persistent) of the serving set, chosen by a greedy cover of surveyed shapes
(see ``benchmarks/serving_set.py``)."""

FP8_ROWS = tuple(row for row in FP8_GEMM if row[2][2] == 1 and row[:3] != (128, 256, (2, 1, 1)))
"""The same without split K, since the epilogue multiplies whole sums, and without a cluster whose consumers multiply in
two parts, which leaves too few registers for scales of rows."""

FP8_SWAPPED: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 1),
    (8, 1, 1, 2),
    (8, 1, 2, 1),
    (8, 2, 1, 1),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (8, 8, 1, 2),
    (16, 1, 1, 2),
    (16, 1, 2, 1),
    (16, 2, 1, 1),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (24, 1, 2, 1),
    (24, 4, 1, 2),
    (24, 8, 1, 2),
    (32, 1, 2, 1),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 1),
    (32, 8, 1, 2),
)
"""(block_m, CTAs along k, consumers along k, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed
shapes (see ``benchmarks/serving_set.py``)."""

FP8_SCALED: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
    (64, 32, (1, 1), 2, 1),
    (64, 64, (1, 1), 2, 2),
    (64, 128, (1, 1), 2, 1),
    (128, 64, (1, 1), 2, 2),
    (128, 96, (1, 1), 1, 1),
    (128, 112, (1, 1), 2, 1),
    (128, 128, (1, 1), 2, 1),
    (128, 128, (1, 2), 1, 1),
    (128, 128, (1, 2), 2, 2),
    (128, 160, (1, 1), 2, 1),
    (128, 192, (2, 1), 2, 1),
    (128, 256, (1, 1), 1, 1),
    (128, 256, (2, 1), 1, 1),
    (256, 64, (1, 1), 1, 2),
)
"""(block_m, block_n, cluster, staging buffers, sets of partial sums) of the serving set. On an H200, in single calls of
30 shapes with 1D1D and of 44 with scales of rows, the best of these was within 1% of the best of all."""

FP8_SCALED_SWAPPED: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 2),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (16, 1, 1, 2),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 2),
    (64, 1, 1, 1),
    (64, 4, 1, 1),
)
"""(block_m, CTAs along k, consumers along k, CTAs on an SM) of the serving set: evenly spaced sizes, which were
not chosen by measurements."""

FP8_BATCHED: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
    (64, 64, (1, 1), 2, 2),
    (64, 128, (1, 1), 2, 1),
    (128, 128, (1, 1), 2, 2),
    (128, 256, (1, 1), 1, 1),
    (128, 256, (2, 1), 1, 1),
    (256, 128, (1, 1), 1, 1),
    (256, 128, (1, 2), 1, 1),
)
"""(block_m, block_n, cluster, staging buffers, sets of partial sums). A few of those of one product, whose tiles hold
whole blocks of B's scales."""

FP8_BATCHED_SWAPPED: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 1),
    (8, 1, 1, 2),
    (16, 1, 1, 2),
    (32, 1, 1, 2),
    (64, 1, 1, 1),
    (64, 1, 1, 2),
)
"""(block_m, CTAs along k, consumers along k, CTAs on an SM). K is not split."""

FP8_GROUPED: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
    (64, 32, (1, 1), 2, 2),
    (64, 128, (1, 1), 2, 1),
    (128, 128, (1, 1), 1, 1),
    (128, 192, (1, 1), 1, 1),
    (128, 256, (1, 1), 1, 1),
)
"""(block_m, block_n, cluster, staging buffers, sets of partial sums). On an H100, in single calls of 28 shapes, the
best of these was within 3% of the best of all, but for two shapes. The narrow tiles had 64 columns then. They are for
few rows: in single calls of 14 shapes with 4 to 20 expected rows in 3 to 64 groups, they took 0.96 of the time of 128
columns and 0.98 of that of 64, and were slower in none by more than 1%. 192 columns are for rounds that others leave
half empty: in 24 drawn sets of labelled groups (H200) the model's choices took 0.8% less with them, and 8% less for 12
groups of 535 rows."""

FP8_GATED: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
    (64, 64, (1, 1), 2, 2),
    (64, 128, (1, 1), 2, 1),
    (64, 256, (1, 1), 2, 1),
    (128, 128, (1, 1), 2, 1),
    (128, 256, (1, 1), 1, 1),
    (128, 256, (2, 1), 1, 1),
)
"""(block_m, block_n, cluster, staging buffers, sets of partial sums), not measured yet."""

FP8_K_GROUPED: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
    (128, 64, (1, 1), 2, 2),
    (128, 128, (1, 1), 2, 1),
    (128, 256, (1, 1), 1, 1),
)
"""(block_m, block_n, cluster, staging buffers, sets of partial sums). Scales of both sides' rows leave no registers for
the last. With them, on an H100 128 x 128 tiles with one set were the
fastest of all in single calls of five shapes; two sets took 2 to 8% longer."""

B16_GEMM: tuple[tuple[int, int, tuple[int, int, int], int], ...] = (
    (64, 32, (1, 1, 1), 2),
    (64, 48, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 2),
    (64, 64, (1, 1, 2), 1),
    (64, 64, (1, 1, 4), 1),
    (64, 96, (1, 1, 1), 1),
    (64, 96, (1, 1, 1), 2),
    (64, 128, (1, 1, 1), 1),
    (64, 128, (1, 1, 4), 1),
    (128, 32, (1, 1, 2), 1),
    (128, 64, (1, 1, 1), 1),
    (128, 64, (1, 1, 2), 1),
    (128, 64, (1, 1, 4), 1),
    (128, 96, (1, 1, 1), 1),
    (128, 128, (1, 1, 1), 1),
    (128, 128, (1, 1, 2), 1),
    (128, 128, (1, 1, 4), 1),
    (128, 128, (2, 1, 1), 1),
    (128, 160, (1, 1, 1), 1),
    (128, 176, (1, 1, 1), 1),
    (128, 192, (1, 1, 1), 1),
    (128, 224, (1, 1, 1), 1),
    (128, 256, (1, 1, 1), 1),
    (128, 256, (2, 1, 1), 1),
    (256, 128, (1, 1, 1), 1),
    (256, 128, (1, 2, 1), 1),
    (256, 160, (1, 2, 1), 1),
    (256, 192, (2, 1, 1), 1),
)
"""(block_m, block_n, cluster, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed shapes (see
``benchmarks/README.md``)."""

B16_SWAPPED: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 1),
    (8, 1, 1, 2),
    (8, 1, 2, 2),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (8, 8, 1, 2),
    (16, 1, 1, 2),
    (16, 1, 2, 1),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (24, 1, 2, 1),
    (24, 8, 1, 1),
    (32, 1, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 1),
    (64, 1, 1, 1),
    (64, 4, 1, 1),
    (64, 8, 1, 1),
)
"""(block_m, CTAs along k, consumers along k, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed
shapes (see ``benchmarks/README.md``)."""

B16_BATCHED: tuple[tuple[int, int, tuple[int, int, int], int], ...] = (
    (64, 64, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 2),
    (64, 128, (1, 1, 1), 1),
    (128, 128, (1, 1, 1), 1),
    (128, 256, (1, 1, 1), 1),
    (128, 256, (2, 1, 1), 1),
    (256, 128, (1, 1, 1), 1),
    (256, 128, (1, 2, 1), 1),
)
"""(block_m, block_n, cluster, CTAs per SM). A few of those of one product, without split K."""

B16_SUMMED: tuple[tuple[int, int, tuple[int, int, int], int, bool], ...] = (
    (64, 64, (1, 1, 4), 1, False),
    (128, 128, (1, 1, 1), 1, False),
    (128, 128, (1, 1, 4), 1, False),
    (64, 64, (1, 1, 1), 1, True),
    (64, 128, (1, 1, 1), 1, True),
    (128, 128, (1, 1, 1), 1, True),
)
"""(block_m, block_n, cluster, CTAs per SM, whether K has parts). D is small and K, that of all products together, is
long. Of 63 configs on 18 sizes (H200), a fourth one with parts would gain 0.4%. The best of the six reaches 1.00
of DeepGEMM's speed on average over 37 sizes, 28 of them drawn, and 0.91 in the worst case."""

B16_GROUPED: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (128, 160), (128, 192), (128, 224), (128, 256))
"""(block_m, block_n) of the serving set. On an H100, in single calls of 28 shapes, the best of those of a power of two
columns was within 3% of the best of all, but for one shape (8%). In 24 drawn sets of labelled groups (H200) the model's
choices took 1.5% less with the others, and 8% less for 12 groups of 535 rows and for 8 of 518."""

B16_GATED: tuple[tuple[Any, ...], ...] = (
    (64, 64, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 2),
    (64, 128),
    (128, 128),
    (128, 256),
    (128, 256, (2, 1, 1)),
    (256, 128),
)
"""(block_m, block_n, cluster, CTAs per SM), not measured yet."""

B16_K_GROUPED: tuple[tuple[int, int], ...] = ((128, 128), (128, 256), (256, 128))
"""(block_m, block_n) of the serving set. On an H100 one of the larger two was the best of all in four of five
shapes, and within 4% of it in the other."""

_HEIGHTS: dict[tuple[int, Cluster], tuple[int, ...]] = {
    (64, (1, 1, 1)): (80, 96, 112),
    (64, (1, 4, 1)): (96,),
    (64, (2, 2, 1)): (64, 96),
    (64, (4, 1, 1)): (64,),
    (128, (1, 1, 1)): (80, 88, 120, 128, 136, 152, 160, 168, 176, 192, 200, 208, 224, 240, 256),
    (128, (1, 2, 1)): (96, 144, 176, 192, 208, 224, 256),
    (128, (2, 1, 1)): (152, 240),
    (128, (2, 2, 1)): (80, 96, 112, 128, 160),
    (128, (4, 1, 1)): (64, 96, 160),
    (192, (1, 1, 1)): (96, 112, 144, 152, 160, 168, 184),
    (192, (1, 2, 1)): (176,),
    (192, (2, 1, 1)): (128, 144, 152, 160, 176, 192),
    (192, (4, 1, 1)): (160,),
    (256, (1, 1, 1)): (152, 160, 168, 176, 184, 192),
    (256, (1, 2, 1)): (192,),
    (256, (2, 1, 1)): (120, 136, 144),
}

B16_SWAP_AB: tuple[tuple[int, int, Cluster], ...] = tuple(
    (height, width, cluster) for (width, cluster), heights in _HEIGHTS.items() for height in heights
)
"""(block_m, block_n, cluster). Of 153 tiles that were measured on 306 shapes (H100), the one whose choices matter the
least was taken out again and again (``benchmarks/serving_set.py``). Judged by shapes that were left out, choices among
these lose 0.25% beside all 153; among 48 they lose 0.5%."""

FP8_IN_PARTS: tuple[tuple[Any, ...], ...] = (
    (64, 32, (1, 1, 2), 1, True),
    (64, 64, (1, 1, 2), 1, True),
    (64, 64, (1, 1, 4), 1, True),
    (64, 96, (1, 1, 2), 1, True),
    (128, 64, (1, 1, 2), 1, True),
    (128, 64, (1, 1, 4), 1, True),
    (128, 96, (1, 1, 2), 1, True),
    (128, 128, (1, 1, 4), 1, True),
    (64, 64, (1, 1, 1), 1, True, 4),
    (128, 64, (1, 1, 1), 1, True, 2),
    (128, 64, (1, 1, 1), 1, True, 4),
    (128, 80, (1, 1, 1), 1, True, 4),
    (128, 96, (1, 1, 1), 1, True, 2),
    (128, 112, (1, 1, 1), 1, True, 2),
    (128, 128, (1, 1, 1), 1, True, 2),
    (128, 128, (1, 1, 1), 1, True, 4),
    (256, 64, (1, 1, 1), 1, True, 2),
)
"""As `FP8_GEMM`, and the parts of K that a CTA sums in turn; see `groups.parts_of_k`. These sets were chosen by the
model, as a greedy cover of shapes with up to 2304 columns. By the model they cost 2 to 3% beside twice as many."""

FP8_SWAPPED_IN_PARTS: tuple[tuple[int, int, int, int], ...] = (
    (8, 2, 1, 1),
    (8, 4, 1, 1),
    (16, 2, 1, 1),
    (16, 4, 1, 1),
    (24, 4, 1, 2),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
)
"""As `FP8_SWAPPED`."""

B16_IN_PARTS: tuple[tuple[Any, ...], ...] = (
    (64, 64, (1, 1, 2), 1),
    (64, 64, (1, 1, 4), 1),
    (64, 128, (1, 1, 4), 1),
    (128, 64, (1, 1, 2), 1),
    (128, 64, (1, 1, 4), 1),
    (128, 128, (1, 1, 2), 1),
    (128, 128, (1, 1, 4), 1),
    (64, 96, (1, 1, 1), 1, False, 4),
    (64, 128, (1, 1, 1), 1, False, 4),
    (128, 64, (1, 1, 1), 1, False, 2),
    (128, 96, (1, 1, 1), 1, False, 2),
    (128, 96, (1, 1, 1), 1, False, 4),
    (128, 128, (1, 1, 1), 1, False, 2),
    (128, 128, (1, 1, 1), 1, False, 4),
    (128, 144, (1, 1, 1), 1, False, 4),
    (128, 176, (1, 1, 1), 1, False, 2),
    (256, 64, (1, 1, 1), 1, False, 2),
)
"""As `B16_GEMM`, and the parts of K that a CTA sums in turn."""

B16_SWAPPED_IN_PARTS: tuple[tuple[int, int, int, int], ...] = (
    (8, 2, 1, 1),
    (8, 4, 1, 1),
    (16, 2, 1, 1),
    (16, 4, 1, 1),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
    (64, 2, 1, 1),
    (64, 4, 1, 1),
)
"""As `B16_SWAPPED`."""
