"""The template for 16-bit operands, BF16 or FP16 (b16, as in PTX): any layout, 16-bit or float32 output, C added, dense
and grouped; also with swap-AB tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ...arch import SM90, ArchSpec
from ...params import GemmConfig, KernelParams
from ...spec import SCALE_BLOCK, GemmSpec, ceil_div
from ..features import Costs
from ..gemm_features import PACKING
from ..groups import IN_TURN, LEAST_SEGMENTS, MOST_SUMS, memory_of_sums, parts, table_bytes
from ..template import BYTES
from . import offered
from .loads import left
from .template import BARRIER_BYTES, MAX_STAGES, ONE_ORDER, HopperTemplate, slices, stages_that_fit, wgmma_costs

CONSUMERS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Consumer warpgroups by the rows of a tile's sums. Only swap-AB tiles have three: others gained 0.1% with them over 86
shapes (H100)."""

CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4))
"""Cluster shapes: CTAs of a cluster along m, n and k."""

IN_PARTS = ((1, 1, 1),)
"""The same where K has parts. Clusters of two and of four, also along K, were slower in 15 of 18 sizes (H200)."""

_STAGES_IN_PARTS = 5
"""Stages of two consumers where K has parts. With more, CTAs that share rows drift apart until L2 has lost them: 4096
products of 256 x 256 x 256 took 302 us with seven stages and 268 with five (H200)."""

REGISTERS = {1: (40, 208), 2: (40, 232), 3: (32, 160)}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups."""

_MOST_SUMS = 96
"""Sums of a thread where there are three consumers. For 512 threads ptxas counts 128 registers each, although
consumers have more at run time, and refuses a product with more sums."""

_OTHER_REGISTERS = 32
"""Registers of a consumer thread besides sums and words to be stored. Measured with ptxas: with fewer it spills."""

_EPILOGUE_REGISTERS = 81
"""The same for swap-AB tiles with an epilogue."""

_F32_ELEMENT = 6.0
"""The cost of a float32 element of D, in 16-bit elements, beyond those that staging buffers hold. Fitted to ten
products of TN with C in place (H100): the choices are 3.8% faster than cuBLASLt, and 2.7% without."""

_SWAPPED_ELEMENT = 1.5
"""The cost of an element of D that is transposed, in elements that are not. With it the choices over 313 shapes lose
0.2% less (H100)."""

_K_GROUP_BUFFERS = 2
"""Staging buffers of a consumer where there are groups along K."""


class B16Gemm(HopperTemplate):
    """See ``templates/include/b16_gemm.cuh``. ``swap_ab``: consumers take the operands in the other order and
    transpose D. ``groups``: "m" and "k" for groups along M and K, "batch" and "sum" for several
    products of equal size."""

    file = "sm90_b16_gemm.cu.jinja"
    constant_names: ClassVar[tuple[str, ...]] = (
        "block_n",
        "cluster_m",
        "cluster_n",
        "cluster_k",
        "in_turn",
        "min_ctas",
        "element",
        "accumulate",
        "buffers",
        "grouping",
        "segments",
        "a_rows",
        "mn_major_a",
        "mn_major_b",
        "swapped",
        "late",
    )
    mma_instruction = "HGMMA"
    block_k = 64
    """Rows of 128 bytes, the widest swizzle of shared memory."""
    adds_in_memory = True

    def __init__(self, swap_ab: bool = False, groups: str = "") -> None:
        self.swap_ab, self.groups = swap_ab, groups
        self.adds_residuals = not swap_ab

    def rows_of_last_map_d(self, config: GemmConfig) -> int:
        return left(config.block_m, 64) if self.swap_ab else 0

    def make(  # type: ignore[override]
        self,
        family: str,
        block_m: int,
        block_n: int,
        cluster: tuple[int, int, int] = (1, 1, 1),
        ctas_per_sm: int = 1,
        parts: bool = False,
        in_turn: int = 1,
        arch: ArchSpec = SM90,
    ) -> GemmConfig:
        """A config with as many stages as fit beside the staging buffers."""
        consumers = CONSUMERS[block_n if self.swap_ab else block_m]
        config = GemmConfig(
            family,
            block_m,
            block_n,
            self.block_k,
            _STAGES_IN_PARTS if parts and consumers > 1 else MAX_STAGES,
            consumers,
            *cluster,
            ctas_per_sm=ctas_per_sm,
            swap_ab=self.swap_ab,
            parts=parts,
            in_turn=in_turn,
        )
        config = self._with_stages(config, self._bytes(config, not parts, "bf16"), arch)
        if self.groups == "k":  # float32 output, and the smallest table
            total = self._bytes(config, True, "f32", along_k=True)
            config = self._with_stages(config, total + table_bytes("k", LEAST_SEGMENTS), arch)
        return config

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles from 64x16 to 256x128 and 128x256, without clusters or in clusters of two or four, with one or two CTAs
        per SM. Swap-AB tiles have 64 to 256 rows of A and of B."""
        if self.swap_ab:
            return itertools.product(range(64, 257, 8), CONSUMERS, CLUSTERS)
        tiles = itertools.product(CONSUMERS, range(16, 257, 16), CLUSTERS, (1, 2))
        if self.groups != "sum":
            return tiles
        return itertools.chain(tiles, itertools.product(CONSUMERS, range(16, 257, 16), IN_PARTS, (1,), (True,)))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        step = 8 if self.swap_ab else 16
        if self.groups == "batch" and c.cluster_k > 1:
            return ONE_ORDER
        if c.in_turn > 1 and (self.groups or self.swap_ab or self.gated or c.cluster_k > 1 or c.in_turn not in IN_TURN):
            return f"it does not sum K in {c.in_turn} parts, one after the other"
        if self.groups in ("m", "k") and (c.cluster_size > 1 or c.ctas_per_sm > 1):
            return "it runs one CTA on an SM, without clusters"  # CTAs of a cluster would have to stay in one group
        if self.groups == "k" and c.block_n % 64:
            return f"block_n must be a multiple of 64, not {c.block_n}"
        if self.swap_ab and c.cluster_k > 1:
            return f"K cannot be split over {c.cluster_k} CTAs"
        if c.block_k != self.block_k:
            return f"block_k must be {self.block_k}, not {c.block_k}"
        if CONSUMERS.get(c.height) != c.num_consumers or (c.num_consumers > 2 and not self.swap_ab):
            return f"{c.height} rows of sums with {c.num_consumers} consumer warpgroups are not one of {CONSUMERS}"
        if c.width % step or not step <= c.width <= 256:
            return f"the width must be a multiple of {step} from {step} to 256, not {c.width}"
        clusters = IN_PARTS if c.parts else CLUSTERS
        if (c.cluster_m, c.cluster_n, c.cluster_k) not in clusters:
            return f"sharing a tile by {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {clusters}"
        if c.parts and (self.groups != "sum" or c.ctas_per_sm > 1):
            return "only sums of products have parts of K, with one CTA on an SM"
        if c.parts and c.block_m * c.block_n > MOST_SUMS:
            return f"a CTA would have more than {MOST_SUMS} sums of a part of K"
        if c.block_n % (16 * c.cluster_k):
            step = 16 * c.cluster_k
            return f"block_n must be a multiple of {step} where K is split over {c.cluster_k} CTAs, not {c.block_n}"
        if c.cluster_m * c.cluster_n > 1 and (c.block_m < 64 or c.block_n < 64):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        if c.block_m % (8 * c.cluster_n) or c.block_n % (8 * c.cluster_m):
            return "a CTA of a cluster loads whole atoms of the swizzle, which have eight rows"
        needed, has = sums(c) * (2 if c.in_turn > 1 else 1) + _OTHER_REGISTERS, REGISTERS[c.num_consumers][1]
        if needed > has:
            return f"{needed} registers a thread are more than {has}"
        if c.num_consumers == 3 and sums(c) > _MOST_SUMS:
            return f"three consumers have at most {_MOST_SUMS} sums a thread, not {sums(c)}"
        if c.num_consumers == 1 and c.width > 128:
            return f"a lone consumer multiplies at most 128 columns: {c.width} would leave it too few registers"
        if c.num_stages < 3:
            return f"{c.num_stages} stages are not three or more"
        if c.ctas_per_sm > 2 or (c.ctas_per_sm == 2 and c.num_consumers > 1):
            return f"{c.ctas_per_sm} CTAs with {c.num_consumers} consumers each leave too few registers a thread"
        shared = self._bytes(c, not c.parts, "bf16")
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """Not if a CTA would load a part of an MN-major operand that is not whole boxes of 64 rows, nor if a part of
        split K has no block. FP8 is written by CTAs that store all columns of a scale."""
        if spec.d.dtype == "e4m3" and self.box_columns(config, "e4m3") != SCALE_BLOCK:
            return False
        if config.parts and parts(config, spec) < 2:
            return False
        splits = config.cluster_k * config.consumers_k
        if (splits > 1 or not spec.k) and splits > ceil_div(spec.k, self.block_k):
            return False
        if spec.b.major == "mn" and config.block_n % (64 * config.cluster_m):
            return False
        return spec.a.major == "k" or config.block_m % (64 * config.cluster_n) == 0

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        return offered.of_16_bits(spec, configs)

    def yields(self, config: GemmConfig) -> bool:
        """Beside the same tile of another family, a swap-AB tile of many rows only transposes D as well."""
        return config.swap_ab

    def memory_bytes(self, spec: GemmSpec) -> int:
        return memory_of_sums(spec) if self.groups == "sum" else 0

    def finishes(self, config: GemmConfig) -> bool:
        """Swap-AB tiles have more sums than others, and so have wide ones with parts of K in turn."""
        if config.in_turn > 1:
            return 2 * sums(config) + 2 * _OTHER_REGISTERS <= REGISTERS[config.num_consumers][1]
        registers = sums(config) + _EPILOGUE_REGISTERS
        return not config.swap_ab or registers <= REGISTERS[config.num_consumers][1]

    def fitted(self, params: KernelParams, table: int, arch: ArchSpec) -> GemmConfig:
        config = self._with_stages(params.gemm, self._bytes(params.gemm, not params.gemm.parts, params.output), arch)
        if not self.groups:
            return config
        return self._with_stages(config, self.shared_bytes(replace(params, config=config)) + table, arch)

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        return REGISTERS[config.num_consumers]

    def min_ctas(self, config: GemmConfig) -> int:
        return config.ctas_per_sm if config.num_consumers > 1 else 2

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        """With groups along K elements of D cost what 16-bit ones do. Without groups there are 128x128 tiles in pairs
        for few blocks of K; with them they would be alone, and 128x256 tiles take 10% less time."""
        wide = output == "f32" and self.groups != "k"
        return wgmma_costs(
            config,
            aligned=aligned,
            store_warp=aligned,
            promotion=0.0,
            stored_row=self.box_columns(config, output) * BYTES[output],
            element=_SWAPPED_ELEMENT if self.swap_ab else _F32_ELEMENT if wide else 1.0,
            buffered=self._staging_buffers(config, "f32") * self._staging_bytes(config, "f32") // 4
            if wide and aligned
            else 0,
            hides_epilogue=aligned and _stores_late(config, output),
        )

    def staging(self, params: KernelParams) -> tuple[int, bool]:
        if self.groups == "k":
            return _K_GROUP_BUFFERS, False
        return self._staging_buffers(params.gemm, params.output), _stores_late(params.gemm, params.output)

    def shared_bytes(self, params: KernelParams) -> int:
        """In the layout of ``B16GemmLayout``, which asserts the same number."""
        return self._bytes(params.gemm, params.store == "tma", params.output, along_k=self.groups == "k")

    def clusters(self, config: GemmConfig, tiles: int, slots: int) -> int:
        return tiles if tiles <= slots else max(1, int(slots * PACKING[config.cluster_size]))

    def _bytes(self, config: GemmConfig, tma_store: bool, output: str, along_k: bool = False) -> int:
        """Stages, staging buffers of each consumer, and the split-K exchange, in which each consumer has two barriers
        and a slot for the sums of each other split."""
        total = config.num_stages * _stage_bytes(config)
        if tma_store:
            buffers = _K_GROUP_BUFFERS if along_k else self._staging_buffers(config, output)
            total += buffers * self._staging_bytes(config, output)
        if config.cluster_k > 1:
            slot = slices(config) * config.width // config.cluster_k * 256
            total += config.num_consumers * ((config.cluster_k - 1) * slot + BARRIER_BYTES)
        return total

    def _with_stages(self, config: GemmConfig, total: int, arch: ArchSpec) -> GemmConfig:
        """``config`` with no more stages than fit, where with its stages it takes ``total`` bytes."""
        stage = _stage_bytes(config)
        stages = stages_that_fit(arch, config, total - config.num_stages * stage, stage)
        return config if stages == config.num_stages else config.changed(stages)

    def box_columns(self, config: GemmConfig, output: str) -> int:
        """Columns of one staged part of a tile: rows of 128 bytes if the columns that one CTA stores, or with swap-AB
        an m64 slice, allow that."""
        stored = 64 if config.swap_ab else config.block_n // config.cluster_k // (2 if self.gated else 1)
        widest = 128 // BYTES[output]
        if stored % widest == 0:
            return widest
        return 32 if stored % 32 == 0 else 16

    def _staging_buffers(self, config: GemmConfig, output: str) -> int:
        """Staging buffers of a consumer. One if tiles are staged late. Otherwise two, because consumers wait for a free
        buffer; but one where only that leaves room for a fourth stage, and for three consumers, since there are four
        named barriers."""
        if _stores_late(config, output) or config.num_consumers == 3:
            return 1
        room = SM90.shared_per_cta - 4 * _stage_bytes(config)
        return 1 if config.cluster_k == 1 and room < 2 * self._staging_bytes(config, output) <= 2 * room else 2

    def _staging_bytes(self, config: GemmConfig, output: str) -> int:
        """Bytes of one staging buffer of each consumer: 64 rows of a box."""
        return config.num_consumers * 64 * self.box_columns(config, output) * BYTES[output]


def sums(config: GemmConfig) -> int:
    """Registers of a consumer thread that hold sums."""
    height, width = (config.block_n, config.block_m) if config.swap_ab else (config.block_m, config.block_n)
    return height // (64 * config.num_consumers // config.consumers_k) * width // 2


def _stage_bytes(config: GemmConfig) -> int:
    return (config.block_m + config.block_n) * 2 * B16Gemm.block_k + BARRIER_BYTES


def _stores_late(config: GemmConfig, output: str) -> bool:
    """Whether tiles are staged while the next tile's products run: that needs 16-bit elements, no split K, and enough
    registers."""
    registers = sums(config) * (5 if config.in_turn > 1 else 3) // 2 + _OTHER_REGISTERS
    return output != "f32" and config.cluster_k == 1 and registers <= REGISTERS[config.num_consumers][1]
