"""The template for FP8 with any scaling, output and C, dense and grouped. Tiles are staged in parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ...arch import SM90, ArchSpec
from ...params import GemmConfig, KernelParams
from ...spec import SCALE_BLOCK, GemmSpec, align
from ..features import Costs
from ..template import BYTES
from . import offered
from .fp8_gemm import CONSUMERS, accumulators
from .template import BARRIER_BYTES, MAX_STAGES, PROMOTION_CYCLES, HopperTemplate, slices, wgmma_costs

CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""CTAs of a cluster along m and n."""

REGISTERS = {1: (40, 208), 2: (40, 232)}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups. Producers with 24 spill."""

_ALL_REGISTERS = 255
"""Of a thread, if no CTA shares the SM, and producers have as many."""

PROMOTION = {"1d1d": 2 * PROMOTION_CYCLES, "1d2d": PROMOTION_CYCLES, "rowwise": PROMOTION_CYCLES, "none": 0.0}
"""Cycles in which a consumer promotes one column of an m64 slice. With 1D1D each element is multiplied twice."""

_BUSY = {1: 0.94, 2: 1.4}
"""With 1D1D: cycles for each column of an m64 slice in which shared memory delivers scales of B to registers, and not
operands to the tensor cores; by the sets of partial sums. On 32 SMs of an H200, where power does not limit, 128x128
blocks took 630 cycles when promotion read nothing, 870 with one set, and 912 with two. On all SMs two sets are slower
still; this number is about the least with which the model chooses what was fastest, on an H200 and on an H100."""

_OTHER_REGISTERS = 22
_OTHER_REGISTERS_PER_SLICE = 4
_OTHER_REGISTERS_OF_PARTS = 8
_OTHER_REGISTERS_OF_WIDE = 6
_1D1D_REGISTERS = 9
_ROWWISE_REGISTERS, _DIRECT_REGISTERS, _C_REGISTERS = 6, 16, 10
"""Registers of a consumer thread besides accumulators: always; for each m64 slice; if a slice is multiplied in two
parts; if it is multiplied in one part of more than 128 columns; and for each slice if consumers multiply products by
scales of B, read scales of rows, write D themselves, or read C. Measured with ptxas: with fewer registers it spills."""


class Fp8Scaled(HopperTemplate):
    """See ``templates/include/fp8_scaled.cuh``. ``groups``: "m" and "k" for groups along M and K, "batch" for several
    products of equal size, "heads" for columns of D that are left out."""

    file = "sm90_fp8_scaled.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = (
        "block_n",
        "cluster_m",
        "cluster_n",
        "num_partials",
        "turns",
        "min_ctas",
        "scaling",
        "element",
        "accumulate",
        "buffers",
        "grouping",
        "segments",
        "a_rows",
    )
    mma_instruction = "QGMMA"
    block_k = SCALE_BLOCK
    names_partials = True
    adds_in_memory = True

    def __init__(self, groups: str = "") -> None:
        self.groups = groups

    def make(  # type: ignore[override]
        self,
        family: str,
        block_m: int,
        block_n: int,
        cluster: tuple[int, int] = (1, 1),
        buffers: int = 2,
        partials: int | None = None,
        arch: ArchSpec = SM90,
    ) -> GemmConfig:
        """If ``partials`` is None, the config has two sets of partial sums if they fit in registers."""
        one = GemmConfig(
            family,
            block_m,
            block_n,
            self.block_k,
            MAX_STAGES,
            CONSUMERS[block_m],
            *cluster,
            buffers=buffers,
            num_partials=1,
        )
        two = one.changed(one.num_stages, 2)
        if partials is None:
            partials = 2 if slices(two) <= 2 and enough_registers(two, block_n) else 1
        return self._fitted(two if partials == 2 else one, "1d1d", "f32", arch)

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles from 64x32 to 256x128 and 128x256, without clusters or in clusters of two, with one set of partial sums
        or two; with one staging buffer where that leaves room for another stage."""
        for block_m, block_n, cluster in itertools.product(CONSUMERS, range(32, 257, 16), CLUSTERS):
            if self.groups in ("batch", "heads") and block_n & (block_n - 1):
                continue  # these tiles hold whole blocks of B's scales
            if self.groups == "m" and (block_n % 32 or block_n // (block_n & -block_n) > 5):
                continue  # each piece of a power of two columns has a scale of B
            for partials in (1, 2):
                one, two = ((block_m, block_n, cluster, buffers, partials) for buffers in (1, 2))
                yield two
                if self.make("", *one).num_stages > self.make("", *two).num_stages:
                    yield one

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        if self.groups in ("m", "k"):
            if c.cluster_size > 1:
                return "it runs without clusters"  # whose CTAs would have to stay in one group
            if self.groups == "m" and c.num_consumers > 1 and c.num_partials > 1:
                return "two consumers have one set of partial sums"
            if self.groups == "k" and c.block_n % 64:
                return f"block_n must be a multiple of 64, not {c.block_n}"
        if c.block_k != self.block_k:
            return f"block_k must be {self.block_k}, not {c.block_k}"
        if CONSUMERS.get(c.block_m) != c.num_consumers:
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {CONSUMERS}"
        if c.block_n % 16 or not 32 <= c.block_n <= 256:
            return f"block_n must be a multiple of 16 from 32 to 256, not {c.block_n}"
        if (c.cluster_m, c.cluster_n) not in CLUSTERS or c.cluster_k != 1:
            return f"a cluster of {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {CLUSTERS}"
        if c.cluster_size > 1 and (c.block_m < 128 or c.block_n < 128):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        if c.buffers not in (1, 2):
            return f"parts are staged in one buffer or in two, not in {c.buffers}"
        columns = mma_n(c)
        units = slices(c) * c.block_n // columns
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if c.num_consumers == 1 and columns < c.block_n and not self.gated:
            return f"a lone consumer would multiply {c.block_n} columns in two parts"
        if columns % 16:
            return f"instructions of {columns} columns do not end on a part of 16 columns"
        if not enough_registers(c, columns):
            return f"{accumulators(c, columns)} accumulators leave a consumer thread too few registers"
        if c.num_stages < 2:
            return f"{c.num_stages} stages are not two or more"
        if c.ctas_per_sm != 1:
            return f"{c.ctas_per_sm} CTAs on an SM are not one"
        shared = self._config_bytes(c, True, "1d1d", "f32")
        if not arch.ctas_fit(shared, 1):
            return f"{shared} bytes of shared memory do not fit on one SM"
        return None

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """Not if a block of B's scales ends inside a tile, except for those of 256 columns, nor with too few
        registers. FP8 is written by consumers that complete all columns of a scale at once; with scales of rows, those
        of more columns have too few registers."""
        if scaling == "1d2d" and config.block_n & (config.block_n - 1) and self.groups != "m":
            return False
        if spec.d.dtype == "e4m3":
            wide = scaling == "rowwise" and config.block_n > SCALE_BLOCK
            if wide or self.box_columns(config, "e4m3") != SCALE_BLOCK:
                return False
        return enough_registers(config, mma_n(config), more_registers(scaling, adds_c, spec.d.aligned))

    def fitted(self, params: KernelParams, table: int, arch: ArchSpec) -> GemmConfig:
        config = self._fitted(params.gemm, params.scaling, params.output, arch)
        if not self.groups:
            return config
        return self._fitted(config, params.scaling, params.output, arch, table, params.store == "tma")

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        return offered.of_fp8(spec, configs)

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        return (0, 0) if _is_wide_and_alone(config) else REGISTERS[config.num_consumers]

    def min_ctas(self, config: GemmConfig) -> int:
        return 1 if config.num_consumers > 1 or _is_wide_and_alone(config) else 2

    def mma_n(self, config: GemmConfig) -> int:
        return mma_n(config)

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        return wgmma_costs(
            *(config, mma_n(config)),
            aligned=aligned,
            store_warp=aligned,
            promotion=PROMOTION[scaling],
            busy=_BUSY[config.num_partials] if scaling == "1d1d" else 0.0,
        )

    def box_columns(self, config: GemmConfig, output: str) -> int:
        """The most columns that divide those of a wgmma, and those of D, and have up to 128 bytes."""
        columns, widest = min(mma_n(config), self.columns_of_d(config.block_n)), 128 // BYTES[output]
        return next((x for x in (widest, 32) if columns % x == 0), 16)

    def shared_bytes(self, params: KernelParams) -> int:
        """In the layout of ``Fp8ScaledLayout``, which asserts the same number."""
        return self._config_bytes(params.gemm, params.store == "tma", params.scaling, params.output)

    def _fitted(
        self,
        config: GemmConfig,
        scaling: str,
        output: str,
        arch: ArchSpec = SM90,
        rest: int = 0,
        tma_store: bool = True,
    ) -> GemmConfig:
        """``config`` with no more stages than fit beside the scales and staging buffers for this scaling and output,
        and beside ``rest`` bytes."""
        none, one = (self._config_bytes(config.changed(x), tma_store, scaling, output) for x in (0, 1))
        stages = (arch.shared_per_cta - none - rest) // (one - none)
        return config.changed(max(0, min(config.num_stages, stages)))

    def _config_bytes(self, config: GemmConfig, tma_store: bool, scaling: str, output: str) -> int:
        """Stages with their scales, and the staging buffers of each consumer. B's scales have twice as many slots as
        there are stages."""
        stage = (config.block_m + config.block_n) * SCALE_BLOCK + BARRIER_BYTES
        if scaling != "rowwise":
            stage += align(config.block_m * 4, 128)
        if scaling == "1d1d":
            stage += 2 * align(config.block_n * 4, 128)
        staging = config.num_consumers * config.buffers * 64 * self.box_columns(config, output) * BYTES[output]
        return config.num_stages * stage + (staging if tma_store else 0)


def mma_n(config: GemmConfig) -> int:
    """Columns of one wgmma: all of the tile's, or half of them if the accumulators would not fit beside the sums."""
    return config.block_n if enough_registers(config, config.block_n) else config.block_n // 2


def enough_registers(config: GemmConfig, columns: int, more: int = 0) -> bool:
    """Whether instructions of ``columns`` columns, and ``more`` registers for each slice, fit in a consumer thread's
    registers."""
    others = _OTHER_REGISTERS + slices(config) * (_OTHER_REGISTERS_PER_SLICE + more)
    others += _OTHER_REGISTERS_OF_PARTS if columns < config.block_n else 0
    others += _OTHER_REGISTERS_OF_WIDE if columns > 128 else 0
    most = _ALL_REGISTERS if _is_wide_and_alone(config) else REGISTERS[config.num_consumers][1]
    return accumulators(config, columns) + others <= most


def _is_wide_and_alone(config: GemmConfig) -> bool:
    """Whether one consumer has 256 columns, which takes more registers than half of an SM has for it."""
    return config.num_consumers == 1 and config.block_n == 256


def more_registers(scaling: str, adds_c: str, tma_store: bool) -> int:
    """Additional registers for each slice, if consumers do more than add products up and stage the sums."""
    rowwise = _ROWWISE_REGISTERS if scaling == "rowwise" else 0
    products = _1D1D_REGISTERS if scaling == "1d1d" else 0
    return products + max(rowwise, 0 if tma_store else _DIRECT_REGISTERS, _C_REGISTERS if adds_c == "threads" else 0)
