"""The rules of a device template: which tiles it has, and the registers and shared memory that they take.

A family (``gemm.py``) is a template, and a row of what is supported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from ..arch import ArchSpec
from ..params import GemmConfig, KernelParams
from ..spec import GemmSpec, ceil_div
from .gemm_features import Counts

BARRIER_BYTES = 16
"""Bytes of a stage's full and empty mbarriers."""

MAX_STAGES = 16

ONE_ORDER = "it sums K in one order, without splits"
"""Why a batch refuses a config."""

BYTES = {"e4m3": 1, "bf16": 2, "f16": 2, "f32": 4}


class Template(ABC):
    """One ``templates/kernels/*.cu.jinja`` of a GEMM. Configs are those of the families that use it."""

    file: ClassVar[str]
    constant_names: ClassVar[tuple[str, ...]]
    """The constants that it has, besides those that all templates have; see `GemmFamily.constants`."""
    mma_instruction: ClassVar[str]
    block_k: ClassVar[int]
    names_partials: ClassVar[bool] = False
    """Whether names of kernels give the sets of partial sums."""
    scales_have_edges: ClassVar[bool] = False
    """Whether it has maps of the scales' edge boxes, and one map of B for each segment of a tile's columns."""
    few_tokens: ClassVar[bool] = False
    """Whether tiles are for few rows of A."""
    tma_adds: ClassVar[bool] = False
    """Whether TMA adds to a float32 D."""
    sets_aside_map_d: ClassVar[bool] = False
    """Whether the tensor map of D is a parameter even if D is stored directly."""
    edge_map_d: ClassVar[bool] = False
    """Whether there is a second map of D, for the last rows of a tile."""

    adds_residuals: bool = True
    """Whether an epilogue may add a residual."""
    gated: ClassVar[bool] = False
    """Whether B is a gate's rows, and then as many of up: see ``GatedTile``."""

    @abstractmethod
    def make(self, family: str, *tile: object, arch: ArchSpec) -> GemmConfig:
        """A config with as many stages as fit. ``tile`` is a row of a serving set."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[object, ...]]:
        """The arguments of `make` for all configs that may be legal."""

    @abstractmethod
    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, as a sentence, or None if it can."""

    def fits(self, spec: GemmSpec, config: GemmConfig, accumulate: str, scaling: str) -> bool:
        """Whether the legal config ``config`` can run ``spec``. Only what this template adds to `GemmFamily.fits`."""
        return True

    def finishes(self, config: GemmConfig) -> bool:
        """Whether consumers have registers for an epilogue."""
        return True

    def fitted(self, params: KernelParams, table: int, arch: ArchSpec) -> GemmConfig:
        """The config of ``params`` with no more stages than fit beside what these params need, and a table of groups of
        ``table`` bytes."""
        return params.gemm

    @abstractmethod
    def shared_bytes(self, params: KernelParams) -> int:
        """Dynamic shared memory of one CTA without a table of groups."""

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

    @abstractmethod
    def counts(self, config: GemmConfig, output: str, aligned: bool, scaling: str) -> Counts:
        """The performance model's counts for ``config`` and D's dtype. ``aligned``: TMA can store D."""

    def stores_by_tma(self, params: KernelParams) -> bool:
        """Whether TMA stores tiles to D, instead of the warps that staged or multiplied them."""
        return params.store == "tma" and params.gemm.persistent

    def has_map_d(self, params: KernelParams) -> bool:
        """Whether there is a parameter for a tensor map of D."""
        return self.sets_aside_map_d or self.stores_by_tma(params)

    def columns_of_d(self, n: int) -> int:
        """Columns of D, where B has ``n`` rows; and those of a tile of D."""
        return n // 2 if self.gated else n

    def box_columns(self, config: GemmConfig, output: str) -> int:
        """Columns of one box of staged sums."""
        raise NotImplementedError(f"{self.file} stores no tiles by TMA")

    def staging(self, params: KernelParams) -> tuple[int, bool]:
        """Staging buffers of a consumer, and whether a tile is stored while the next tile's products run."""
        return params.gemm.buffers, False

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
