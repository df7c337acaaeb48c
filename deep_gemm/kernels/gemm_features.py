"""The inputs of the performance model for one product with a config."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from ..params import GemmConfig
from ..spec import SCALE_BLOCK, GemmSpec
from .features import Costs, Features

SECTOR_BYTES = 32
"""The unit of L2 reads and writes."""

LINE_BYTES = 128
"""A line of L2, and a row of a box in shared memory."""

PACKING = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}
"""Fraction of an H200's SMs that clusters of a size can fill. A cluster runs within one GPC, and not every GPC has a
multiple of four or eight SMs. 16 clusters of eight took two waves, 15 took one; 32 clusters of four took two waves on
one H200 and one on another, 30 took one on both."""


@functools.lru_cache(maxsize=4096)
def _crowding(k: int) -> float:
    """The L2 contention of rows of ``k`` bytes. L2 answers SMs that request a line at the same time once, except for
    boxes that begin inside a sector. Fewer lines also use fewer slices of L2. When n of an H200's 132 SMs loaded the
    same 128 rows repeatedly, a row took each SM 4.5 + 0.13 n * 144 / k cycles for k an odd multiple of 16, about 0.4 of
    that excess for an odd multiple of 32, and 2 cycles otherwise. Longer rows count by their blocks of K and not by k,
    so that the model never predicts less time for more work."""
    return 1.0 if k % SECTOR_BYTES else 0.4 if k % (2 * SECTOR_BYTES) else 0.0


L2_SHARING = 0.15
"""Exponent of L2 sharing. Bytes that n tiles read count n ** -L2_SHARING times each, because L2 answers SMs that
request a line at the same time once. Boxes of 16-bit operands that begin inside a sector are not shared, so their bytes
count once each (docs/measurements/rules.md). For FP8 that gained nothing (docs/measurements/fp8.md)."""


@functools.lru_cache(maxsize=4096)
def _sharing(row: int, tiles: int, element_bytes: int) -> float:
    """How much a byte counts that each of ``tiles`` tiles reads, in rows of ``row`` bytes."""
    apart = element_bytes > 1 and row % SECTOR_BYTES > 0
    return 1.0 if apart else float(min(32, tiles) ** -L2_SHARING)


@functools.lru_cache(maxsize=4096)
def _inside_lines(row: int) -> float:
    """The fraction of a box's rows that begin inside an L2 line, in an operand with rows of ``row`` bytes."""
    return 1 - math.gcd(row, LINE_BYTES) / LINE_BYTES if row > LINE_BYTES else 0.0


def constant_features(costs: Costs, config: GemmConfig) -> dict[str, float]:
    """The `Features` that do not depend on the spec."""
    return {
        "tensor": costs.tensor,
        "issue": costs.issue,
        "consumers": config.num_consumers,
        "consumers_k": costs.consumers_k,
        "promotion": costs.promotion,
        "ahead": float(costs.ahead),
        "stages": config.num_stages * costs.depth,
        "prologue_us": costs.prologue_us,
        "store_warp": float(costs.store_warp),
        "hides_epilogue": float(costs.hides_epilogue),
        "cluster": float(config.cluster_size > 1),
        "exchanges": float(config.cluster_k > 1),
        "read": costs.read,
    }


def features(
    costs: Costs,
    constant: Mapping[str, float],
    all_sms: int,
    spec: GemmSpec,
    config: GemmConfig,
    element_bytes: int = 1,
) -> Features:
    """The features of one pair of spec and config; ``constant`` are its `constant_features`, and ``all_sms`` the SMs of
    a whole GPU. In this function k is the length of a row in bytes. It runs for each config that is ranked, so it calls
    little."""
    m, n, k = spec.m, spec.n, spec.k * element_bytes
    d_bytes = 4 if spec.d.dtype == "f32" else 2
    block_m, block_n, cluster_k, num_sms = config.block_m, config.block_n, config.cluster_k, spec.num_sms
    across_m, across_n, splits = block_m * config.cluster_m, block_n * config.cluster_n, cluster_k * config.consumers_k
    size = config.cluster_m * config.cluster_n * cluster_k
    rows, columns = -(-m // across_m), -(-n // across_n)
    tiles = rows * columns * size
    per_sm = PACKING[size] * config.ctas_per_sm / size
    clusters = max(1, int(per_sm * num_sms))  # that run at the same time
    blocks = (k + SCALE_BLOCK - 1) // SCALE_BLOCK
    blocks = -(-blocks // cluster_k)
    # Rows of A that one tile loads, and rows of A and of B that all tiles load. Scales are loaded for four rows.
    last = min((((m - 1) % block_m + 1) + 3) // 4 * 4, block_m)
    tokens = last if m <= block_m else block_m
    all_tokens = (-(-m // block_m) - 1) * block_m + last
    # The parts of split K divide the elements that are exchanged and stored.
    finished = min(block_m, m) * min(block_n, n) / splits
    waves = -(-tiles // (clusters * size))
    # The bytes of the first stage of all tiles in the first wave, as if each tile had its own rows of B, up to all
    # rows. That is too much where several rows of tiles share rows of B. But there it is a small part of the whole, and
    # the model must not predict less time for more work. Nor may it predict more time for more SMs, so the first wave
    # is always that of a whole GPU.
    whole = clusters if num_sms >= all_sms else max(1, int(per_sm * all_sms))
    at_once = min(tiles // size, whole)
    first = cluster_k * min(blocks, 1) * SCALE_BLOCK
    first *= min(columns, at_once) * across_n + min(rows, at_once) * tokens * config.cluster_m
    first = min(first, m * k + n * k)
    depth_read = cluster_k * blocks * SCALE_BLOCK
    row_a, row_b = k if spec.a.major == "k" else m * element_bytes, k if spec.b.major == "k" else n * element_bytes
    tokens_read = all_tokens * columns * depth_read * _sharing(row_a, columns, element_bytes)
    weights_read = n * rows * depth_read * _sharing(row_b, rows, element_bytes)
    from_l2 = tokens_read + weights_read
    inside = tokens_read * _inside_lines(row_a) + weights_read * _inside_lines(row_b)
    return Features(
        waves=waves,
        steps=waves * blocks,
        resident=min(config.ctas_per_sm, -(-tiles // num_sms)),
        filled=(tokens + block_n) * SCALE_BLOCK,
        elements=max(0.0, finished - costs.buffered) * costs.element * d_bytes / 2,
        exchanged=(splits - 1) * (block_m * block_n / splits if costs.exchanges_edges else finished),
        first=first,
        traffic=m * k + n * k + d_bytes * m * n * (1 if spec.accumulate == "none" else 2) - first,
        from_l2=from_l2,
        unaligned=inside / from_l2 if from_l2 else 0.0,
        crowded=tokens / config.cluster_n * columns / waves / num_sms * _crowding(row_a) / blocks,
        requested=tokens / config.cluster_n + block_n / config.cluster_m,
        element_bytes=element_bytes,
        **constant,
    )
