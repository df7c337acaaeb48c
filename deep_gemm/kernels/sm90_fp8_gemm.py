"""Dense FP8 GEMM for Hopper: 1x128 scales for A, 128x128 scales for B, promotion after every 128 of K, bf16 output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, UprightConfig
from ..spec import GemmSpec, Spec, align, ceil_div
from .base import Value
from .fp8 import FP8Kernel, check_whole_pieces, turns
from .gemm_features import Counts
from .loads import BARRIER_BYTES
from .tiles import segments

MAX_STAGES = 16
"""Narrow tiles could have more stages; 16 and 8 stages took the same time on an H200."""

_CONSUMERS = {64: 1, 128: 2, 256: 2}
"""Consumer warpgroups by tile height."""

_CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4))
"""Cluster shapes: CTAs of a cluster along m, n and k."""

SERVING: tuple[tuple[int, int, tuple[int, int, int], int, bool], ...] = (
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
"""(block_m, block_n, cluster, CTAs per SM, persistent) of the serving set, chosen by a greedy cover of surveyed
shapes."""

_REGISTER_SPLITS = {1: ((40, 208), (40, 248)), 2: ((40, 232), (24, 240))}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups. The first sufficient split
is chosen: producers with 24 registers spill easily, and a consumer with 248 leaves no room for a second CTA on the SM.
A lone consumer with half of an SM could have 216, but then 64x192 tiles with split K would use this split and spill."""

_OTHER_REGISTERS = 22
_OTHER_REGISTERS_PER_SLICE = 4
_OTHER_REGISTERS_PER_SEGMENT = 4
_OTHER_REGISTERS_OF_PARTS = 20
"""Registers of a consumer thread besides accumulators: always; for each m64 slice; for each segment of columns after
the first; and if a slice is multiplied in two parts. Measured with ptxas: with fewer registers it spills."""


class Sm90Fp8Gemm(FP8Kernel[UprightConfig]):
    """See ``templates/include/fp8_gemm.cuh`` for the algorithm."""

    name = "sm90_fp8_gemm"
    archs = (SM90.name,)
    config_class = UprightConfig

    scaling = "k1D2D"
    """The device code's name of the scaling."""

    prefix = "fp8_gemm"
    """The beginning of the kernels' names."""

    def configs(self, arch: ArchSpec) -> Iterator[UprightConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[UprightConfig]:
        """Tiles from 64x16 to 256x128 and 128x256, without clusters or in clusters of two or four, with one or two CTAs
        per SM."""
        for chosen in itertools.product(_CONSUMERS, range(16, 257, 16), _CLUSTERS, (1, 2), (True, False)):
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def illegal(self, config: UprightConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if c.block_k != 128:
            return f"block_k must be 128, not {c.block_k}"
        if (c.block_m, c.block_n) == (64, 256):
            return "a tile of 64 rows and 256 columns takes longer than two of 128 columns"
        if c.block_m == 256 and c.block_n < 64:
            return "a tile of 256 rows and under 64 columns reads A more often than two tiles of 128 rows"
        if _CONSUMERS.get(c.block_m) != c.num_consumers:
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {_CONSUMERS}"
        if (c.cluster_m, c.cluster_n, c.cluster_k) not in _CLUSTERS:
            return f"sharing a tile by {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {_CLUSTERS}"
        if c.block_n % 16 or not 16 <= c.block_n <= 256:
            return f"block_n must be a multiple of 16 from 16 to 256, not {c.block_n}"
        if c.block_n % (16 * c.cluster_k):
            step = 16 * c.cluster_k
            return f"block_n must be a multiple of {step} where K is split over {c.cluster_k} CTAs, not {c.block_n}"
        if c.cluster_m * c.cluster_n > 1 and (c.block_m < 128 or c.block_n < 64):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        slices, mma_n = instruction_shape(c)
        units = slices * c.block_n // mma_n
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if c.num_consumers == 1 and mma_n < c.block_n:
            return f"a lone consumer multiplies {c.block_n} columns in two parts, which took 5% longer"
        if mma_n % 16:
            return f"instructions of {mma_n} columns do not end on a multiple of 16, and tiles are staged in such steps"
        if not _fits(c, mma_n):
            return f"{accumulators(c)} accumulator registers a thread leave too few of {register_split(c)[1]}"
        if not c.persistent and c.cluster_size > 1:
            return f"a config with cluster_size {c.cluster_size} must be persistent"
        if c.num_stages < 2:
            return f"{c.num_stages} stages are not two or more"
        if c.num_stages < 3 and c.cluster_k > 1:
            return "two stages load too few bytes ahead for a CTA with a part of K"
        if c.ctas_per_sm > 2 or (c.ctas_per_sm == 2 and c.num_consumers > 1):
            return f"{c.ctas_per_sm} CTAs with {c.num_consumers} consumers each leave too few registers a thread"
        shared = config_shared_bytes(c, tma_store=True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def runs(self, spec: Spec, config: UprightConfig) -> bool:
        """Also refuses configs with one tile per CTA where the tiles do not all run at once, or where D needs copies of
        less than eight columns."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        if config.persistent:
            return True
        ctas = self.num_ctas(config, spec.m, spec.n, spec.num_sms)
        return ctas <= spec.num_sms * config.ctas_per_sm and not (spec.d.aligned and spec.n % 8)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_fp8_gemm.cu.jinja``."""
        c = self.config(params)
        return {
            **super().constants(params),
            "block_n": c.block_n,
            "num_partials": c.num_partials,
            "turns": turns(c),
            "persistent": c.persistent,
            "min_ctas": 2 if register_split(c) == _REGISTER_SPLITS[1][0] else 1,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "scaling": self.scaling,
        }

    def registers(self, config: UprightConfig) -> tuple[int, int]:
        """See `register_split`."""
        return register_split(config)

    def mma_n(self, config: UprightConfig) -> int:
        """See `instruction_shape`."""
        return instruction_shape(config)[1]

    def counts(self, config: UprightConfig, aligned: bool) -> Counts:
        """Rows of A are the rows of wgmma; the store warp stores tiles."""
        slices, mma_n = instruction_shape(config)
        return Counts(
            groups=config.num_consumers,
            slices=slices,
            width=config.block_n,
            mma_n=mma_n,
            direct=not aligned,
            store_warp=config.persistent and aligned,
        )

    def num_ctas(self, config: UprightConfig, m: int, n: int, num_sms: int) -> int:
        """Persistent: as many CTAs as can be resident, or fewer if there are fewer tiles, in whole clusters. Not
        persistent: one CTA per tile."""
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        slots = max(1, num_sms * config.ctas_per_sm // config.cluster_size)
        return (min(tiles, slots) if config.persistent else tiles) * config.cluster_size

    def stores_by_tma(self, params: KernelParams) -> bool:
        """Only persistent CTAs store by TMA."""
        return params.store == "tma" and self.config(params).persistent

    def output_map(self, params: KernelParams, spec: GemmSpec, stride_d: int) -> Value:
        """The kernel reads the map only if it stores tiles by TMA."""
        if not self.stores_by_tma(params):
            check_whole_pieces(params, spec.n)
            return bytes(128)
        width, height = store_box(self.config(params))
        return Map(TensorMapSpec("bf16", (spec.n, spec.m), (stride_d * 2,), (width, height), width * 2), "d")

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area and barriers, in the layout of ``Fp8Gemm``, which asserts the same number."""
        return config_shared_bytes(self.config(params), params.store == "tma")

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_128x128_s5_p2_c2x1_tma``."""
        c = self.config(params)
        return self.entry_name(
            params,
            f"{self.prefix}_{c.block_m}x{c.block_n}_s{c.num_stages}_p{c.num_partials}",
            f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_m * c.cluster_n > 1 else "",
            f"k{c.cluster_k}x1" if c.cluster_k > 1 else "",
            f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
            "" if c.persistent else "once",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set; tall tiles in a cluster along m; direct stores of a plain tile, of a tile that crosses scale
        blocks, with split K, and with one tile per CTA; compile-time dimensions."""
        direct = [(128, 128), (128, 192), (128, 64, (1, 1, 2)), (64, 128, (1, 1, 1), 1, False)]
        return (
            [make_params(config) for config in self.configs(SM90)]
            + [make_params(make_config(256, 128, (2, 1, 1)))]
            + [make_params(make_config(*chosen), store="direct") for chosen in direct]  # type: ignore[arg-type]
            + [make_params(make_config(128, 128), shape=(0, 2112, 7168))]
        )


def make_config(
    block_m: int,
    block_n: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
    ctas_per_sm: int = 1,
    persistent: bool = True,
    arch: ArchSpec = SM90,
) -> UprightConfig:
    """A config with as many stages as fit into shared memory beside the staging area, and with two sets of partial sums
    if they fit in registers with instructions of the tile's width. Two sets, with products issued ahead, beat one set
    by 2.6% (H200, 217 shapes, geometric mean over all pairs that are legal with both; most for narrow tiles; measured
    with older schedules)."""
    cluster_m, cluster_n, cluster_k = cluster
    one = UprightConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=128,
        num_stages=0,
        num_consumers=_CONSUMERS[block_m],
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        cluster_k=cluster_k,
        ctas_per_sm=ctas_per_sm,
        persistent=persistent,
    )
    two = replace(one, num_partials=2)
    slices, mma_n = instruction_shape(two)
    config = two if slices <= 2 and mma_n == block_n else one
    budget = min(arch.shared_per_cta, arch.shared_per_sm // ctas_per_sm - arch.shared_reserved_per_cta)
    besides = staging_bytes(config) + exchange_bytes(config) + next_tile_bytes(config)
    stages = (budget - besides) // (stage_bytes(config) + BARRIER_BYTES)
    return replace(config, num_stages=max(0, min(MAX_STAGES, stages)))


def make_params(config: UprightConfig, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``."""
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store=store, shape=shape)


def instruction_shape(config: UprightConfig) -> tuple[int, int]:
    """(m64 slices, columns of one wgmma) of one consumer. Wide instructions read the least from shared memory. A tile
    has two instructions along n only if the accumulators of one would not fit beside the sums."""
    return config.slices, config.block_n if _fits(config, config.block_n) else config.block_n // 2


def _fits(config: UprightConfig, mma_n: int) -> bool:
    """Whether consumers have registers for instructions of ``mma_n`` columns."""
    return _needed(config, mma_n) <= _register_splits(config)[-1][1]


def _register_splits(config: UprightConfig) -> tuple[tuple[int, int], ...]:
    """The splits that ``config`` may choose from."""
    splits = _REGISTER_SPLITS[config.num_consumers]
    return splits if config.ctas_per_sm == 1 else splits[:1]


def _needed(config: UprightConfig, mma_n: int) -> int:
    """Registers of a consumer thread with instructions of ``mma_n`` columns."""
    others = _OTHER_REGISTERS + config.slices * _OTHER_REGISTERS_PER_SLICE
    others += (len(segments(config.block_n)) - 1) * _OTHER_REGISTERS_PER_SEGMENT
    if mma_n < config.block_n:
        others += _OTHER_REGISTERS_OF_PARTS
    return accumulators(config, mma_n) + others


def accumulators(config: UprightConfig, mma_n: int = 0) -> int:
    """Registers of a consumer thread for sums and partial sums, with instructions of ``mma_n`` columns."""
    return config.slices * config.block_n // 2 + config.num_partials * (mma_n or instruction_shape(config)[1]) // 2


def register_split(config: UprightConfig) -> tuple[int, int]:
    """(producer, consumer) registers per thread, for setmaxnreg. Most CTAs with one consumer get half of an SM's
    registers, even if only one CTA runs on the SM: that is enough. setmaxnreg is used all the same. Without it ptxas
    does not know that a warp's threads stay converged, and its code checked for divergence and computed addresses again
    in every block of K."""
    splits = _register_splits(config)
    needed = _needed(config, instruction_shape(config)[1])
    return next((split for split in splits if needed <= split[1]), splits[-1])


def store_box(config: UprightConfig) -> tuple[int, int]:
    """(columns, rows) of one box of staged sums: the widest of 64, 32 and 16 columns that divides the tile."""
    finished = config.block_n // config.cluster_k
    return next(columns for columns in (64, 32, 16) if finished % columns == 0), 64


def stage_bytes(config: UprightConfig) -> int:
    """Bytes of one stage: a tile of A, a tile of B, and A's scales."""
    return (config.block_m + config.block_n) * config.block_k + align(config.block_m * 4, 128)


def staging_bytes(config: UprightConfig) -> int:
    """Bytes of the staging area for the bf16 elements that a CTA stores. 0 if not persistent: stages are used then."""
    return config.block_m * config.block_n * 2 // config.cluster_k if config.persistent else 0


def exchange_bytes(config: UprightConfig) -> int:
    """Bytes of the split-K exchange: each consumer has two barriers and a slot for the sums of each other split."""
    if config.cluster_k == 1:
        return 0
    slot = config.slices * config.block_n // config.cluster_k * 256
    return config.num_consumers * ((config.cluster_k - 1) * slot + BARRIER_BYTES)


def next_tile_bytes(config: UprightConfig) -> int:
    """Bytes of the slots in which the store warp publishes the next tile for two consumers."""
    return 16 if config.persistent and config.num_consumers == 2 else 0


def config_shared_bytes(config: UprightConfig, tma_store: bool) -> int:
    """Dynamic shared memory of one CTA; without a TMA store there is no staging area."""
    stages = config.num_stages * (stage_bytes(config) + BARRIER_BYTES)
    return stages + exchange_bytes(config) + (staging_bytes(config) + next_tile_bytes(config) if tma_store else 0)


KERNEL = Sm90Fp8Gemm()
