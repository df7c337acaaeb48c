"""The template for FP8 with bf16 output and whole tiles staged: 1x128 by 128x128 scales, or one for each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ...arch import SM90, ArchSpec
from ...params import GemmConfig, KernelParams
from ...spec import GemmSpec, align
from .. import groups
from ..features import Costs
from . import offered
from .edges import EdgeBoxes
from .template import BARRIER_BYTES, MAX_STAGES, slices, stages_that_fit, wgmma_costs

CONSUMERS = {64: 1, 128: 2, 256: 2}
"""Consumer warpgroups by tile height."""

CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4))
"""Cluster shapes: CTAs of a cluster along m, n and k."""

REGISTER_SPLITS = {1: ((40, 208), (40, 248)), 2: ((40, 232), (24, 240))}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups. The first sufficient split
is chosen: producers with 24 registers spill easily, and a consumer with 248 leaves no room for a second CTA on the SM.
A lone consumer with half of an SM could have 216, but then 64x192 tiles with split K would use this split and spill."""

_OTHER_REGISTERS = 22
_OTHER_REGISTERS_PER_SLICE = 4
_OTHER_REGISTERS_PER_SEGMENT = 4
_OTHER_REGISTERS_OF_PARTS = 20
"""Registers of a consumer thread besides accumulators: always; for each m64 slice; for each segment of columns after
the first; and if a slice is multiplied in two parts. Measured with ptxas: with fewer registers it spills."""


class Fp8Gemm(EdgeBoxes):
    """See ``templates/include/fp8_gemm.cuh``. ``by_rows``: one scale for each row of A and of B, which the epilogue
    multiplies by; then stages keep room for scales that is unused, so both kinds have the same configs."""

    file = "sm90_fp8_gemm.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = (
        "block_n",
        "cluster_m",
        "cluster_n",
        "cluster_k",
        "num_partials",
        "turns",
        "in_turn",
        "persistent",
        "min_ctas",
        "scaling",
    )
    mma_instruction = "QGMMA"
    block_k = 128
    names_partials = True

    def __init__(self, by_rows: bool = False) -> None:
        self.by_rows = by_rows

    def make(  # type: ignore[override]
        self,
        family: str,
        block_m: int,
        block_n: int,
        cluster: tuple[int, int, int] = (1, 1, 1),
        ctas_per_sm: int = 1,
        persistent: bool = True,
        in_turn: int = 1,
        arch: ArchSpec = SM90,
    ) -> GemmConfig:
        """A config with two sets of partial sums if they fit in registers with instructions of the tile's width. Two
        sets, with products issued ahead, beat one set by 2.6% (H200, 217 shapes, geometric mean over all pairs that are
        legal with both; most for narrow tiles; measured with older schedules)."""
        config = GemmConfig(
            family,
            block_m,
            block_n,
            self.block_k,
            MAX_STAGES,
            CONSUMERS[block_m],
            *cluster,
            ctas_per_sm=ctas_per_sm,
            persistent=persistent,
            num_partials=1 if in_turn > 1 else 2,
            in_turn=in_turn,
        )
        partials = 2 if in_turn == 1 and slices(config) <= 2 and mma_n(config) == block_n else 1
        rest, stage = _fixed_bytes(config, tma_store=True), _stage_bytes(config)
        return config.changed(stages_that_fit(arch, config, rest, stage), partials)

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles from 64x16 to 256x128 and 128x256, without clusters or in clusters of two or four, with one or two CTAs
        per SM."""
        return itertools.product(CONSUMERS, range(16, 257, 16), CLUSTERS, (1, 2), (True, False))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        if self.by_rows and c.cluster_k > 1:
            return f"K cannot be split over {c.cluster_k} CTAs"  # the epilogue multiplies whole sums
        if c.in_turn > 1 and (self.by_rows or c.cluster_k > 1 or c.num_partials > 1 or c.in_turn not in groups.IN_TURN):
            return f"it does not sum K in {c.in_turn} parts, one after the other"
        if c.block_k != self.block_k:
            return f"block_k must be {self.block_k}, not {c.block_k}"
        if (c.block_m, c.block_n) == (64, 256):
            return "a tile of 64 rows and 256 columns takes longer than two of 128 columns"
        if c.block_m == 256 and c.block_n < 64:
            return "a tile of 256 rows and under 64 columns reads A more often than two tiles of 128 rows"
        if CONSUMERS.get(c.block_m) != c.num_consumers:
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {CONSUMERS}"
        if (c.cluster_m, c.cluster_n, c.cluster_k) not in CLUSTERS:
            return f"sharing a tile by {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {CLUSTERS}"
        if c.block_n % 16 or not 16 <= c.block_n <= 256:
            return f"block_n must be a multiple of 16 from 16 to 256, not {c.block_n}"
        if c.block_n % (16 * c.cluster_k):
            step = 16 * c.cluster_k
            return f"block_n must be a multiple of {step} where K is split over {c.cluster_k} CTAs, not {c.block_n}"
        if c.cluster_m * c.cluster_n > 1 and (c.block_m < 128 or c.block_n < 64):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        if self.by_rows and c.cluster_size > 1 and mma_n(c) < c.block_n:
            return "clusters whose consumers multiply in two parts have too few registers for scales of rows"
        columns = mma_n(c)
        units = slices(c) * c.block_n // columns
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if c.num_consumers == 1 and columns < c.block_n:
            return f"a lone consumer multiplies {c.block_n} columns in two parts, which took 5% longer"
        if columns % 16:
            return (
                f"instructions of {columns} columns do not end on a multiple of 16, and tiles are staged in such steps"
            )
        if not _fits(c, columns):
            return f"{accumulators(c, columns)} accumulator registers a thread leave too few of {register_split(c)[1]}"
        if not c.persistent and c.cluster_size > 1:
            return f"a config with cluster_size {c.cluster_size} must be persistent"
        if c.num_stages < 2:
            return f"{c.num_stages} stages are not two or more"
        if c.num_stages < 3 and c.cluster_k > 1:
            return "two stages load too few bytes ahead for a CTA with a part of K"
        if c.ctas_per_sm > 2 or (c.ctas_per_sm == 2 and c.num_consumers > 1):
            return f"{c.ctas_per_sm} CTAs with {c.num_consumers} consumers each leave too few registers a thread"
        shared = _config_bytes(c, tma_store=True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """With one tile per CTA all tiles must run at once, and D needs no copies of less than eight columns."""
        if config.persistent:
            return True
        ctas = self.num_ctas(config, spec.m, spec.n, spec.num_sms)
        return ctas <= spec.num_sms * config.ctas_per_sm and not (spec.d.aligned and spec.n % 8)

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        if spec.m <= offered.FEW_IN_PARTS and groups.parts_of_k(spec) > 1:
            return []
        return offered.splits_in_one_round(spec, configs)

    def has_map_d(self, params: KernelParams) -> bool:
        """Even if D is stored directly."""
        return True

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        return register_split(config)

    def min_ctas(self, config: GemmConfig) -> int:
        return 2 if register_split(config) == REGISTER_SPLITS[1][0] else 1

    def mma_n(self, config: GemmConfig) -> int:
        return mma_n(config)

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        return wgmma_costs(config, mma_n(config), aligned=aligned, store_warp=config.persistent and aligned)

    def box_columns(self, config: GemmConfig, output: str) -> int:
        """The widest of 64, 32 and 16 columns that divides the tile."""
        finished = config.block_n // config.cluster_k
        return next(columns for columns in (64, 32, 16) if finished % columns == 0)

    def shared_bytes(self, params: KernelParams) -> int:
        """In the layout of ``Fp8Gemm``, which asserts the same number."""
        return _config_bytes(params.gemm, params.store == "tma")


def mma_n(config: GemmConfig) -> int:
    """Columns of one wgmma. Wide instructions read the least from shared memory. A tile has two instructions along n
    only if the accumulators of one would not fit beside the sums."""
    columns = config.block_n
    return columns if _fits(config, columns) else columns // 2


def _fits(config: GemmConfig, columns: int) -> bool:
    """Whether consumers have registers for instructions of ``columns`` columns."""
    return _needed(config, columns) <= _register_splits(config)[-1][1]


def _register_splits(config: GemmConfig) -> tuple[tuple[int, int], ...]:
    """The splits that ``config`` may choose from."""
    splits = REGISTER_SPLITS[config.num_consumers]
    return splits if config.ctas_per_sm == 1 else splits[:1]


def _needed(config: GemmConfig, columns: int) -> int:
    """Registers of a consumer thread with instructions of ``columns`` columns."""
    rows = slices(config)
    others = _OTHER_REGISTERS + rows * _OTHER_REGISTERS_PER_SLICE
    others += (config.block_n.bit_count() - 1) * _OTHER_REGISTERS_PER_SEGMENT
    if columns < config.block_n:
        others += _OTHER_REGISTERS_OF_PARTS
    sets = 2 if config.in_turn > 1 else 1
    return sets * rows * config.block_n // 2 + config.num_partials * columns // 2 + others


def accumulators(config: GemmConfig, columns: int) -> int:
    """Registers of a consumer thread for sums, those of all parts of K too, and partial sums, with instructions of
    ``columns`` columns."""
    sets = 2 if config.in_turn > 1 else 1
    return sets * slices(config) * config.block_n // 2 + config.num_partials * columns // 2


def register_split(config: GemmConfig) -> tuple[int, int]:
    """(producer, consumer) registers per thread, for setmaxnreg, which is used also where a CTA has enough without.
    Without it ptxas does not know that a warp's threads stay converged, and its code checked for divergence and
    computed addresses again in every block of K."""
    splits, needed = _register_splits(config), _needed(config, mma_n(config))
    return next((split for split in splits if needed <= split[1]), splits[-1])


def _stage_bytes(config: GemmConfig) -> int:
    """A tile of A, a tile of B, A's scales, and barriers."""
    return (config.block_m + config.block_n) * config.block_k + align(config.block_m * 4, 128) + BARRIER_BYTES


def _config_bytes(config: GemmConfig, tma_store: bool) -> int:
    """Stages and `_fixed_bytes`."""
    return config.num_stages * _stage_bytes(config) + _fixed_bytes(config, tma_store)


def _fixed_bytes(config: GemmConfig, tma_store: bool) -> int:
    """The split-K exchange, in which each consumer has two barriers and a slot for the sums of each other
    split; and the staging area, if there is a TMA store and it has memory of its own, with the slots in which the store
    warp publishes the next tile for two consumers."""
    c, total = config, 0
    if c.cluster_k > 1:
        slot = slices(c) * c.block_n // c.cluster_k * 256
        total += c.num_consumers * ((c.cluster_k - 1) * slot + BARRIER_BYTES)
    if tma_store and c.persistent:
        total += c.block_m * c.block_n * 2 // c.cluster_k + (16 if c.num_consumers == 2 else 0)
    return total
