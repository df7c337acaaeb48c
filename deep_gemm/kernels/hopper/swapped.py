"""The templates for few rows of A, with swap-AB tiles of 64 rows of B: rows of B are the M of wgmma, tokens its N."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ...arch import SM90, ArchSpec
from ...params import GemmConfig, KernelParams
from ...spec import GemmSpec, align, ceil_div
from ..features import Costs
from . import offered
from .edges import EdgeBoxes
from .fp8_scaled import PROMOTION
from .template import BARRIER_BYTES, ONE_ORDER, HopperTemplate, stages_that_fit, wgmma_costs

TOKENS = (8, 16, 24, 32, 48, 64)
"""Tile sizes along M. Any multiple of 8 is possible."""

WEIGHTS = 64
"""Rows of B in a tile. With FP8, tiles of 32, 128 and 256 rows gained less than 0.1% over 216 surveyed rows (H100)."""

MAX_STAGES = 24
"""Stages at most. Only the smallest tiles could have more."""

_CONSUMERS_K = (1, 2)
_CLUSTERS_K = (1, 2, 4, 8)

_OTHER_REGISTERS = 32
_OTHER_REGISTERS_OF_CLUSTERS = 4
"""With FP8, registers of a consumer thread besides accumulators and scales, and additional ones in clusters of four or
more. Measured with ptxas: with fewer registers it spills, or moves descriptors in each block."""


class Swapped(HopperTemplate):
    """What the three templates share. Registers of FP8 also hold partial sums and scales of tokens."""

    constant_names: ClassVar[tuple[str, ...]] = ("cluster_k", "min_ctas", "scaling", "element", "accumulate")
    mma_instruction = "QGMMA"
    block_k = 128
    names_consumers_k = True
    num_partials = 2

    def make(  # type: ignore[override]
        self,
        family: str,
        block_m: int,
        cluster_k: int = 1,
        consumers_k: int = 1,
        ctas_per_sm: int = 1,
        arch: ArchSpec = SM90,
    ) -> GemmConfig:
        """A config with as many stages as fit beside the staging area and the slots of the split-K exchange."""
        config = GemmConfig(
            family,
            block_m,
            WEIGHTS,
            self.block_k,
            MAX_STAGES,
            consumers_k,
            cluster_k=cluster_k,
            ctas_per_sm=ctas_per_sm,
            swap_ab=True,
            consumers_k=consumers_k,
            num_partials=self.num_partials,
        )
        stages = stages_that_fit(arch, config, self._fixed_bytes(config, True), self._stage_bytes(config, "1d2d"))
        return config.changed(stages // consumers_k * consumers_k)

    def tiles(self) -> Iterator[tuple[object, ...]]:
        return itertools.product(TOKENS, _CLUSTERS_K, _CONSUMERS_K, (1, 2))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        if c.num_partials != self.num_partials:
            return f"there is no schedule for {c.num_partials} sets of partial sums"
        if (needed := needed_registers(c)) > (has := self.registers(c)[1]):
            return f"{needed} registers a thread are more than {has}"
        if (c.block_n, c.block_k) != (WEIGHTS, self.block_k):
            return f"block_n and block_k must be {WEIGHTS} and {self.block_k}, not {c.block_n} and {c.block_k}"
        if (c.cluster_m, c.cluster_n) != (1, 1) or c.cluster_k not in _CLUSTERS_K or c.consumers_k not in _CONSUMERS_K:
            given = f"{c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs and {c.consumers_k} consumers along K"
            return f"sharing a tile by {given} is not 1 x 1 x one of {_CLUSTERS_K} and one of {_CONSUMERS_K}"
        if c.num_consumers != c.consumers_k:
            return f"num_consumers must be consumers_k, {c.consumers_k}, not {c.num_consumers}"
        if c.block_m % 8 or not 8 <= c.block_m <= TOKENS[-1]:
            return f"block_m must be a multiple of 8 from 8 to {TOKENS[-1]}, not {c.block_m}"
        if c.k_splits > 8:
            return f"K can be split into 8 parts at most, not {c.k_splits}"
        if c.num_stages < 2 * c.consumers_k or c.num_stages % c.consumers_k:
            return f"{c.num_stages} stages are not two or more for each of {c.consumers_k} consumers along K"
        if c.ctas_per_sm not in (1, 2):
            return f"{c.ctas_per_sm} CTAs on an SM: registers are budgeted for one or two"
        shared = self._bytes(c, staged=True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        if config.num_consumers == 1:
            return 40, 216
        return (40, 232) if config.ctas_per_sm == 1 else (32, 104)

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        """Tokens are the columns of wgmma, and the epilogue transposes D."""
        return wgmma_costs(
            *(config, config.block_m), aligned=aligned, store_warp=False, few_rows=True, promotion=PROMOTION[scaling]
        )

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """Each part of K of a 16-bit product needs at least one block."""
        return self.mma_instruction == "QGMMA" or config.k_splits <= ceil_div(spec.k, self.block_k)

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        sizes = {row[0] for row in serving}
        if configs and self.parts_of_k(spec) > 1:  # heights differ with the number of parts
            sizes = {c.block_m for c in configs}
        return offered.of_few_rows(spec, configs, tuple(sorted(sizes)))

    def shipped(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> Sequence[GemmConfig]:
        """All that fit, since each M has a choice of its own."""
        return configs

    def stores_by_tma(self, params: KernelParams) -> bool:
        """D is transposed in shared memory, and then warps copy it, 16 bytes at a time."""
        return False

    def shared_bytes(self, params: KernelParams) -> int:
        """In the layout of the device code, which asserts the same number."""
        staged = params.store == "tma" and params.output != "f32"
        return self._bytes(params.gemm, staged, params.scaling)

    def _stage_bytes(self, config: GemmConfig, scaling: str) -> int:
        """A tile of A, a tile of B, barriers, and A's scales of 1x128, which TMA writes to 128-byte boundaries."""
        scales = align(config.block_m * 4, 128) if scaling == "1d2d" else 0
        return (config.block_m + config.block_n) * 128 + scales + BARRIER_BYTES

    def _bytes(self, config: GemmConfig, staged: bool, scaling: str = "1d2d") -> int:
        """Stages and `_fixed_bytes`."""
        return config.num_stages * self._stage_bytes(config, scaling) + self._fixed_bytes(config, staged)

    def _fixed_bytes(self, config: GemmConfig, staged: bool) -> int:
        """A staging area of each consumer, if tiles are staged; and the split-K exchange, in which each consumer has
        two barriers and a slot for the sums of each other split."""
        splits = config.k_splits
        chunks = ceil_div(config.block_m // 8, splits)  # of eight tokens, whose sums one split stores
        exchange = (splits - 1) * chunks * 2048 + BARRIER_BYTES if splits > 1 else 0
        return config.num_consumers * (exchange + (chunks * 1024 if staged else 0))


class Fp8Swapped(EdgeBoxes, Swapped):
    """1x128 by 128x128 scales, with edge boxes, and bf16 output. See ``templates/include/fp8_scaled_swapped.cuh``."""

    file = "sm90_fp8_swapped.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = ("cluster_k", "min_ctas")
    names_partials = True
    field_of_map_b = ""


class Fp8ScaledSwapped(Swapped):
    """Any scaling but 1D1D. See ``templates/include/fp8_scaled_swapped.cuh``. ``batched``: several products of equal
    size."""

    file = "sm90_fp8_scaled_swapped.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = (*Swapped.constant_names, "grouping")

    def __init__(self, batched: bool = False) -> None:
        self.batched = batched

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        if self.batched and config.k_splits > 1:
            return ONE_ORDER
        return super().illegal(config, arch)


class B16Swapped(Swapped):
    """16-bit operands. See ``templates/include/b16_swapped.cuh``."""

    file = "sm90_b16_swapped.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = ("cluster_k", "min_ctas", "element", "accumulate", "mn_major_b")
    mma_instruction = "HGMMA"
    block_k = 64
    num_partials = 0

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        """The sums of 64 tokens take 32 registers."""
        return (40, 208) if config.num_consumers == 1 else super().registers(config)

    def _stage_bytes(self, config: GemmConfig, scaling: str) -> int:
        return super()._stage_bytes(config, "none")


def needed_registers(config: GemmConfig) -> int:
    """Registers of a consumer thread of FP8: sums, two sets of partial sums, and the token scales of this and the next
    block. 16-bit kernels need less than they have."""
    if not config.num_partials:
        return 0
    accumulators = config.block_m // 2 + config.num_partials * config.block_m // 2
    others = _OTHER_REGISTERS + (_OTHER_REGISTERS_OF_CLUSTERS if config.cluster_k > 2 else 0)
    return accumulators + 2 * config.block_m // 4 + others
