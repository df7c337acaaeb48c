"""Dense FP8 GEMM for Hopper with operands swapped: weights on the tensor cores' rows, tokens on their columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import KernelParams, SwappedConfig, align, ceil_div
from . import fp8
from .base import Kernel
from .fp8 import BARRIER_BYTES

MAX_STAGES = 24
"""Of the smallest tiles, which could have more."""

TOKENS = (8, 16, 24, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128)
"""Tile sizes along M. Any multiple of 8 would do. One tile holds few tokens, which are cheap to pad; more are cut up,
and eight too many in each tile are 10%, so there is every size then."""

_ROWS = ((32, 1, 2), (64, 1, 1), (128, 2, 1), (256, 2, 1))
"""Rows of B in a tile, the consumer groups that share them, and blocks of K in a stage: narrow tiles have stages as
large as others, so that as few loads keep as many bytes on their way."""

_CONSUMERS_K = (1, 2, 4)
_CLUSTERS_K = (1, 2, 4, 8)

_AHEAD = 8
"""Pairs of token scales that are read while a unit's products run: the way from shared memory is hidden by the use of
what came before. ptxas finds registers for them in every config (it reads fewer so early where it has none left)."""

_OTHER_REGISTERS = 32
_OTHER_REGISTERS_OF_PARTS = 20
_OTHER_REGISTERS_OF_SLICES = 8
_OTHER_REGISTERS_OF_CLUSTERS = 4
_OTHER_REGISTERS_OF_TWO = 1
"""What the main loop needs besides accumulators and scales, where a block is multiplied in two parts, where a consumer
has two slices, in clusters of four or more, and with two sets of partial sums where scales are not held; from ptxas: a
config that leaves less would spill, or move descriptors in each block."""


class Sm90Fp8Swapped(Kernel[SwappedConfig]):
    """See ``templates/include/fp8_swapped.cuh`` for the algorithm."""

    name = "sm90_fp8_swapped"
    archs = (SM90.name,)
    config_class = SwappedConfig
    mma_instruction = "QGMMA"

    def configs(self, arch: ArchSpec) -> Iterator[SwappedConfig]:
        """``TOKENS`` by 32 to 256 weights, K in up to 8 shares, one or two CTAs on an SM; always with as many stages
        as fit."""
        for (block_n, groups, stage_blocks), block_m, consumers_k, cluster_k, ctas_per_sm in itertools.product(
            _ROWS, TOKENS, _CONSUMERS_K, _CLUSTERS_K, (1, 2)
        ):
            config = SwappedConfig(
                block_m=block_m,
                block_n=block_n,
                block_k=128,
                num_stages=0,
                num_consumers=groups * consumers_k,
                cluster_k=cluster_k,
                ctas_per_sm=ctas_per_sm,
                consumers_k=consumers_k,
                stage_blocks=stage_blocks,
            )
            config = self._deepest(_with_partials(config), arch)
            if self.illegal(config, arch) is None:
                yield config

    def _deepest(self, config: SwappedConfig, arch: ArchSpec) -> SwappedConfig:
        """``config`` with as many stages as fit into shared memory beside the staging area and the slots."""
        budget = min(arch.shared_per_cta, arch.shared_per_sm // config.ctas_per_sm - arch.shared_reserved_per_cta)
        rest = staging_bytes(config) + exchange_bytes(config) + spare_scale_bytes(config)
        stages = max(0, min(MAX_STAGES, (budget - rest) // (stage_bytes(config) + BARRIER_BYTES)))
        return replace(config, num_stages=stages // config.consumers_k * config.consumers_k)

    def illegal(self, config: SwappedConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if (c.scale_n, c.scale_k, c.block_k) != (128, 128, 128):
            return f"block_k, scale_n and scale_k must be 128, not {c.block_k}, {c.scale_n} and {c.scale_k}"
        if (c.cluster_m, c.cluster_n) != (1, 1) or c.cluster_k not in _CLUSTERS_K or c.consumers_k not in _CONSUMERS_K:
            given = f"{c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs and {c.consumers_k} consumers along K"
            return f"sharing a tile by {given} is not 1 x 1 x one of {_CLUSTERS_K} and one of {_CONSUMERS_K}"
        if (c.block_n, c.num_consumers / c.consumers_k, c.stage_blocks) not in _ROWS:
            given = f"block_n {c.block_n} with {c.num_consumers} consumer warpgroups, {c.consumers_k} along K,"
            return f"{given} and {c.stage_blocks} blocks a stage is not one of {_ROWS}"
        if not c.persistent:
            return "CTAs are persistent here: tiles are small beside the ring, and would gain no stage worth having"
        if c.stream_k:
            return "blocks of K are not dealt out over CTAs here: tiles are small, and clusters share their K"
        if c.num_consumers > 4:
            return f"{c.num_consumers} consumer warpgroups leave too few registers a thread"
        if c.block_m % 8 or not 8 <= c.block_m <= 256:
            return f"block_m must be a multiple of 8 from 8 to 256, not {c.block_m}"
        if c.block_n < 64 and (c.block_m > 64 or c.cluster_k > 2):
            return f"{c.block_n} weights are too few for a tile of {c.block_m} tokens whose K {c.cluster_k} CTAs share"
        if c.k_shares > 8:
            return f"{c.k_shares} shares of K are more than 8"
        units = c.slices * c.block_m // mma_n(c)
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if not _fits(c, scales_held(c)):
            return f"{accumulators(c)} accumulator registers a thread leave too few of {register_split(c)[1]}"
        if c.num_stages < 2 * c.consumers_k or c.num_stages % c.consumers_k:
            return f"{c.num_stages} stages are not two or more for each of {c.consumers_k} consumers along K"
        if c.ctas_per_sm not in (1, 2):
            return f"{c.ctas_per_sm} CTAs on an SM: registers are budgeted for one or two"
        shared = config_shared_bytes(c, tma_store=True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def store(self, config: SwappedConfig, d_tma: bool) -> str:
        """How ``config`` stores: narrow tiles element by element, since a swizzled row of 64 is more than they have.
        The others copy what TMA could store, 16 bytes at a time."""
        return "tma" if d_tma and config.block_n >= 64 else "direct"

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``sm90_fp8_swapped.cu.jinja``."""
        c = _config(params)
        return {
            **fp8.fields(params, c, mma_n(c), register_split(c)),
            "name": self.entry(params),
            "min_ctas": 2 if c.num_consumers == 1 else c.ctas_per_sm,
            "stage_blocks": c.stage_blocks,
            "scales_held": scales_held(c),
            "scales_ahead": scales_ahead(c),
            "shared_bytes": self.shared_bytes(params),
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area, slots and barriers, as ``Fp8Swapped`` lays them out (it asserts the same number)."""
        return config_shared_bytes(_config(params), params.store == "tma")

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_swapped_16x64_s12_p2_k4x2_tma``."""
        c = _config(params)
        parts = [f"fp8_gemm_swapped_{c.block_m}x{c.block_n}", f"s{c.num_stages}", f"p{c.num_partials}"]
        if c.k_shares > 1:
            parts.append(f"k{c.cluster_k}x{c.consumers_k}")
        if c.ctas_per_sm > 1:
            parts.append(f"r{c.ctas_per_sm}")
        parts.append(params.store)
        parts += fp8.compiled_dims(params)
        return "_".join(parts)

    def cases(self) -> list[KernelParams]:
        """Narrow, middling and wide tiles alone, and one for two CTAs on an SM; every split of K for one tile, and
        where shares are uneven, narrow, or read scales late; direct stores of a plain and a split tile; compile-time
        dimensions."""

        def chosen(
            block_m: int, block_n: int, cluster_k: int = 1, consumers_k: int = 1, ctas: int = 1
        ) -> SwappedConfig:
            return next(
                c
                for c in every
                if (c.block_m, c.block_n, c.cluster_k) == (block_m, block_n, cluster_k)
                and (c.consumers_k, c.ctas_per_sm) == (consumers_k, ctas)
            )

        every = list(self.configs(SM90))
        plain = [c for c in every if c.k_shares == c.ctas_per_sm == 1 and c.block_m in (8, 64, 128)]
        split = [c for c in every if c.k_shares > 1 and (c.block_m, c.block_n, c.ctas_per_sm) == (16, 64, 1)]
        others = [chosen(24, 64, 2), chosen(24, 128, 1, 2), chosen(48, 32, 2, 4), chosen(112, 64, 2, 2)]
        others += [chosen(64, 128, 2, 2), chosen(32, 256, 2, 2), chosen(64, 64, ctas=2), chosen(16, 32, 2, ctas=2)]
        return (
            [make_params(c) for c in plain + split + others]
            + [make_params(c, store="direct") for c in (chosen(64, 128), chosen(24, 64, 2, 2))]
            + [make_params(chosen(16, 64, 2, 2), shape=(0, 2112, 7168))]
        )


def make_params(config: SwappedConfig, store: str = "", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``, which stores through shared memory if it can and ``store`` does not
    say otherwise."""
    store = store or KERNEL.store(config, True)
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store=store, shape=shape)


def _with_partials(config: SwappedConfig) -> SwappedConfig:
    """``config`` with two sets of partial sums where registers allow it, else one."""
    ahead = replace(config, num_partials=2)
    fits = mma_n(ahead) == config.block_m and config.slices == 1 and _fits(ahead, scales_held(ahead))
    return ahead if fits else config


def mma_n(config: SwappedConfig) -> int:
    """Columns of one wgmma: all tokens of the tile, or half of them where their partial sums would not fit."""
    whole = config.block_m
    return whole if _fits_width(config, whole, False) or whole % 16 else whole // 2


def scales_held(config: SwappedConfig) -> bool:
    """Whether consumers keep a block's token scales in registers; else they read them for each product, as they promote
    and just before (`scales_ahead`)."""
    return _fits(config, True)


def scales_ahead(config: SwappedConfig) -> int:
    """How many pairs of token scales consumers read while a unit's products run, where they cannot keep a block's."""
    return 0 if scales_held(config) else min(_AHEAD, mma_n(config) // 8)


def _fits(config: SwappedConfig, held: bool) -> bool:
    """Whether consumers have registers for ``config``, with a block's token scales among them or not."""
    return _fits_width(config, mma_n(config), held)


def _fits_width(config: SwappedConfig, width: int, held: bool) -> bool:
    accumulators = config.slices * config.block_m // 2 + config.num_partials * width // 2
    scales = 2 * config.block_m // 4 if held else 8  # of the block at hand and the next, or some that were read late
    others = _OTHER_REGISTERS
    if width < config.block_m:
        others += _OTHER_REGISTERS_OF_PARTS
    if config.cluster_k > 2:
        others += _OTHER_REGISTERS_OF_CLUSTERS
    if config.slices > 1:
        others += _OTHER_REGISTERS_OF_SLICES
    if config.num_partials == 2 and not held:
        others += _OTHER_REGISTERS_OF_TWO
    return accumulators + scales + others <= register_split(config)[1]


def accumulators(config: SwappedConfig) -> int:
    """Registers a consumer thread spends on sums and partial sums."""
    return config.slices * config.block_m // 2 + config.num_partials * mma_n(config) // 2


def register_split(config: SwappedConfig) -> tuple[int, int]:
    """(producer, consumer) registers a thread, for setmaxnreg."""
    if config.num_consumers == 1:
        return 40, 216
    if config.ctas_per_sm == 1:
        return {2: (40, 232), 4: (32, 112)}.get(config.num_consumers, (24, 48))
    return {2: (32, 104), 4: (40, 48)}.get(config.num_consumers, (24, 48))


def owned_chunks(config: SwappedConfig) -> int:
    """Chunks of eight tokens that one share of K finishes."""
    return ceil_div(config.block_m // 8, config.k_shares)


def stage_bytes(config: SwappedConfig) -> int:
    """One stage: a tile of A, a tile of B, and A's scales, which TMA writes to 128-byte boundaries."""
    return (config.block_m + config.block_n) * config.block_k * config.stage_blocks + _scale_bytes(config)


def spare_scale_bytes(config: SwappedConfig) -> int:
    """A's scales of one more block for each consumer along K, where they are read when the stage has been let go."""
    return 0 if scales_held(config) else config.consumers_k * _scale_bytes(config)


def _scale_bytes(config: SwappedConfig) -> int:
    return align(config.block_m * 4 * config.stage_blocks, 128)


def staging_bytes(config: SwappedConfig) -> int:
    """The bf16 tile on its way out: what each consumer finishes of it."""
    return config.num_consumers * config.slices * owned_chunks(config) * 1024 if config.block_n >= 64 else 0


def exchange_bytes(config: SwappedConfig) -> int:
    """Slots for the other shares of what each consumer finishes, and two barriers for each."""
    if config.k_shares == 1:
        return 0
    slot = owned_chunks(config) * config.slices * 2048
    return config.num_consumers * ((config.k_shares - 1) * slot + BARRIER_BYTES)


def config_shared_bytes(config: SwappedConfig, tma_store: bool) -> int:
    """Dynamic shared memory of one CTA; where each element is stored for itself there is no staging area."""
    stages = config.num_stages * (stage_bytes(config) + BARRIER_BYTES)
    rest = exchange_bytes(config) + spare_scale_bytes(config)
    return stages + rest + (staging_bytes(config) if tma_store else 0)


def _config(params: KernelParams) -> SwappedConfig:
    if not isinstance(params.config, SwappedConfig):
        raise TypeError(f"{params.kernel} takes a SwappedConfig, not {type(params.config).__name__}")
    return params.config


KERNEL = Sm90Fp8Swapped()
