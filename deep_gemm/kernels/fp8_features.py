"""What the model of speed counts of a dense FP8 GEMM done with a config."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..arch import SM90
from ..params import GemmConfig
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


class Counts(NamedTuple):
    """What does not depend on the spec. ``slices`` m64 slices of ``width`` columns are a consumer's, and each of the
    ``groups`` that multiply the same block takes them in instructions of ``mma_n`` columns."""

    groups: int
    slices: int
    width: int
    mma_n: int
    scales: int
    """Scales of tokens that a thread reads for a block."""
    boxes: int
    """TMA boxes of B per stage."""
    store_columns: int
    """Of one row of a TMA store."""
    direct: bool
    """D is stored element by element."""
    store_warp: bool
    """A warp brings tiles to D while consumers go on to the next."""
    in_step: bool
    """Several consumers promote without order."""
    transposed: bool = False
    """Operands are swapped."""
    promotes: bool = True
    """Sums are promoted in every block of K."""
    consumers_k: int = 1


@functools.lru_cache(maxsize=4096)
def _always(counts: Counts, config: GemmConfig) -> dict[str, float]:
    """Of `Features` those that are the same for all specs."""
    x, size = counts, config.cluster_size
    products = x.slices * (x.width // x.mma_n) * 4
    return {
        "groups": x.groups,
        "products": products,
        "half_width": x.mma_n / 2,
        "read": x.groups * products * (64 + x.mma_n) * 32,
        "scales_read": x.groups * 128 * x.scales * 4,
        "columns": x.slices * x.width if x.promotes else 0,
        "in_step": float(x.in_step),
        "token_scales": x.width if x.transposed and x.promotes else 0,
        "ahead": float(not x.promotes or getattr(config, "num_partials", 1) > 1),
        "consumers_k": x.consumers_k,
        "consumers": config.num_consumers,
        "store_warp": float(x.store_warp),
        "stages": config.num_stages,
        "boxes": x.boxes,
        "direct": float(x.direct),
        "narrow": 64 / x.store_columns,
        "transposed": float(x.transposed),
        "local_shares": float(x.consumers_k > 1),
        "cluster_shares": float(config.cluster_k > 1),
        "cluster_2": float(size == 2),
        "cluster_4": float(size == 4),
        "cluster_8": float(size == 8),
        "in_parts": float(x.mma_n < x.width),
    }


def _slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at a time."""
    size = config.cluster_size
    return max(1, int(PACKING[size] * num_sms * config.ctas_per_sm / size))


def features(counts: Counts, spec: GemmSpec, config: GemmConfig, element_bytes: int = 1) -> Features:
    """The numbers of one pair. From here on K counts bytes of a row."""
    m, n, k = spec.m, spec.n, spec.k * element_bytes
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
    return Features(
        waves=waves,
        steps=waves * blocks,
        resident=min(config.ctas_per_sm, ceil_div(tiles, spec.num_sms)),
        filled=(tokens + block_n) * SCALE_BLOCK,
        asked=tokens / config.cluster_n + block_n / config.cluster_m,
        elements=finished,
        handed=(shares - 1) * (finished if counts.transposed else block_m * block_n / shares),
        first=first,
        traffic=m * k + n * k + 2 * m * n - first,
        weights_again=n * k if rows > 1 else 0,
        tokens_read=all_tokens * columns * depth_read,
        tokens_sharers=min(32, columns),
        weights_read=all_weights * rows * depth_read,
        weights_sharers=min(32, rows),
        unaligned=1 - math.gcd(k, SCALE_BLOCK) / SCALE_BLOCK if k > SCALE_BLOCK else 0.0,
        torn=0.5 if k % SECTOR_BYTES else 0.0,  # rows are multiples of 16 bytes
        crowded=tokens / config.cluster_n * columns / waves / spec.num_sms * _crowding(k) / blocks,
        hanging=1 / blocks if k % SCALE_BLOCK else 0.0,
        **_always(counts, config),
    )
