"""Sums of products in parts of K: several clusters have the same tile, each with its own part of K. The last one of
them adds the sums of all parts, in their order (see ``templates/include/parts_in_order.cuh``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..params import GemmConfig
from ..spec import GemmSpec, align, ceil_div
from .features import Features
from .gemm_features import PACKING

MOST_SUMS = 128 * 128
"""Sums that a CTA writes to memory, at most. So memory of one size is enough for every config."""

_WARPS = 8
"""Warps of a CTA that multiply, at most. Each has a word that counts parts."""


def parts(config: GemmConfig, spec: GemmSpec) -> int:
    """How many clusters have a tile: as many as can run at the same time, if each CTA has a block of K then. It is 1
    for a config without parts."""
    if not config.parts:
        return 1
    tiles = ceil_div(spec.m, config.block_m) * ceil_div(spec.n, config.block_n)
    size, blocks = config.cluster_size, ceil_div(spec.k, config.block_k)
    return max(1, min(int(PACKING[size] * spec.num_sms / size) // tiles, blocks // size))


def memory_bytes(spec: GemmSpec) -> int:
    """The memory that configs with parts need for ``spec``, at most; 0 if no such config has two parts or more."""
    if spec.grouping != "summed" or spec.batch_invariant or 2 * spec.m * spec.n > spec.num_sms * MOST_SUMS:
        return 0
    return 128 + spec.num_sms * (_WARPS * 8 + MOST_SUMS * 4)


def features(counted: Callable[[GemmSpec], Features], spec: GemmSpec, config: GemmConfig) -> Features:
    """The inputs of the performance model: those of a product without parts whose tiles are those of all parts, each
    with one part of K. ``counted`` returns them for a spec. The last cluster of a tile exchanges sums once more."""
    count = parts(config, spec)
    whole = counted(spec)
    each = counted(replace(spec, n=count * align(spec.n, config.block_n), k=ceil_div(spec.k, count)))
    return each._replace(
        traffic=whole.traffic + whole.first - each.first,
        exchanges=each.exchanges + 1,
        exchanged=each.exchanged + count * config.block_m * config.block_n / config.cluster_size,
    )
