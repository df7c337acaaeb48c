"""What templates for Hopper share: one warpgroup loads operands by TMA, and the others multiply them by wgmma."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ...arch import ArchSpec
from ...jit.binary import PostPass
from ...jit.driver.launch import Map
from ...params import GemmConfig, KernelParams
from ...settings import settings
from ...spec import GemmSpec, Operand, ceil_div
from .. import groups
from ..base import Argument, Numbers, Strides, Value
from ..features import Costs
from ..gemm_features import LINE_BYTES
from ..template import BYTES, Constants, Grid, Template
from . import ffma_bursts, launch, offered
from .launch import Boxes
from .loads import left, operand_maps

BARRIER_BYTES = 16
"""Bytes of a stage's full and empty mbarriers."""

MAX_STAGES = 16

ONE_ORDER = "it sums K in one order, without splits"
"""Why a batch refuses a config."""

_CONSTANTS = {
    "1d1d": "k1D1D",
    "1d2d": "k1D2D",
    "rowwise": "kRowwise",
    "bf16": "kBf16",
    "f16": "kF16",
    "f32": "kF32",
    "e4m3": "kE4m3",
    "threads": "kReads",
    "tma": "kReduces",
    "contiguous": "kIndex",
    "psum": "kPsum",
    "masked": "kMasked",
    "k": "kAlongK",
    "batched": "kBatched",
    "summed": "kSummed",
    "summed in parts": "kSummedInParts",
    "heads": "kHeads",
}
"""In device code: scalings, elements of D, ways to add C, and forms of groups."""


class HopperTemplate(Template):
    """A template with a producer warpgroup and ``num_consumers`` consumer warpgroups."""

    takes_epilogues = starts_early = True
    constant_names: ClassVar[tuple[str, ...]]
    """The constants that it has, besides those that all templates for Hopper have; see `constants`."""

    def unreadable(self, name: str, operand: Operand) -> str | None:
        return None if operand.aligned else f"{super().unreadable(name, operand)} for TMA"

    def num_threads(self, config: GemmConfig) -> int:
        return 128 * (config.num_consumers + 1)

    def speeds(self, spec: GemmSpec) -> str:
        """Products for which there are swap-AB tiles of any height have speeds of their own: with those of FP8 the
        choices there are 1.5% worse."""
        return "of 16-bit tiles" if offered.has_swap_ab_tiles(spec) else ""

    def shipped(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> Sequence[GemmConfig]:
        if spec.grouping in groups.ALONG_M:
            return offered.of_groups(spec, configs)
        return super().shipped(spec, configs, serving)

    def parts_of_k(self, spec: GemmSpec) -> int:
        return groups.parts_of_k(spec)

    @abstractmethod
    def registers(self, config: GemmConfig) -> tuple[int, int]:
        """(producer, consumer) registers a thread, for setmaxnreg."""

    def min_ctas(self, config: GemmConfig) -> int:
        """CTAs on an SM for which the compiler budgets registers. Most CTAs with one consumer get half of an SM's
        registers, even if only one CTA runs on the SM: that is enough."""
        return 2 if config.num_consumers == 1 else config.ctas_per_sm

    def mma_n(self, config: GemmConfig) -> int:
        """Columns of one wgmma."""
        return config.width

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        return launch.arguments(params, self)

    def constants(self, params: KernelParams, given: Constants) -> Constants:
        p, c = params, params.gemm
        producer, consumer = self.registers(c)
        majors = p.majors[::-1] if c.swap_ab else p.majors  # of the operands of wgmma
        buffers, late = self.staging(p)
        steps = {"k": "kStepKMajor", "mn": "kStepMnMajor"}
        own: dict[str, str | int | bool] = {
            "block_n": c.block_n,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "cluster_k": c.cluster_k,
            "num_partials": c.num_partials,
            "turns": turns(c),
            "in_turn": c.in_turn,
            "persistent": c.persistent,
            "min_ctas": self.min_ctas(c),
            "scaling": _CONSTANTS.get(p.scaling, ""),
            "element": _CONSTANTS[p.output],
            "accumulate": _CONSTANTS.get(p.adds_c, "kNothing"),
            "buffers": buffers,
            "late": late,
            "swapped": c.swap_ab,
            "mn_major_a": p.majors[0] == "mn",
            "mn_major_b": p.majors[1] == "mn",
            "grouping": _CONSTANTS.get(f"{p.grouping} in parts" if c.parts else p.grouping, "kUngrouped"),
            "segments": p.segments,
            "a_rows": groups.a_rows(p.grouping, p.dtype, c),
        }
        return {
            "block_m": c.block_m,
            "num_stages": c.num_stages,
            "num_consumers": c.num_consumers,
            "num_threads": self.num_threads(c),
            "producer_registers": producer,
            "consumer_registers": consumer,
            **{f"shape_{letter}": size for letter, size in zip("mnk", p.shape, strict=True)},
            "tma_store": p.store == "tma",
            "mma_n": self.mma_n(c),
            "mma_types": mma_types(p.dtype, c.swap_ab),
            "mma_majors": "" if p.scaling != "none" else "".join(f", {int(major == 'mn')}" for major in majors),
            "step_a": steps[majors[0]],
            "step_b": steps[majors[1]],
            **{name: own[name] for name in self.constant_names},
            **given,
        }

    def has_runs(self, params: KernelParams) -> bool:
        """Whether promotion multiplies runs of sums by one factor, whose FFMAs are edited. 1D1D has no such runs, and
        scales of rows are multiplied in the epilogue."""
        return params.scaling == "1d2d"

    def post_pass(self, params: KernelParams) -> PostPass | None:
        """FFMA bursts in promotion, unless DG_FFMA_BURSTS is off."""
        if not (self.has_runs(params) and settings.ffma_bursts):
            return None
        return ffma_bursts.POST_PASS

    # ---- a launch

    def launch(
        self, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
    ) -> tuple[Grid, dict[str, Value]]:
        return launch.launch(self, params, spec, strides, numbers, early)

    def stores_by_tma(self, params: KernelParams) -> bool:
        """Whether TMA stores tiles to D, instead of the warps that staged or multiplied them."""
        return params.store == "tma" and params.gemm.persistent

    def has_map_d(self, params: KernelParams) -> bool:
        """Whether there is a parameter for a tensor map of D."""
        return self.stores_by_tma(params)

    def rows_of_last_map_d(self, config: GemmConfig) -> int:
        """Rows of the boxes of a second map of D, for the last rows of a tile; 0 if there is none."""
        return 0

    def box_columns(self, config: GemmConfig, output: str) -> int:
        """Columns of one box of staged sums."""
        raise NotImplementedError(f"{self.file} stores no tiles by TMA")

    def staging(self, params: KernelParams) -> tuple[int, bool]:
        """Staging buffers of a consumer, and whether a tile is stored while the next tile's products run."""
        return params.gemm.buffers, False

    def last_rows(self, config: GemmConfig, m: int) -> int:
        """Rows of A that are loaded for the last row of tiles."""
        return left(m, config.block_m)

    def maps_of_b(self, params: KernelParams, spec: GemmSpec, strides: Strides) -> tuple[list[Map], Map, int]:
        """The tensor maps of B without groups, that of its edge box, and the rows of the edge box, or ``block_n`` if no
        box crosses the edge."""
        c = params.gemm
        if self.gated:
            map_b, map_b_last = launch.gated_maps(self, params, spec, spec.n, strides)
            return [map_b], map_b_last, c.block_n
        columns, boxes = left(spec.n, c.block_n), launch.boxes(spec, spec.b, "b", strides)
        map_b, map_b_last = operand_maps(boxes, "b", spec.n, c.block_n // c.cluster_m, columns)
        return [map_b], map_b_last, columns

    def maps_of_scales(self, boxes: Boxes, config: GemmConfig, m: int) -> dict[str, Value]:
        """The tensor maps of A's scales of 1x128, where B's are of 128x128."""
        return {"map_scale_a": Map(boxes(config.block_m), "sfa")}

    def num_ctas(self, config: GemmConfig, m: int, n: int, num_sms: int) -> int:
        """Grid size: as many CTAs as can be resident, or fewer if there are fewer tiles, in whole clusters; one CTA for
        each tile if not persistent."""
        c = config
        tiles = ceil_div(m, c.block_m * c.cluster_m) * ceil_div(n, c.block_n * c.cluster_n)
        slots = max(1, num_sms * c.ctas_per_sm // c.cluster_size)
        return (self.clusters(c, tiles, slots) if c.persistent else tiles) * c.cluster_size

    def clusters(self, config: GemmConfig, tiles: int, slots: int) -> int:
        """Clusters of a persistent launch, where ``slots`` can be resident."""
        return min(tiles, slots)


def mma_types(dtype: str, swap_ab: bool) -> str:
    """K of one wgmma, and the dtypes of its sums and operands, for A and B of ``dtype`` (see `GemmSpec.dtypes`)."""
    a, _, b = dtype.partition("_")
    operands = (b or a, a) if swap_ab else (a, b or a)
    return ".".join((f"k{32 // BYTES[a]}", "f32", *operands))


def stages_that_fit(arch: ArchSpec, config: GemmConfig, rest: int, stage: int) -> int:
    """The number of stages of ``stage`` bytes that fit beside ``rest`` bytes, at most those of ``config``."""
    budget = min(arch.shared_per_cta, arch.shared_per_sm // config.ctas_per_sm - arch.shared_reserved_per_cta)
    return max(0, min(config.num_stages, (budget - rest) // stage))


def turns(config: GemmConfig) -> int:
    """The number of consumers that start products in turn, or 1 if they do not. Without turns all consumers promote at
    the same time, and the tensor cores idle: with turns, M = N = 4096, K = 7168 took 190 instead of 215 us with 128x192
    tiles and 170.8 instead of 172.4 us with 256x128 (H200). Configs that issue products ahead became slower with
    turns."""
    return config.num_consumers if config.num_partials == config.k_splits == 1 else 1


# ---- costs, in the units of the performance model

LEAST_CYCLES = 8.0
"""The least cycles of a wgmma, however narrow."""

PROMOTION_CYCLES = 0.5
"""Cycles for the promotion of one column of an m64 slice."""

TOKEN_CYCLES = 5.8
"""Cycles for reading and multiplying one token's scale in tiles for few rows, where each column has its own scale."""

PROLOGUE_US = 0.16
"""Extra microseconds of a launch, compared with one for few rows."""

DIRECT_ELEMENTS = 10.0
"""The cost of an element that is stored by itself, in elements that TMA stores."""


def slices(config: GemmConfig) -> int:
    """m64 slices of rows that one consumer multiplies."""
    return config.height // (64 * config.num_consumers // config.consumers_k)


def wgmma_costs(
    config: GemmConfig,
    mma_n: int = 0,
    *,
    aligned: bool,
    store_warp: bool,
    few_rows: bool = False,
    promotion: float = PROMOTION_CYCLES,
    busy: float = 0.0,
    stored_row: int = LINE_BYTES,
    element: float = 1.0,
    buffered: int = 0,
    hides_epilogue: bool = True,
) -> Costs:
    """The costs of ``config``, whose wgmma have ``mma_n`` columns; 0: all of a tile.

    Args:
        aligned: TMA stores D, in rows of ``stored_row`` bytes. A shorter row takes as long as one of 128 bytes.
        few_rows: tiles for few rows of A, whose epilogue transposes D.
        promotion: cycles in which a consumer promotes one column of an m64 slice; 0 if it does not.
        busy: cycles for each column of an m64 slice in which shared memory serves promotion and cannot feed products.
        element: the cost of an element that TMA stores.
    """
    height, width = config.block_m, config.block_n
    if config.swap_ab:
        height, width = width, height
    mma_n = mma_n or width
    rows = height // (64 * config.num_consumers // config.consumers_k)  # m64 slices that one consumer multiplies
    products = rows * (width // mma_n) * 4
    consumers = config.num_consumers // config.consumers_k  # that multiply the same block
    promoted = rows * width * promotion + (width * TOKEN_CYCLES if few_rows else 0)
    return Costs(
        tensor=consumers * (products * max(mma_n / 2, LEAST_CYCLES) + rows * width * busy),
        read=consumers * products * (64 + mma_n) * 32,
        promotion=promoted if promotion else 0.0,
        ahead=config.num_partials != 1,
        consumers_k=config.consumers_k,
        element=element * LINE_BYTES / stored_row if aligned else DIRECT_ELEMENTS,
        buffered=buffered,
        store_warp=store_warp,
        hides_epilogue=hides_epilogue,
        exchanges_edges=not few_rows,
        prologue_us=0.0 if few_rows else PROLOGUE_US,
    )
