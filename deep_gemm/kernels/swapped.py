"""Shared code of the families with operands swapped: weights are the rows (M) of wgmma, tokens the columns (N)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..arch import ArchSpec
from ..params import HalfSwappedConfig, SwappedConfig
from ..spec import ceil_div
from .loads import BARRIER_BYTES

Swapped = SwappedConfig | HalfSwappedConfig

TOKENS = (8, 16, 24, 32, 48, 64)
"""Tile sizes along M. Any multiple of 8 is possible."""

WEIGHTS = 64
"""Rows of B in a tile. With FP8, tiles of 32, 128 and 256 rows gained less than 0.1% over 216 surveyed rows (H100)."""

MOST_TOKENS = 64
"""Up to so many rows of A the kernels for 16-bit operands here are chosen. Above, `Sm90HalfTurned` has tiles too."""

MAX_STAGES = 24
"""Stages at most. Only the smallest tiles could have more."""

_CONSUMERS_K = (1, 2)
_CLUSTERS_K = (1, 2, 4, 8)

_LITTLE_PADDING = 1.15


def choices() -> Iterator[tuple[int, int, int, int]]:
    """(block_m, CTAs along k, consumers along k, CTAs per SM) of all configs; `illegal` refuses more than 8 parts of
    split K."""
    return itertools.product(TOKENS, _CLUSTERS_K, _CONSUMERS_K, (1, 2))


def illegal(c: Swapped, block_k: int, shared: int, arch: ArchSpec) -> str | None:
    """Why ``c``, with ``shared`` bytes of shared memory, cannot run on ``arch``, or None. Only checks that the families
    share."""
    if (c.block_n, c.block_k) != (WEIGHTS, block_k):
        return f"block_n and block_k must be {WEIGHTS} and {block_k}, not {c.block_n} and {c.block_k}"
    if (c.cluster_m, c.cluster_n) != (1, 1) or c.cluster_k not in _CLUSTERS_K or c.consumers_k not in _CONSUMERS_K:
        given = f"{c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs and {c.consumers_k} consumers along K"
        return f"sharing a tile by {given} is not 1 x 1 x one of {_CLUSTERS_K} and one of {_CONSUMERS_K}"
    if c.num_consumers != c.consumers_k:
        return f"num_consumers must be consumers_k, {c.consumers_k}, not {c.num_consumers}"
    if c.block_m % 8 or not 8 <= c.block_m <= TOKENS[-1]:
        return f"block_m must be a multiple of 8 from 8 to {TOKENS[-1]}, not {c.block_m}"
    if c.k_splits > 8:
        return f"K can be split into 8 parts at most, not {c.k_splits}"
    if c.num_stages < 2 * c.consumers_k or c.num_stages % c.consumers_k:
        return f"{c.num_stages} stages are not two or more for each of {c.consumers_k} consumers along K"
    if c.ctas_per_sm not in (1, 2):
        return f"{c.ctas_per_sm} CTAs on an SM: registers are budgeted for one or two"
    if not arch.ctas_fit(shared, c.ctas_per_sm):
        return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
    return None


def worthwhile(m: int, block_m: int, sizes: Sequence[int]) -> bool:
    """Whether tiles of ``block_m`` tokens suit ``m`` tokens. Few tokens need the smallest tile that holds them, so that
    weights are read once. More tokens need tiles with little padding. ``sizes`` are those of the serving set."""
    if m <= sizes[-1]:
        return block_m == min(x for x in sizes if x >= m)
    rows = {size: ceil_div(m, size) * size for size in sizes if size >= 32}
    return rows.get(block_m, m * 2) <= min(rows.values()) * _LITTLE_PADDING


def num_ctas(c: Swapped, m: int, n: int, num_sms: int) -> int:
    """As many CTAs as can be resident, or fewer if there are fewer tiles, in whole clusters."""
    slots = max(1, num_sms * c.ctas_per_sm // c.cluster_k)
    return min(ceil_div(m, c.block_m) * ceil_div(n, c.block_n), slots) * c.cluster_k


def owned_chunks(c: Swapped) -> int:
    """Chunks of eight tokens whose sums one split of K stores."""
    return ceil_div(c.block_m // 8, c.k_splits)


def staging_bytes(c: Swapped) -> int:
    """Bytes of the staging areas for the 16-bit elements that each consumer stores."""
    return c.num_consumers * owned_chunks(c) * 1024


def exchange_bytes(c: Swapped) -> int:
    """Bytes of the split-K exchange: each consumer has two barriers and a slot for the sums of each other split."""
    if c.k_splits == 1:
        return 0
    return c.num_consumers * ((c.k_splits - 1) * owned_chunks(c) * 2048 + BARRIER_BYTES)
