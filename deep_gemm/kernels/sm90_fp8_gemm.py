"""Dense FP8 GEMM for Hopper: 1x128 scales for A, 128x128 for B, promoted every 128 of K, bf16 out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import FP8Config, KernelParams, align
from . import fp8
from .base import Kernel
from .columns import segments
from .fp8 import BARRIER_BYTES

MAX_STAGES = 16
"""Of the narrow tiles, which could have more, 16 and 8 stages timed alike on an H200."""

_BLOCK_M = ((64, 1), (128, 2), (192, 3), (256, 2))
"""Tile heights with the consumer warpgroups that share them."""

_EXTRA = (8, 16, 24, 32)
"""Tokens that a tile of 128 weights and two consumers may have past its m64 slices (see ``extra_tokens.cuh``). More
would be a slice, 24 and 32 have no registers beside 256 rows, and clusters, timed once, took as long (H200, 14
shapes)."""

_EXTRA_CASES = ((136, False), (160, True), (264, True), (272, False))
"""Of tiles with such tokens, with whether they are persistent, those that tests compile."""

_SPLITS = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 1, 2),
    (1, 1, 2, 1),
    (1, 1, 2, 2),
    (1, 1, 4, 1),
    (1, 1, 4, 2),
)
"""How a tile's work is shared: CTAs of a cluster along m, n and k, and consumers of a CTA along k."""

_FEW_STAGES = 8
"""With more, one or two besides, which CTAs of a single tile have room for, are not worth a kernel."""

_REGISTER_SPLITS = {1: ((40, 208), (40, 248)), 2: ((40, 232), (24, 240)), 3: ((32, 160),)}
"""Registers a thread, of producers and of consumers, by the number of consumer warpgroups; the first that does is
taken, since producers with 24 spill easily, and a consumer with 248 has the SM for itself. A lone consumer with half of
an SM could have 216, but 64x192 with a share of K would take that and spill."""

_OTHER_REGISTERS = 22
_OTHER_REGISTERS_PER_SLICE = 4
_OTHER_REGISTERS_PER_SEGMENT = 4
_OTHER_REGISTERS_OF_PARTS = 20
"""What the main loop needs besides accumulators, for each m64 slice, for each segment of columns after the first, and
where a slice is multiplied in two parts; from ptxas: a config that leaves less would spill."""


class Sm90Fp8Gemm(Kernel[FP8Config]):
    """See ``templates/include/fp8_gemm.cuh`` for the algorithm."""

    name = "sm90_fp8_gemm"
    archs = (SM90.name,)
    config_class = FP8Config
    mma_instruction = "QGMMA"

    def configs(self, arch: ArchSpec) -> Iterator[FP8Config]:
        """Tiles from 64x16 to 272x128 and 128x256, alone or in clusters of two, one or two CTAs on an SM; always with
        as many stages as fit."""
        for (upright, consumers), extra, block_n, split, ctas_per_sm, stream_k in itertools.product(
            _BLOCK_M, (0, *_EXTRA), range(16, 257, 16), _SPLITS, (1, 2), (False, True)
        ):
            if extra and (consumers, block_n) != (2, 128):
                continue  # illegal, all of them
            cluster_m, cluster_n, cluster_k, consumers_k = split
            config = FP8Config(
                block_m=upright + extra,
                block_n=block_n,
                block_k=128,
                num_stages=0,
                num_consumers=consumers * consumers_k,
                cluster_m=cluster_m,
                cluster_n=cluster_n,
                cluster_k=cluster_k,
                ctas_per_sm=ctas_per_sm,
                consumers_k=consumers_k,
                stream_k=stream_k,
            )
            config = self._deepest(_with_partials(config), arch)
            if self.illegal(config, arch) is not None:
                continue
            yield config
            once = self._deepest(replace(config, persistent=False), arch)
            deeper = config.num_stages <= _FEW_STAGES and once.num_stages > config.num_stages
            if deeper and self.illegal(once, arch) is None:
                yield once

    def _deepest(self, config: FP8Config, arch: ArchSpec) -> FP8Config:
        """``config`` with as many stages as fit into shared memory beside the staging area that it has for D."""
        budget = min(arch.shared_per_cta, arch.shared_per_sm // config.ctas_per_sm - arch.shared_reserved_per_cta)
        besides = staging_bytes(config) + reduction_bytes(config) + told_bytes(config)
        stages = (budget - besides) // (stage_bytes(config) + BARRIER_BYTES)
        stages = max(0, min(MAX_STAGES, stages)) // config.consumers_k * config.consumers_k
        return replace(config, num_stages=stages)

    def illegal(self, config: FP8Config, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if (c.scale_n, c.scale_k, c.block_k) != (128, 128, 128):
            return f"block_k, scale_n and scale_k must be 128, not {c.block_k}, {c.scale_n} and {c.scale_k}"
        if (c.block_m, c.block_n) == (64, 256):
            return "a tile of 64 rows and 256 columns takes longer than two of 128 columns"
        if c.block_m == 256 and c.block_n < 64:
            return "a tile of 256 rows and under 64 columns reads A more often than two tiles of 128 rows"
        upright = c.block_m - c.extra_tokens
        if (upright, c.num_consumers) not in ((m, n * c.consumers_k) for m, n in _BLOCK_M):
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {_BLOCK_M}"
        if (c.cluster_m, c.cluster_n, c.cluster_k, c.consumers_k) not in _SPLITS:
            return f"sharing a tile by {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {_SPLITS}"
        if c.consumers_k > 1 and c.block_m > 64:
            return f"consumers share K in tiles of 64 rows only, not of {c.block_m}"
        if c.block_n % 16 or not 16 <= c.block_n <= 256:
            return f"block_n must be a multiple of 16 from 16 to 256, not {c.block_n}"
        if c.block_n % (16 * c.k_shares):
            return f"{c.k_shares} shares of K cannot finish equal parts of {c.block_n} columns, in steps of 16"
        if c.cluster_m * c.cluster_n > 1 and (c.block_m < 128 or c.block_n < 64):
            return "a cluster of small tiles waits for itself longer than sharing loads saves"
        if c.stream_k and (c.cluster_size * c.consumers_k * c.ctas_per_sm > 1 or c.block_n % 32 or c.block_n < 64):
            return "blocks of K are dealt out over lone CTAs, with tiles of 64 columns or more, in steps of 32, only"
        slices, mma_n = instruction_shape(c)
        if c.extra_tokens and not (
            c.extra_tokens in _EXTRA
            and (c.num_consumers, c.block_n, mma_n, c.num_partials) == (2, 128, 128, 1)
            and c.cluster_size * c.consumers_k * c.ctas_per_sm == 1
            and not c.stream_k
        ):
            given = f"{c.extra_tokens} tokens past slices of 64"
            wanted = "lone tile of 128 columns, two consumers, and one set of partial sums of whole width"
            return f"{given} are not one of {_EXTRA} in a {wanted}"
        units = slices * c.block_n // mma_n
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if mma_n % 16:
            return f"instructions of {mma_n} columns do not end on a multiple of 16, and tiles are staged in such steps"
        if not _fits(c, mma_n):
            return f"{accumulators(c)} accumulator registers a thread leave too few of {register_split(c)[1]}"
        if not c.persistent and (c.stream_k or c.consumers_k > 1 or c.cluster_size > 1):
            return "CTAs that share K or loads with others are persistent"
        if c.num_stages < 2 * c.consumers_k or c.num_stages % c.consumers_k:
            return f"{c.num_stages} stages are not two or more for each of {c.consumers_k} consumers along K"
        if c.num_stages < 3 and c.cluster_k > 1:
            return "two stages keep too few bytes on their way for a CTA with a part of K"
        if c.ctas_per_sm > 2 or (c.ctas_per_sm == 2 and c.num_consumers > 1):
            return f"{c.ctas_per_sm} CTAs with {c.num_consumers} consumers each leave too few registers a thread"
        shared = config_shared_bytes(c, tma_store=True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``sm90_fp8_gemm.cu.jinja``."""
        c = _config(params)
        return {
            **fp8.fields(params, c, instruction_shape(c)[1], register_split(c)),
            "extra": c.extra_tokens,
            "stream_k": c.stream_k,
            "persistent": c.persistent,
            "name": self.entry(params),
            "min_ctas": 2 if register_split(c) == _REGISTER_SPLITS[1][0] else 1,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "segments": len(segments(c.block_n)),
            "shared_bytes": self.shared_bytes(params),
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area and barriers, as ``Fp8Gemm`` lays them out (it asserts the same number)."""
        return config_shared_bytes(_config(params), params.store == "tma")

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_128x128_s5_p2_c2x1_tma``."""
        c = _config(params)
        parts = [f"fp8_gemm_{c.block_m}x{c.block_n}", f"s{c.num_stages}", f"p{c.num_partials}"]
        if c.cluster_m * c.cluster_n > 1:
            parts.append(f"c{c.cluster_m}x{c.cluster_n}")
        if c.k_shares > 1:
            parts.append(f"k{c.cluster_k}x{c.consumers_k}")
        if c.ctas_per_sm > 1:
            parts.append(f"r{c.ctas_per_sm}")
        if c.stream_k:
            parts.append("stream")
        if not c.persistent:
            parts.append("once")
        parts.append(params.store)
        parts += fp8.compiled_dims(params)
        return "_".join(parts)

    def cases(self) -> list[KernelParams]:
        """Every legal tile without a cluster, but of those with tokens past their slices the least and the most; with
        two CTAs on an SM for one width; clusters along m and n for each block_m; every split of K for two widths;
        direct stores of a plain, a straddling, and a split tile; compile-time dimensions."""
        every = list(self.configs(SM90))

        def chosen(
            block_m: int, block_n: int, cluster: tuple[int, int, int] = (1, 1, 1), consumers_k: int = 1
        ) -> FP8Config:
            return next(
                c
                for c in every
                if (c.block_m, c.block_n, c.consumers_k, c.ctas_per_sm) == (block_m, block_n, consumers_k, 1)
                and (c.cluster_m, c.cluster_n, c.cluster_k) == cluster
            )

        plain = [c for c in every if c.cluster_size == c.k_shares == 1 and (c.ctas_per_sm == 1 or c.block_n == 48)]
        plain = [c for c in plain if not c.stream_k or c.block_n in (64, 128, 256)]
        plain = [c for c in plain if not c.extra_tokens or (c.block_m, c.persistent) in _EXTRA_CASES]
        shared = [c for c in every if c.cluster_m * c.cluster_n > 1 and c.block_n == 128]
        split = [c for c in every if c.k_shares > 1 and (c.block_n in (32, 64) or c.block_n == c.block_m == 128)]
        direct = [chosen(128, 128), chosen(128, 192), chosen(64, 64, (1, 1, 2), 2), chosen(128, 128, (1, 1, 2))]
        return (
            [make_params(c) for c in plain + shared + split]
            + [make_params(c, store="direct") for c in direct]
            + [make_params(chosen(128, 128), shape=(0, 2112, 7168))]
        )


def make_params(config: FP8Config, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``."""
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store=store, shape=shape)


def _with_partials(config: FP8Config) -> FP8Config:
    """``config`` with two sets of partial sums where whole-width instructions leave room for them, else one: products
    issued ahead beat wide ones shared out over consumers (H200, 217 shapes, both schedules as they then were: 2.6% by
    geometric mean over all pairs that are legal both ways; most for narrow tiles)."""
    ahead = replace(config, num_partials=2)
    slices, mma_n = instruction_shape(ahead)
    return ahead if slices <= 2 and mma_n == config.block_n and not config.extra_tokens else config


def instruction_shape(config: FP8Config) -> tuple[int, int]:
    """(m64 slices, columns of one wgmma) of one consumer. A tile is split into two instructions along n where the
    accumulators of one would not fit beside the sums; wide instructions read least from shared memory."""
    slices = config.slices
    return slices, config.block_n if _fits(config, config.block_n) else config.block_n // 2


def _fits(config: FP8Config, mma_n: int) -> bool:
    """Whether consumers have registers for instructions of ``mma_n`` columns."""
    return _needed(config, mma_n) <= _register_splits(config)[-1][1]


def _register_splits(config: FP8Config) -> tuple[tuple[int, int], ...]:
    """What ``config`` may choose from."""
    splits = _REGISTER_SPLITS.get(config.num_consumers, ((24, 112),))
    return splits if config.ctas_per_sm == 1 else splits[:1]


def _needed(config: FP8Config, mma_n: int) -> int:
    """Registers of a consumer thread with instructions of ``mma_n`` columns."""
    others = _OTHER_REGISTERS + config.slices * _OTHER_REGISTERS_PER_SLICE
    others += (len(segments(config.block_n)) - 1) * _OTHER_REGISTERS_PER_SEGMENT
    if mma_n < config.block_n:
        others += _OTHER_REGISTERS_OF_PARTS
    others += config.extra_tokens  # sums and partial sums
    return accumulators(config, mma_n) + others


def accumulators(config: FP8Config, mma_n: int = 0) -> int:
    """Registers a consumer thread spends on sums and partial sums, with instructions of ``mma_n`` columns."""
    return config.slices * config.block_n // 2 + config.num_partials * (mma_n or instruction_shape(config)[1]) // 2


def register_split(config: FP8Config) -> tuple[int, int]:
    """(producer, consumer) registers a thread, for setmaxnreg. Most CTAs with one consumer get half of an SM's even
    where they live there alone: that is enough, and without setmaxnreg ptxas does not see that a warp's threads stay
    together: its code had divergence checks and computed addresses again in every block of K."""
    splits = _register_splits(config)
    needed = _needed(config, instruction_shape(config)[1])
    return next((split for split in splits if needed <= split[1]), splits[-1])


def stage_bytes(config: FP8Config) -> int:
    """One stage: a tile of A, a tile of B, and A's scales."""
    return (config.block_m + config.block_n) * config.block_k + align(config.block_m * 4, 128)


def staging_bytes(config: FP8Config) -> int:
    """What a CTA finishes of the tile, in bf16, on its way out; a lone tile waits in stages (see ``staging.cuh``)."""
    if not config.persistent:
        return 0
    return (config.block_m - config.extra_tokens) * config.block_n * 2 // config.cluster_k


def reduction_bytes(config: FP8Config) -> int:
    """Slots for the other shares of what each consumer finishes, and two barriers for each."""
    if config.k_shares == 1:
        return 0
    slot = config.slices * config.block_n // config.k_shares * 256
    return config.num_consumers * ((config.k_shares - 1) * slot + BARRIER_BYTES)


def told_bytes(config: FP8Config) -> int:
    """Where the warp that brings tiles to D tells consumers of the next (see ``told.cuh``)."""
    told = config.persistent and config.num_consumers == 2 and not config.stream_k and not config.extra_tokens
    return 16 if told else 0


def config_shared_bytes(config: FP8Config, tma_store: bool) -> int:
    """Dynamic shared memory of one CTA; without a TMA store there is no staging area."""
    stages = config.num_stages * (stage_bytes(config) + BARRIER_BYTES)
    return stages + reduction_bytes(config) + (staging_bytes(config) + told_bytes(config) if tma_store else 0)


def _config(params: KernelParams) -> FP8Config:
    if not isinstance(params.config, FP8Config):
        raise TypeError(f"{params.kernel} takes an FP8Config, not {type(params.config).__name__}")
    return params.config


KERNEL = Sm90Fp8Gemm()
