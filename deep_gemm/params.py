"""How a kernel does it (config), and what makes two binaries differ (KernelParams).

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """Base of all configs: what a kernel family may choose. A subclass has the fields that its family uses."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        raise NotImplementedError


@dataclass(frozen=True)
class GemmConfig(KernelConfig):
    """Tile, pipeline and launch shape that every GEMM kernel has.

    ``block_m x block_n x block_k`` is one CTA's tile; ``num_consumers`` warpgroups do the wgmma, one more warpgroup
    is the producer; ``cluster_m x cluster_n x cluster_k`` CTAs form a cluster whose members along m share (multicast)
    the B tile, along n the A tile, and along k split the K of one tile; ``ctas_per_sm`` is the residency that
    registers and shared memory are budgeted for.
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
    def k_shares(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k


@dataclass(frozen=True)
class FP8Config(GemmConfig):
    """A GEMM config with scales for each 128 of K: products are promoted into float32 accumulators once every 128 of K,
    through ``num_partials`` sets of partial sums."""

    num_partials: int = 1


@dataclass(frozen=True)
class UprightConfig(FP8Config):
    """Rows of A are the tensor cores' M. If not ``persistent``, a CTA has one tile, whose sums leave through stages of
    the ring rather than through memory of their own."""

    persistent: bool = True

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m // (64 * self.num_consumers)


@dataclass(frozen=True)
class ScaledConfig(FP8Config):
    """The same for any scaling, with parts of a tile stored through ``buffers`` buffers for each consumer."""

    buffers: int = 2

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m // (64 * self.num_consumers)


@dataclass(frozen=True)
class SwappedConfig(FP8Config):
    """``block_n`` rows of B are the tensor cores' M, ``block_m`` rows of A their N. In groups of ``consumers_k``
    consumers share a tile's rows and take its blocks of K in turn."""

    consumers_k: int = 1

    @property
    def k_shares(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@dataclass(frozen=True)
class ScaledSwappedConfig(SwappedConfig):
    """The same for any scaling but 1D1D."""


@dataclass(frozen=True)
class HalfConfig(GemmConfig):
    """A GEMM config for 16-bit operands, whose sums stay in the tensor cores' accumulators. Rows of A are the tensor
    cores' M."""

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m // (64 * self.num_consumers)


@dataclass(frozen=True)
class HalfSwappedConfig(GemmConfig):
    """The same with ``block_n`` rows of B as the tensor cores' M, and ``block_m`` rows of A as their N. In groups of
    ``consumers_k`` consumers share a tile's rows and take its blocks of K in turn."""

    consumers_k: int = 1

    @property
    def k_shares(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@dataclass(frozen=True)
class TransposeConfig(KernelConfig):
    """What one CTA of ``num_threads`` threads transposes."""

    tile_rows: int
    tile_columns: int
    num_threads: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        return self.tile_rows, self.tile_columns


@dataclass(frozen=True)
class KernelParams:
    """The identity of a binary: what changes the machine code, and nothing else.

    ``shape`` holds (m, n, k) with 0 for each dimension that stays a run-time argument. ``store`` is "tma" where D's
    rows begin at multiples of 16 bytes, which TMA needs and copies of 16 bytes do, else "direct": element by element.
    """

    kernel: str
    arch: str
    config: KernelConfig
    store: str = "direct"
    shape: tuple[int, int, int] = (0, 0, 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``config`` carries its class name so that a reader can tell hierarchies apart."""
        # Fields are plain values: no copies of them, which `dataclasses.asdict` would make at ten times the cost.
        config = {"class": type(self.config).__name__, **vars(self.config)}
        return {**vars(self), "config": config}


@dataclass(frozen=True)
class HalfParams(KernelParams):
    """Of a 16-bit GEMM also the operands' ``dtype`` ("bf16" or "f16") and major dimensions ("kk", or "m" for one that
    is MN-major), the ``output``'s dtype, and how C is added: "none", "reads", or "reduces" (TMA adds to D)."""

    dtype: str = "bf16"
    majors: str = "kk"
    output: str = "bf16"
    accumulate: str = "none"


@dataclass(frozen=True)
class ScaledParams(KernelParams):
    """Of an FP8 GEMM with any scaling also which: "1d1d", "1d2d" or "rowwise"; the ``output``'s dtype; and how C is
    added, as of `HalfParams`."""

    scaling: str = "1d1d"
    output: str = "f32"
    accumulate: str = "none"


@dataclass(frozen=True)
class QuantizeParams(KernelParams):
    """Of a cast to FP8 also the input's ``dtype``, and what `QuantizeSpec` says of its outputs."""

    dtype: str = "bf16"
    plain: str = "row"
    transposed: str = "none"
    gated: bool = False
