"""What the model of speed counts of a dense GEMM done with a config."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..arch import SM90
from ..params import FP8Config, GemmConfig
from ..spec import SCALE_BLOCK, GemmSpec, ceil_div
from .features import Features
from .loads import SECTOR_BYTES
from .tiles import last_rows, left

PACKING = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}
"""Share of an H200's SMs that clusters of a size can fill: a cluster lives in one GPC, whose SMs are not all a multiple
of four or eight. 16 clusters of eight took two rounds, 15 one; 32 of four took two on one H200 and one on another, 30
one on both."""


def _crowding(k: int) -> float:
    """How badly rows of ``k`` bytes crowd the L2. SMs that want the same line together share an answer, but not for
    pieces that begin inside a sector; and the fewer lines there are, the fewer slices of the L2 are asked. The same 128
    rows, loaded by n of an H200's 132 SMs again and again, took each SM 4.5 + 0.13 n * 144 / k cycles a row where k was
    an odd multiple of 16, about 0.4 of that excess where it was one of 32, and 2 cycles else. Longer rows count by
    their blocks of K rather than by k, so that more work never takes less time."""
    return 1.0 if k % SECTOR_BYTES else 0.4 if k % (2 * SECTOR_BYTES) else 0.0


LEAST_CYCLES = 8.0
"""Of an instruction, however narrow."""

PROMOTION_CYCLES = 0.5
"""Promotion of one column of an m64 slice."""

TOKEN_CYCLES = 5.8
"""Reading and multiplying one token's scale where tokens are columns: each column has another."""

UPRIGHT_US = 0.16
"""What a launch takes more where tokens are rows."""

DIRECT_ELEMENTS = 10.0
"""An element that is stored for itself takes as long as so many that TMA stores."""

L2_SHARING = 0.15
"""Bytes that n tiles ask the L2 for count n to the power of minus this each: SMs that ask for the same line at a time
share an answer."""


class Counts(NamedTuple):
    """What does not depend on the spec. ``slices`` m64 slices of ``width`` columns are a consumer's, and each of the
    ``groups`` that multiply the same block takes them in instructions of ``mma_n`` columns."""

    groups: int
    slices: int
    width: int
    mma_n: int
    direct: bool
    """D is stored element by element."""
    store_warp: bool
    """A warp brings tiles to D while consumers go on to the next."""
    transposed: bool = False
    """Operands are swapped."""
    promotion: float = PROMOTION_CYCLES
    """Cycles in which a consumer promotes one column of an m64 slice; 0 where sums stay in the accumulators."""
    consumers_k: int = 1


@functools.lru_cache(maxsize=4096)
def _always(counts: Counts, config: GemmConfig) -> dict[str, float]:
    """Of `Features` those that are the same for all specs."""
    x = counts
    products = x.slices * (x.width // x.mma_n) * 4
    promotion = x.slices * x.width * x.promotion + (x.width * TOKEN_CYCLES if x.transposed else 0)
    return {
        "tensor": x.groups * products * max(x.mma_n / 2, LEAST_CYCLES),
        "consumers": config.num_consumers,
        "consumers_k": x.consumers_k,
        "promotion": promotion if x.promotion else 0.0,
        "ahead": float(not isinstance(config, FP8Config) or config.num_partials > 1),
        "stages": config.num_stages,
        "prologue_us": 0.0 if x.transposed else UPRIGHT_US,
        "store_warp": float(x.store_warp),
        "cluster": float(config.cluster_size > 1),
        "shares": float(config.cluster_k > 1),
        "read": x.groups * products * (64 + x.mma_n) * 32,
    }


def _slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at a time."""
    size = config.cluster_size
    return max(1, int(PACKING[size] * num_sms * config.ctas_per_sm / size))


def features(counts: Counts, spec: GemmSpec, config: GemmConfig, element_bytes: int = 1) -> Features:
    """The numbers of one pair. From here on K counts bytes of a row."""
    m, n, k = spec.m, spec.n, spec.k * element_bytes
    d_bytes = 4 if spec.d.dtype == "f32" else 2
    block_m, block_n, size, cluster_k = config.block_m, config.block_n, config.cluster_size, config.cluster_k
    across_m, across_n, shares = block_m * config.cluster_m, block_n * config.cluster_n, config.k_shares
    rows, columns = ceil_div(m, across_m), ceil_div(n, across_n)
    tiles = rows * columns * size
    clusters = _slots(config, spec.num_sms)
    blocks = ceil_div(ceil_div(k, SCALE_BLOCK), cluster_k)
    # Rows that are loaded of A by a tile, and of both by all.
    last = last_rows(config, m)
    tokens = last if m <= block_m else block_m
    all_tokens = (ceil_div(m, block_m) - 1) * block_m + last
    all_weights = (ceil_div(n, block_n) - 1) * block_n + left(n, block_n)
    # What is handed over and stored is shared out among the shares of K.
    finished = min(block_m, m) * min(block_n, n) / shares
    waves = ceil_div(tiles, clusters * size)
    # What of B and A the tiles of the first wave begin with, as if each had rows of B of its own as long as there are
    # any: too much where several rows of tiles share them, but there this is little of the whole, and more work must
    # not take less time. Nor may more SMs take longer, so that it is always the first wave of a whole GPU.
    whole = clusters if spec.num_sms >= SM90.num_sms else _slots(config, SM90.num_sms)
    at_once = min(tiles // size, whole)
    first = cluster_k * min(blocks, 1) * SCALE_BLOCK
    first *= min(columns, at_once) * across_n + min(rows, at_once) * tokens * config.cluster_m
    first = min(first, m * k + n * k)
    depth_read = cluster_k * blocks * SCALE_BLOCK
    tokens_read = all_tokens * columns * depth_read * min(32, columns) ** -L2_SHARING
    weights_read = all_weights * rows * depth_read * min(32, rows) ** -L2_SHARING
    return Features(
        waves=waves,
        steps=waves * blocks,
        resident=min(config.ctas_per_sm, ceil_div(tiles, spec.num_sms)),
        filled=(tokens + block_n) * SCALE_BLOCK,
        elements=finished * (DIRECT_ELEMENTS if counts.direct else 1.0) * d_bytes / 2,
        # Slices of 64 tokens do so whole, whatever rows of them there are.
        handed=(shares - 1) * (finished if counts.transposed else block_m * block_n / shares),
        first=first,
        traffic=m * k + n * k + d_bytes * m * n * (1 if spec.accumulate == "none" else 2) - first,
        handed_out=tokens_read + weights_read,
        unaligned=1 - math.gcd(k, SCALE_BLOCK) / SCALE_BLOCK if k > SCALE_BLOCK else 0.0,
        crowded=tokens / config.cluster_n * columns / waves / spec.num_sms * _crowding(k) / blocks,
        asked=tokens / config.cluster_n + block_n / config.cluster_m,
        **_always(counts, config),
    )
