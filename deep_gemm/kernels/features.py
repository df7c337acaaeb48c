"""What the model of speed needs to know of a spec done with a config: counts, and times of the family's own."""

from __future__ import annotations

from typing import NamedTuple


class Features(NamedTuple):
    """Numbers, or arrays of them for many pairs at once. "A block" is one CTA's block of K.

    All of them are a GEMM's, whatever its dtypes. A family adds terms by what it puts into ``promotion``, ``elements``
    and ``prologue_us``, in the cycles and microseconds of its own instructions.
    """

    waves: float
    """Tiles that the busiest slot does, one after the other."""
    steps: float
    """Blocks of K that it goes through for that."""
    resident: float
    """CTAs on the busiest SM."""
    tensor: float
    """Cycles that the tensor cores take for a block of one CTA."""
    consumers: float
    """Consumer warpgroups of a CTA."""
    consumers_k: float
    """Consumers that have blocks of K of their own; the others multiply the same block."""
    promotion: float
    """Cycles that a consumer adds up sums for a block; 0 where they stay in the tensor cores' accumulators."""
    ahead: float
    """1 where the next products are issued before promotion, else 0."""
    stages: float
    filled: float
    """Bytes that are loaded for a block."""
    elements: float
    """Output elements of a tile that are stored, as far as they exist; more where each takes longer."""
    prologue_us: float
    """What a launch of this family takes more than others."""
    store_warp: float
    """1 where a warp brings tiles to D while consumers go on to the next, else 0."""
    cluster: float
    """1 where CTAs are launched in clusters, else 0."""
    shares: float
    """1 where CTAs of a cluster exchange shares of K, else 0."""
    handed: float
    """Elements that a CTA hands over for that."""
    first: float
    """Bytes that HBM moves before all CTAs have their first stage."""
    traffic: float
    """Bytes that HBM moves after them."""
    handed_out: float
    """Bytes of both operands that the L2 hands out. Those that several tiles ask for at a time count less."""
    unaligned: float
    """Of the rows of 128 bytes of a block, the part that begins inside a line of the L2."""
    crowded: float
    """Rows of a block whose lines the L2 is asked for again and again, by how badly they crowd it."""
    read: float
    """Bytes of operands that instructions read from shared memory for a block. For power alone, as is `asked`."""
    asked: float
    """Rows of 128 bytes that a CTA asks the L2 for: of what a cluster shares, its part."""
