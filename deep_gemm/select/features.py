"""What the model needs to know of a problem done with a config: counts, no times."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..arch import SM90
from ..kernels import fp8, sm90_fp8_gemm, sm90_fp8_swapped
from ..kernels.columns import segments
from ..kernels.sm90_fp8_launch import SECTOR_BYTES, last_columns, last_rows, store_box
from ..kernels.stream_k import stream
from ..params import SCALE_BLOCK, FP8Config, GemmProblem, SmallConfig, SwappedConfig, ceil_div

PACKING = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}
"""Share of an H200's SMs that clusters of a size can fill: a cluster lives in one GPC, whose SMs are not all a multiple
of four or eight. 16 clusters of eight took two rounds, 15 one; 32 of four took two on one H200 and one on another, 30
one on both."""


class Features(NamedTuple):
    """Numbers, or arrays of them for many pairs at once. "A block" is one CTA's block of K."""

    waves: float
    """Tiles that the busiest slot does, one after the other."""
    steps: float
    """Blocks of K that it goes through for that."""
    resident: float
    """CTAs on the busiest SM."""
    groups: float
    """Consumers that multiply the same block."""
    products: float
    """Instructions a consumer issues for a block."""
    half_width: float
    """Half the columns of one instruction: its cycles in the tensor cores."""
    extra: float
    """1 where a tile has tokens past its m64 slices, else 0."""
    extra_products: float
    """Instructions besides, for these."""
    read: float
    """Bytes of operands that instructions read for a block."""
    scales_read: float
    """Bytes of tokens' scales that come from shared memory into registers for a block, as often as threads ask."""
    filled: float
    """Bytes that are loaded for a block."""
    asked: float
    """Rows of 128 bytes that a CTA asks the L2 for: of what a cluster shares, its part."""
    columns: float
    """Columns of m64 accumulators that a consumer promotes for a block."""
    in_step: float
    """1 where several consumers promote without order, else 0."""
    token_scales: float
    """Scales of tokens that a consumer multiplies into its columns for a block."""
    ahead: float
    """1 where the next products are issued before promotion, else 0."""
    consumers_k: float
    consumers: float
    puts_away: float
    """1 where a warp brings tiles to D while consumers go on to the next, else 0."""
    copied: float
    """1 where consumers copy what they multiply, else 0."""
    stages: float
    """Of the ring: each has two barriers, which are made one after the other."""
    depth: float
    """Blocks of K in the ring."""
    stage_blocks: float
    boxes: float
    """In so many a stage's part of B is loaded."""
    elements: float
    """Output elements of a tile that are stored, as far as they exist."""
    direct: float
    """1 for element by element stores, else 0."""
    narrow: float
    """How often the rows of one TMA store go into rows of 64 columns."""
    transposed: float
    """1 where operands are swapped, else 0."""
    local_shares: float
    """1 where consumers of a CTA exchange shares of K, else 0."""
    cluster_shares: float
    """The same for CTAs of a cluster."""
    streams: float
    """1 where blocks of K are dealt out over CTAs, else 0."""
    given: float
    """Elements that a CTA then gives to another."""
    gathered: float
    """Elements that a CTA then gets from others."""
    handed: float
    """Elements that a CTA hands over: m64 slices of tokens do so whole, whatever rows of them there are."""
    cluster_2: float
    cluster_4: float
    cluster_8: float
    first: float
    """Bytes that HBM moves before all CTAs have their first stage."""
    traffic: float
    """Bytes that HBM moves after them."""
    weights_again: float
    """Bytes of B, if more than one cluster tile asks for them."""
    tokens_read: float
    """Bytes of A that the L2 hands out."""
    tokens_sharers: float
    """Cluster tiles that read the same bytes of A, up to 32."""
    weights_read: float
    weights_sharers: float
    """The same of B."""
    in_parts: float
    """1 where an m64 slice is multiplied in two parts, else 0."""
    unaligned: float
    """Of the rows of 128 bytes of a block, the part that begins inside a line of 128 bytes."""
    torn: float
    """The part that begins inside a sector of 32 bytes."""
    crowded: float
    """Rows of A of a block whose lines the L2 is asked for again and again: by the part of the SMs that want them at a
    time, over the blocks of K that a CTA has of a row, and by `_crowding`."""
    hanging: float
    """Of the blocks of K that a CTA has of a tile, the part that ends past K, where it has the last."""


def _crowding(k: int) -> float:
    """How badly rows of ``k`` bytes crowd the L2. SMs that want the same line together share an answer, but not for
    pieces that begin inside a sector; and the fewer lines there are, the fewer slices of the L2 are asked. The same 128
    rows, loaded by n of an H200's 132 SMs again and again, took each SM 4.5 + 0.13 n * 144 / k cycles a row where k was
    an odd multiple of 16, about 0.4 of that excess where it was one of 32, and 2 cycles else. Longer rows count by
    their blocks of K rather than by k, so that more work never takes less time."""
    return 1.0 if k % SECTOR_BYTES else 0.4 if k % (2 * SECTOR_BYTES) else 0.0


class _Fixed(NamedTuple):
    """What of a config does not depend on the problem, so that ranking works it out once."""

    stage_blocks: int
    size: int
    cluster_k: int
    resident: int
    shares: int
    across_m: int
    across_n: int
    always: dict[str, float]
    """Of `Features` those that are the same for all problems."""


@functools.cache
def _fixed(config: FP8Config, d_tma: bool) -> _Fixed:
    groups, slices, extra = config.num_consumers // config.consumers_k, config.slices, config.extra_tokens
    swapped, small = isinstance(config, SwappedConfig), isinstance(config, SmallConfig)
    if isinstance(config, SwappedConfig):
        direct = sm90_fp8_swapped.KERNEL.store(config, d_tma) == "direct"
        width, mma_n, store_columns = config.block_m, sm90_fp8_swapped.mma_n(config), 64
        scales = width // 4 * (1 if sm90_fp8_swapped.scales_held(config) else slices)  # that a thread reads
    elif isinstance(config, SmallConfig):
        direct = not d_tma
        width, mma_n, store_columns, scales = config.block_n, config.block_n, 64, 2
    else:
        direct = not d_tma
        width, mma_n = config.block_n, sm90_fp8_gemm.instruction_shape(config)[1]
        store_columns, scales = store_box(config)[0], 2 * slices + extra // 4
    products, size = slices * (width // mma_n) * 4, config.cluster_size
    always = {
        "groups": groups,
        "products": products,
        "half_width": mma_n / 2,
        "extra": 1.0 if extra else 0.0,
        "extra_products": 4 if extra else 0,
        "read": groups * (products * (64 + mma_n) + (4 * (64 + extra) if extra else 0)) * 32,
        "scales_read": groups * 128 * scales * 4,
        "columns": slices * width + extra,
        "in_step": 1.0 if groups > 1 and config.num_partials == 1 and fp8.turns(config) == 1 else 0.0,
        "token_scales": width if swapped else extra,
        "ahead": 1.0 if config.num_partials > 1 else 0.0,
        "consumers_k": config.consumers_k,
        "consumers": config.num_consumers,
        "puts_away": 1.0 if config.persistent and not swapped and not direct else 0.0,
        "copied": 1.0 if small else 0.0,
        "stages": config.num_stages,
        "depth": config.num_stages * config.stage_blocks,
        "stage_blocks": config.stage_blocks,
        "boxes": 1 if swapped or small else len(segments(config.block_n)),
        "direct": 1.0 if direct else 0.0,
        "narrow": 64 / store_columns,
        "transposed": 1.0 if swapped else 0.0,
        "local_shares": 1.0 if config.consumers_k > 1 else 0.0,
        "cluster_shares": 1.0 if config.cluster_k > 1 else 0.0,
        "cluster_2": 1.0 if size == 2 else 0.0,
        "cluster_4": 1.0 if size == 4 else 0.0,
        "cluster_8": 1.0 if size == 8 else 0.0,
        "in_parts": 1.0 if mma_n < width else 0.0,
    }
    return _Fixed(
        stage_blocks=config.stage_blocks,
        size=size,
        cluster_k=config.cluster_k,
        resident=config.ctas_per_sm,
        shares=config.k_shares,
        across_m=config.block_m * config.cluster_m,
        across_n=config.block_n * config.cluster_n,
        always=always,
    )


def _slots(config: FP8Config, num_sms: int) -> int:
    """Clusters that run at a time."""
    size = config.cluster_size
    return max(1, int(PACKING[size] * num_sms * config.ctas_per_sm / size))


def features(problem: GemmProblem, config: FP8Config) -> Features:
    """The numbers of one pair."""
    m, n, k = problem.m, problem.n, problem.k
    fixed = _fixed(config, problem.d_tma)
    block_m, block_n, size, cluster_k = config.block_m, config.block_n, fixed.size, fixed.cluster_k
    rows, columns = ceil_div(m, fixed.across_m), ceil_div(n, fixed.across_n)
    tiles = rows * columns * size
    clusters = _slots(config, problem.num_sms)
    blocks = ceil_div(ceil_div(ceil_div(k, SCALE_BLOCK), fixed.stage_blocks), cluster_k) * fixed.stage_blocks
    # Rows that are loaded of A by a tile, and of both by all.
    last = last_rows(config, m)
    tokens = last if m <= block_m else block_m
    all_tokens = (ceil_div(m, block_m) - 1) * block_m + last
    all_weights = (ceil_div(n, block_n) - 1) * block_n + last_columns(config, n)
    # What is handed over and stored is shared out among the shares of K.
    finished = min(block_m, m) * min(block_n, n) / fixed.shares
    waves, given, gathered = ceil_div(tiles, clusters * size), 0, 0
    steps = waves * blocks
    if config.stream_k:
        dealt = stream(config, m, n, k, problem.num_sms)
        waves, steps = ceil_div(dealt.rows * dealt.columns, dealt.groups), dealt.most_blocks
        if dealt.dealt:
            given = block_m * block_n
            gathered = dealt.donors * given
    # What of B and A the tiles of the first wave begin with, as if each had rows of B of its own as long as there are
    # any: too much where several rows of tiles share them, but there this is little of the whole, and more work must
    # not take less time. Nor may more SMs take longer, so that it is always the first wave of a whole GPU. Too little
    # where blocks of K are dealt out.
    whole = clusters if problem.num_sms >= SM90.num_sms else _slots(config, SM90.num_sms)
    at_once = min(tiles // size, whole)
    first = cluster_k * min(blocks, fixed.stage_blocks) * SCALE_BLOCK
    first *= min(columns, at_once) * fixed.across_n + min(rows, at_once) * tokens * config.cluster_m
    first = min(first, m * k + n * k)
    depth_read = cluster_k * blocks * SCALE_BLOCK
    return Features(
        waves=waves,
        steps=steps,
        resident=min(fixed.resident, ceil_div(tiles, problem.num_sms)),
        filled=(tokens + block_n) * SCALE_BLOCK,
        asked=tokens / config.cluster_n + block_n / config.cluster_m,
        elements=finished,
        streams=1.0 if given else 0.0,
        given=given,
        gathered=gathered,
        handed=(fixed.shares - 1) * (finished if fixed.always["transposed"] else block_m * block_n / fixed.shares),
        first=first,
        traffic=m * k + n * k + 2 * m * n - first,
        weights_again=n * k if rows > 1 else 0,
        tokens_read=all_tokens * columns * depth_read,
        tokens_sharers=min(32, columns),
        weights_read=all_weights * rows * depth_read,
        weights_sharers=min(32, rows),
        unaligned=1 - math.gcd(k, SCALE_BLOCK) / SCALE_BLOCK if k > SCALE_BLOCK else 0.0,
        torn=0.5 if k % SECTOR_BYTES else 0.0,  # rows are multiples of 16 bytes
        crowded=tokens / config.cluster_n * columns / waves / problem.num_sms * _crowding(k) / blocks,
        hanging=1 / blocks if k % SCALE_BLOCK else 0.0,
        **fixed.always,
    )
