"""Configs, which say how a kernel does its work, and KernelParams, the identity of a binary.

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

from typing import Any

from deep_gemm.parts import NO_PARTS, Parts
from deep_gemm.records import record
from deep_gemm.spec import Major


@record(frozen=True)
class Config:
    """How a kernel of ``family`` does its work."""

    family: str

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        return 1, 1


@record(frozen=True)
class GemmConfig(Config):
    """How a kernel of ``family`` computes a GEMM: its tile, its pipeline and its launch shape.

    ``block_m x block_n x block_k`` is one CTA's tile, which ``num_consumers`` warpgroups multiply.
    ``cluster_m x cluster_n x cluster_k`` CTAs form a cluster: along m they share the B tile by multicast, along n the A
    tile, and along k they split the K of one tile. Registers and shared memory are budgeted for ``ctas_per_sm``
    resident CTAs per SM.

    ``swap_ab``: rows of B are the M of wgmma, and rows of A its N. Of its consumers, ``consumers_k`` multiply the same
    rows and take blocks of K in turn. ``num_partials`` sets of partial sums are promoted to float32 sums after every
    128 of K; 0 where sums stay in the tensor cores' accumulators. If not ``persistent``, there is one CTA per tile, and
    its staging area is in stages of the ring. ``buffers`` staging buffers for each consumer take a tile's parts; 0
    where the family decides. ``parts``: K is cut into as many parts as fill the GPU, each with a cluster for each tile.
    ``in_turn``: a CTA sums K in so many parts, one after the other, and adds their sums in order, as split K does.
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
    swap_ab: bool = False
    consumers_k: int = 1
    num_partials: int = 0
    persistent: bool = True
    buffers: int = 0
    parts: bool = False
    in_turn: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that one CTA writes."""
        return self.block_m, self.block_n

    def changed(self, num_stages: int, num_partials: int | None = None) -> GemmConfig:
        """A copy with another ``num_stages``, and ``num_partials`` if it is given. A first call makes 60 copies, and
        `dataclasses.replace` takes ten times as long."""
        found = object.__new__(GemmConfig)
        vars(found).update(vars(self), num_stages=num_stages)
        if num_partials is not None:
            vars(found)["num_partials"] = num_partials
        return found

    @property
    def height(self) -> int:
        """Rows of the tile's sums, which consumers share: the M of wgmma."""
        return self.block_n if self.swap_ab else self.block_m

    @property
    def width(self) -> int:
        """Columns of the tile's sums: the N of wgmma."""
        return self.block_m if self.swap_ab else self.block_n

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def k_splits(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@record(frozen=True)
class TileConfig(Config):
    """The tile that one CTA of ``num_threads`` threads of a helper kernel computes. Registers are budgeted for
    ``ctas_per_sm`` resident CTAs per SM."""

    tile_rows: int
    tile_columns: int
    num_threads: int
    ctas_per_sm: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes."""
        return self.tile_rows, self.tile_columns


@record(frozen=True)
class KernelParams:
    """The identity of a binary: everything that changes the machine code, and nothing else.

    ``shape`` is (m, n, k), with 0 for each dimension that stays a run-time argument. ``store`` is "tma" if D's rows
    begin at multiples of 16 bytes, as TMA and 16-byte copies need. Otherwise it is "direct": element by element.

    Of a GEMM: ``dtype`` is `GemmSpec.dtypes`, ``form`` is the BLAS form of A and B ("nt": both are K-major),
    ``scaling`` is a name in `SCALINGS`, and ``output`` D's dtype. ``adds_c`` says what adds C: "none"; "threads", which
    read C; or "tma", which adds the product to D in memory. ``grouping`` is as in `GemmSpec`, ``segments`` the size of
    the table of groups, and ``epilogue`` is applied to final sums.

    Of a cast: ``dtype`` is the input's, and ``options`` are those fields of its spec that the code depends on.
    """

    kernel: str
    arch: str
    config: Config
    store: str = "direct"
    shape: tuple[int, int, int] = (0, 0, 0)
    dtype: str = ""
    form: str = "nt"
    scaling: str = "none"
    output: str = ""
    adds_c: str = "none"
    grouping: str = "none"
    segments: int = 32
    epilogue: Parts = NO_PARTS
    options: tuple[str | bool, ...] = ()

    @property
    def majors(self) -> tuple[Major, Major]:
        """The dimensions that are contiguous in A and in B, as in `Operand`."""
        return ("k" if self.form[0] == "n" else "mn"), ("k" if self.form[1] == "t" else "mn")

    @property
    def gemm(self) -> GemmConfig:
        """The config of a GEMM; TypeError for a helper kernel."""
        if not isinstance(self.config, GemmConfig):
            raise TypeError(f"{self.kernel} multiplies no matrices")
        return self.config

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; the epilogue is its text."""
        # Fields are plain values and need no copies. `dataclasses.asdict` copies them, and takes ten times as long.
        return {**vars(self), "config": dict(vars(self.config)), "epilogue": str(self.epilogue)}
