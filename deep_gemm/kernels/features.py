"""Inputs of the performance model: what a template says of a config, and what follows for a spec and a config."""

from __future__ import annotations

from typing import NamedTuple

from ..params import GemmConfig
from ..spec import GemmSpec


class Costs(NamedTuple):
    """What a config costs, whatever the sizes are. A template states the costs of its instructions in these units, so
    that one model ranks the configs of all families. "A block" is 128 bytes of each row of K, of one CTA's tile."""

    tensor: float
    """Cycles of the tensor cores for a block of one CTA."""
    read: float
    """Bytes of operands that instructions read from shared memory for a block."""
    issue: float = 0.0
    """Cycles of an SM that the warps which multiply need for something else in a block of one CTA, such as reading or
    widening operands; 0 where that does not count."""
    depth: float = 1.0
    """Blocks in a stage."""
    promotion: float = 0.0
    """Cycles of a consumer's promotion for a block; 0 where sums stay in the accumulators."""
    ahead: bool = True
    """Whether the next block's products are issued before promotion."""
    consumers_k: int = 1
    """Groups of consumers with their own blocks of K."""
    element: float = 1.0
    """The cost of an element of D, in elements that TMA stores in rows of 128 bytes."""
    buffered: int = 0
    """Elements of a tile that are still being stored when its consumers begin the next one."""
    store_warp: bool = False
    """Whether the store warp stores a tile while consumers compute the next one."""
    hides_epilogue: bool = True
    """Whether the next tile's products run while a tile is stored."""
    exchanges_alone: bool = True
    """Whether a part of K that is the only one exchanges its sums, as others do."""
    exchanges_edges: bool = True
    """Whether the split-K exchange also moves sums of rows and columns past the edge of D."""
    prologue_us: float = 0.0
    """Extra microseconds of a launch."""


class Features(NamedTuple):
    """Numbers, or arrays of numbers for many pairs of spec and config at once. They apply to a GEMM of any dtype. What
    depends on instructions comes from `Costs`, which also says what "a block" is.
    """

    waves: float
    """Tiles that the busiest resident CTA computes, one after the other."""
    steps: float
    """Blocks of K in these tiles."""
    resident: float
    """CTAs on the busiest SM."""
    tensor: float
    """Cycles of the tensor cores for a block of one CTA."""
    issue: float
    """Cycles of an SM that the warps which multiply need for something else in a block of one CTA."""
    consumers: float
    """Consumer warpgroups of a CTA."""
    consumers_k: float
    """Groups of consumers with their own blocks of K; consumers of one group multiply the same block."""
    promotion: float
    """Cycles of a consumer's promotion for a block; 0 where sums stay in the tensor cores' accumulators."""
    ahead: float
    """1 where the next block's products are issued before promotion, else 0."""
    stages: float
    """Blocks that are loaded ahead."""
    filled: float
    """Bytes that a CTA loads for a block."""
    elements: float
    """Output elements that are stored per tile, without those past the edge; weighted where an element takes longer."""
    prologue_us: float
    """Extra microseconds of a launch of this family."""
    store_warp: float
    """1 where the store warp stores a tile while consumers compute the next one, else 0."""
    hides_epilogue: float
    """1 where the next tile's products run while a tile is stored, else 0."""
    cluster: float
    """1 where CTAs are launched in clusters, else 0."""
    exchanges: float
    """1 where the CTAs of a cluster split K and exchange sums, else 0."""
    exchanged: float
    """Elements that a CTA sends in the split-K exchange."""
    first: float
    """Bytes that HBM moves until all CTAs have their first stage."""
    traffic: float
    """Bytes that HBM moves after that."""
    from_l2: float
    """Bytes of both operands that SMs read from L2. Bytes that several tiles request at the same time count less."""
    unaligned: float
    """The fraction of a block's 128-byte rows that begin inside an L2 line: of both operands, weighted by the bytes."""
    crowded: float
    """Rows of a block whose L2 lines are requested repeatedly, weighted by the contention that they cause."""
    read: float
    """Bytes of operands that instructions read from shared memory for a block. Only the power model uses this,
    `requested` and `element_bytes`."""
    requested: float
    """Rows of 128 bytes that a CTA requests from L2. Of rows that a cluster shares, only the CTA's own part counts."""
    element_bytes: float
    """Of both operands."""


def ctas(spec: GemmSpec, config: GemmConfig) -> int:
    """The number of tiles, or of their parts of K: CTAs that a launch would have if none computed a second one."""
    # Not `ceil_div`: each new M asks for some hundred configs.
    tiles = -(-spec.m // config.block_m) * -(-spec.n // config.block_n) * config.cluster_k
    return tiles * (spec.groups if spec.grouping == "batched" else 1)
