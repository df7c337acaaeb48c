"""Tiles of the FP8 kernel for any scaling, and the registers and shared memory that they need."""

from __future__ import annotations

from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import ScaledConfig
from ..spec import SCALE_BLOCK, align
from .loads import BARRIER_BYTES
from .scaled import BYTES

MAX_STAGES = 16

CONSUMERS = {64: 1, 128: 2, 256: 2}
"""Consumer warpgroups by tile height."""

CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""CTAs of a cluster along m and n."""

SERVING: tuple[tuple[int, int, tuple[int, int], int, int], ...] = (
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

REGISTERS = {1: (40, 208), 2: (40, 232)}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups. Producers with 24 spill."""

_OTHER_REGISTERS = 22
_OTHER_REGISTERS_PER_SLICE = 4
_OTHER_REGISTERS_OF_PARTS = 8
_OTHER_REGISTERS_OF_WIDE = 6
_1D1D_REGISTERS = 9
_ROWWISE_REGISTERS, _DIRECT_REGISTERS, _C_REGISTERS = 6, 16, 10
"""Registers of a consumer thread besides accumulators: always; for each m64 slice; if a slice is multiplied in two
parts; if it is multiplied in one part of more than 128 columns; and for each slice if consumers multiply products by
scales of B, read scales of rows, write D themselves, or read C. Measured with ptxas: with fewer registers it spills."""


def make_config(
    block_m: int,
    block_n: int,
    cluster: tuple[int, int] = (1, 1),
    buffers: int = 2,
    partials: int | None = None,
    arch: ArchSpec = SM90,
) -> ScaledConfig:
    """A config with as many stages as fit. If ``partials`` is None, it has two sets of partial sums if they fit in
    registers."""
    one = ScaledConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=SCALE_BLOCK,
        num_stages=MAX_STAGES,
        num_consumers=CONSUMERS[block_m],
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        buffers=buffers,
    )
    two = replace(one, num_partials=2)
    if partials is None:
        partials = 2 if two.slices <= 2 and fits(two, block_n) else 1
    return fitted(two if partials == 2 else one, "1d1d", "f32", arch)


def fitted(
    config: ScaledConfig, scaling: str, output: str, arch: ArchSpec = SM90, rest: int = 0, tma_store: bool = True
) -> ScaledConfig:
    """``config`` with no more stages than fit beside the scales and staging buffers for this scaling and output, and
    beside ``rest`` bytes."""
    none, one = (config_shared_bytes(replace(config, num_stages=x), tma_store, scaling, output) for x in (0, 1))
    stages = (arch.shared_per_cta - none - rest) // (one - none)
    return replace(config, num_stages=max(0, min(config.num_stages, stages)))


def instruction_columns(config: ScaledConfig) -> int:
    """Columns of one wgmma: all of the tile's, or half of them if the accumulators would not fit beside the sums."""
    return config.block_n if fits(config, config.block_n) else config.block_n // 2


def accumulators(config: ScaledConfig, mma_n: int) -> int:
    """Registers of a consumer thread for sums and partial sums, with instructions of ``mma_n`` columns."""
    return config.slices * config.block_n // 2 + config.num_partials * mma_n // 2


def fits(config: ScaledConfig, mma_n: int, more: int = 0) -> bool:
    """Whether instructions of ``mma_n`` columns, and ``more`` registers for each slice, fit in a consumer thread's
    registers."""
    others = _OTHER_REGISTERS + config.slices * (_OTHER_REGISTERS_PER_SLICE + more)
    others += _OTHER_REGISTERS_OF_PARTS if mma_n < config.block_n else 0
    others += _OTHER_REGISTERS_OF_WIDE if mma_n > 128 else 0
    return accumulators(config, mma_n) + others <= REGISTERS[config.num_consumers][1]


def more_registers(scaling: str, accumulate: str, tma_store: bool) -> int:
    """Additional registers for each slice, if consumers do more than add products up and stage the sums."""
    rowwise = _ROWWISE_REGISTERS if scaling == "rowwise" else 0
    products = _1D1D_REGISTERS if scaling == "1d1d" else 0
    return products + max(rowwise, 0 if tma_store else _DIRECT_REGISTERS, _C_REGISTERS if accumulate == "reads" else 0)


def box_columns(config: ScaledConfig, output: str) -> int:
    """Columns of one staged part of a tile: the most that divide the columns of a wgmma and have up to 128 bytes."""
    widest = 32 if output == "f32" else 64
    return next((x for x in (widest, 32) if instruction_columns(config) % x == 0), 16)


def config_shared_bytes(config: ScaledConfig, tma_store: bool, scaling: str, output: str) -> int:
    """Dynamic shared memory of one CTA: stages with their scales, and the staging buffers of each consumer. B's scales
    have twice as many slots as there are stages."""
    stage = (config.block_m + config.block_n) * SCALE_BLOCK + BARRIER_BYTES
    if scaling != "rowwise":
        stage += align(config.block_m * 4, 128)
    if scaling == "1d1d":
        stage += 2 * align(config.block_n * 4, 128)
    staging = config.num_consumers * config.buffers * 64 * box_columns(config, output) * BYTES[output]
    return config.num_stages * stage + (staging if tma_store else 0)
