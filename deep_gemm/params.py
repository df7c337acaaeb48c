"""What is asked (problem), how it is done (config), and what makes two binaries differ (KernelParams).

Everything here is a frozen dataclass of plain values: hashable, printable, and JSON-serialisable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCALE_BLOCK = 128
"""Elements of K (and, for B, of N) that share one scale factor."""


def ceil_div(x: int, y: int) -> int:
    """The smallest integer that is not below ``x / y``."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


@dataclass(frozen=True)
class GemmProblem:
    """One GEMM, ``D[m, n] = A[m, k] @ B[n, k]^T``, as the selector sees it: sizes and formats, no pointers.

    ``d_tma`` says whether D's rows can be written by TMA (16-byte aligned base and row stride);
    ``compiled_dims`` is the subset of ``"mnk"`` that the caller wants baked into the binary;
    ``num_sms`` is how many SMs the launch may use, and ``whole_gpu`` whether these are all: if not, two CTAs must not
    share one, since the GPU would spread them over others. ``block_multiple`` restricts (block_m, block_n).
    """

    m: int
    n: int
    k: int
    num_sms: int
    d_dtype: str = "bf16"
    d_tma: bool = True
    compiled_dims: str = ""
    block_multiple: tuple[int, int] = (1, 1)
    whole_gpu: bool = True

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two operations each."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class GemmConfig:
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
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def num_threads(self) -> int:
        """Threads in a CTA: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumers + 1)


@dataclass(frozen=True)
class FP8Config(GemmConfig):
    """A GEMM config with scale factors: A's are 1 x ``scale_k``, B's ``scale_n`` x ``scale_k``, float32, promoted
    into float32 accumulators once every ``scale_k`` of K, through ``num_partials`` sets of partial sums. In groups of
    ``consumers_k`` consumers share a tile's rows and take its blocks of K in turn. With ``stream_k`` the blocks of K of
    tiles that do not make a whole wave are dealt out evenly over CTAs. If not ``persistent``, a CTA has one tile, whose
    sums leave through stages of the ring rather than through memory of their own."""

    scale_n: int = SCALE_BLOCK
    scale_k: int = SCALE_BLOCK
    num_partials: int = 1
    consumers_k: int = 1
    stream_k: bool = False
    persistent: bool = True

    @property
    def stage_blocks(self) -> int:
        """Blocks of K in a stage."""
        return 1

    @property
    def slices(self) -> int:
        """m64 slices of rows that one consumer multiplies."""
        return self.block_m * self.consumers_k // (64 * self.num_consumers)

    @property
    def extra_tokens(self) -> int:
        """Rows past the slices of all consumers."""
        return self.block_m % 64

    @property
    def k_shares(self) -> int:
        """Parts that a tile's K is split into, to be added up at the end."""
        return self.cluster_k * self.consumers_k


@dataclass(frozen=True)
class SwappedConfig(FP8Config):
    """An FP8 config whose kernel multiplies weights by tokens: ``block_n`` rows of B are the tensor cores' M,
    ``block_m`` rows of A their N. ``stage_blocks`` blocks of K make a stage."""

    stage_blocks: int = 1

    @property
    def slices(self) -> int:
        """m64 slices of B's rows that one consumer multiplies."""
        return max(1, self.block_n * self.consumers_k // (64 * self.num_consumers))

    @property
    def extra_tokens(self) -> int:
        """None: tokens are columns here, of which a tile may have any multiple of eight."""
        return 0


@dataclass(frozen=True)
class SmallConfig(FP8Config):
    """An FP8 config whose kernel has no producers: each of ``consumers_k`` warpgroups copies the blocks of K that it
    multiplies. A CTA has one tile, and stages for all of its blocks of K."""

    persistent: bool = False

    @property
    def num_threads(self) -> int:
        """Threads in a CTA: the consumers."""
        return 128 * self.num_consumers


@dataclass(frozen=True)
class KernelParams:
    """The identity of a binary: what changes the machine code, and nothing else.

    ``shape`` holds (m, n, k) with 0 for each dimension that stays a run-time argument. ``store`` is "tma" where D's
    rows begin at multiples of 16 bytes, which TMA needs and copies of 16 bytes do, else "direct": element by element.
    """

    kernel: str
    arch: str
    config: GemmConfig
    d_dtype: str = "bf16"
    store: str = "tma"
    shape: tuple[int, int, int] = (0, 0, 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``config`` carries its class name so that a reader can tell hierarchies apart."""
        # Fields are plain values: no copies of them, which `dataclasses.asdict` would make at ten times the cost.
        config = {"class": type(self.config).__name__, **vars(self.config)}
        return {**vars(self), "config": config}
