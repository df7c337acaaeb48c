"""Configs, which say how a kernel does its work, and KernelParams, the identity of a binary.

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """Base of all configs: the choices of a kernel family. A subclass has the fields that its family uses."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        raise NotImplementedError


@dataclass(frozen=True)
class GemmConfig(KernelConfig):
    """Tile, pipeline and launch shape that every GEMM kernel has.

    ``block_m x block_n x block_k`` is one CTA's tile. ``num_consumers`` warpgroups issue wgmma; one more warpgroup is
    the producer. ``cluster_m x cluster_n x cluster_k`` CTAs form a cluster: along m they share the B tile by multicast,
    along n the A tile, and along k they split the K of one tile. Registers and shared memory are budgeted for
    ``ctas_per_sm`` resident CTAs per SM.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_consumers: int
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    ctas_per_sm: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that one CTA writes."""
        return self.block_m, self.block_n

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def num_threads(self) -> int:
        """Threads in a CTA: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumers + 1)

    @property
    def k_splits(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k


@dataclass(frozen=True)
class FP8Config(GemmConfig):
    """A GEMM config with scales for each 128 of K. After every 128 of K the partial sums are promoted to float32 sums.
    There are ``num_partials`` sets of partial sums."""

    num_partials: int = 1


@dataclass(frozen=True)
class UprightConfig(FP8Config):
    """A config without swapped operands: rows of A are the M of wgmma. If not ``persistent``, there is one CTA per
    tile, and its staging area is in stages of the ring instead of in memory of its own."""

    persistent: bool = True

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m // (64 * self.num_consumers)


@dataclass(frozen=True)
class RowsConfig(UprightConfig):
    """The same for one scale for each row of A and of B."""


@dataclass(frozen=True)
class ScaledConfig(FP8Config):
    """A config for any scaling. Tiles are stored in parts through ``buffers`` staging buffers for each consumer."""

    buffers: int = 2

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m // (64 * self.num_consumers)


@dataclass(frozen=True)
class ScaledGroupedConfig(ScaledConfig):
    """The same for groups along M."""


@dataclass(frozen=True)
class ScaledKGroupedConfig(ScaledConfig):
    """The same for groups along K."""


@dataclass(frozen=True)
class SwappedConfig(FP8Config):
    """A config with operands swapped: ``block_n`` rows of B are the M of wgmma, ``block_m`` rows of A its N.
    ``consumers_k`` consumers multiply the same rows and take blocks of K in turn."""

    consumers_k: int = 1

    @property
    def k_splits(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@dataclass(frozen=True)
class ScaledSwappedConfig(SwappedConfig):
    """The same for any scaling but 1D1D."""


@dataclass(frozen=True)
class HalfConfig(GemmConfig):
    """A GEMM config for 16-bit operands, whose sums stay in the tensor cores' accumulators. Rows of A are the M of
    wgmma."""

    @property
    def height(self) -> int:
        """Rows of the tile's sums, which consumers share."""
        return self.block_m

    @property
    def width(self) -> int:
        """Columns of the tile's sums, and of one wgmma."""
        return self.block_n

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.height // (64 * self.num_consumers)

    @property
    def stored(self) -> int:
        """Columns of D of which boxes for TMA stores are cut: those that one CTA stores."""
        return self.block_n // self.cluster_k


@dataclass(frozen=True)
class HalfTurnedConfig(HalfConfig):
    """The same with operands swapped: rows of B are the M of wgmma, and D is stored transposed."""

    @property
    def height(self) -> int:
        """Rows of the tile's sums, which consumers share."""
        return self.block_n

    @property
    def width(self) -> int:
        """Columns of the tile's sums, and of one wgmma."""
        return self.block_m

    @property
    def stored(self) -> int:
        """Columns of D of which boxes for TMA stores are cut: an m64 slice."""
        return 64


@dataclass(frozen=True)
class HalfGroupedConfig(HalfConfig):
    """The same for groups along M."""


@dataclass(frozen=True)
class HalfKGroupedConfig(HalfConfig):
    """The same for groups along K."""


@dataclass(frozen=True)
class HalfSwappedConfig(GemmConfig):
    """A config for 16-bit operands swapped: ``block_n`` rows of B are the M of wgmma, ``block_m`` rows of A its N.
    ``consumers_k`` consumers multiply the same rows and take blocks of K in turn."""

    consumers_k: int = 1

    @property
    def k_splits(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@dataclass(frozen=True)
class TransposeConfig(KernelConfig):
    """The tile that one CTA of ``num_threads`` threads transposes."""

    tile_rows: int
    tile_columns: int
    num_threads: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        return self.tile_rows, self.tile_columns


@dataclass(frozen=True)
class KernelParams:
    """The identity of a binary: everything that changes the machine code, and nothing else.

    ``shape`` is (m, n, k), with 0 for each dimension that stays a run-time argument. ``store`` is "tma" if D's rows
    begin at multiples of 16 bytes, as TMA and 16-byte copies need. Otherwise it is "direct": element by element.
    """

    kernel: str
    arch: str
    config: KernelConfig
    store: str = "direct"
    shape: tuple[int, int, int] = (0, 0, 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``config`` carries its class name so that a reader can tell hierarchies apart."""
        # Fields are plain values and need no copies. `dataclasses.asdict` copies them, and takes ten times as long.
        config = {"class": type(self.config).__name__, **vars(self.config)}
        return {**vars(self), "config": config}


@dataclass(frozen=True)
class HalfParams(KernelParams):
    """The params of a 16-bit GEMM. ``dtype`` is that of the operands, "bf16" or "f16". ``majors`` has a letter for A
    and one for B: "k", or "m" for MN-major. ``output`` is D's dtype. ``accumulate`` says how C is added: "none";
    "reads", by consumers; or "reduces", by TMA, which adds to D."""

    dtype: str = "bf16"
    majors: str = "kk"
    output: str = "bf16"
    accumulate: str = "none"


@dataclass(frozen=True)
class ScaledParams(KernelParams):
    """The params of an FP8 GEMM with any scaling. ``scaling`` is "1d1d", "1d2d" or "rowwise". ``output`` and
    ``accumulate`` are as in `HalfParams`."""

    scaling: str = "1d1d"
    output: str = "f32"
    accumulate: str = "none"


@dataclass(frozen=True)
class HalfGroupedParams(HalfParams):
    """The same for groups along M. ``grouping`` is as in `GemmSpec`, ``segments`` the size of the table of groups."""

    grouping: str = "contiguous"
    segments: int = 32


@dataclass(frozen=True)
class ScaledGroupedParams(ScaledParams):
    """The same for groups along M; see `HalfGroupedParams`."""

    grouping: str = "contiguous"
    segments: int = 32


@dataclass(frozen=True)
class QuantizeParams(KernelParams):
    """The params of a cast to FP8: the input's ``dtype``, and fields of `QuantizeSpec`. ``gathered``: an index says
    which rows are cast. ``factors``: the scales of each row are multiplied by a factor."""

    dtype: str = "bf16"
    plain: str = "row"
    transposed: str = "none"
    gated: bool = False
    gathered: bool = False
    factors: bool = False
