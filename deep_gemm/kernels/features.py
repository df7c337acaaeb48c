"""What the model of speed needs to know of a spec done with a config: counts, no times."""

from __future__ import annotations

from typing import NamedTuple


class Features(NamedTuple):
    """Numbers, or arrays of them for many pairs at once. "A block" is one CTA's block of K."""

    waves: float
    """Tiles that the busiest slot does, one after the other."""
    steps: float
    """Blocks of K that it goes through for that."""
    resident: float
    """CTAs on the busiest SM."""
    groups: float
    """Consumers that multiply the same block."""
    products: float
    """Instructions a consumer issues for a block."""
    half_width: float
    """Half the columns of one instruction: its cycles in the tensor cores."""
    read: float
    """Bytes of operands that instructions read for a block."""
    scales_read: float
    """Bytes of tokens' scales that come from shared memory into registers for a block, as often as threads ask."""
    filled: float
    """Bytes that are loaded for a block."""
    asked: float
    """Rows of 128 bytes that a CTA asks the L2 for: of what a cluster shares, its part."""
    columns: float
    """Columns of m64 accumulators that a consumer promotes for a block."""
    in_step: float
    """1 where several consumers promote without order, else 0."""
    token_scales: float
    """Scales of tokens that a consumer multiplies into its columns for a block."""
    ahead: float
    """1 where the next products are issued before promotion, else 0."""
    consumers_k: float
    consumers: float
    store_warp: float
    """1 where a warp brings tiles to D while consumers go on to the next, else 0."""
    stages: float
    """Of the ring: each has two barriers, which are made one after the other."""
    boxes: float
    """TMA boxes of B per stage."""
    elements: float
    """Output elements of a tile that are stored, as far as they exist."""
    direct: float
    """1 for element by element stores, else 0."""
    narrow: float
    """How often the rows of one TMA store go into rows of 64 columns."""
    transposed: float
    """1 where operands are swapped, else 0."""
    local_shares: float
    """1 where consumers of a CTA exchange shares of K, else 0."""
    cluster_shares: float
    """The same for CTAs of a cluster."""
    handed: float
    """Elements that a CTA hands over: m64 slices of tokens do so whole, whatever rows of them there are."""
    cluster_2: float
    cluster_4: float
    cluster_8: float
    first: float
    """Bytes that HBM moves before all CTAs have their first stage."""
    traffic: float
    """Bytes that HBM moves after them."""
    weights_again: float
    """Bytes of B, if more than one cluster tile asks for them."""
    tokens_read: float
    """Bytes of A that the L2 hands out."""
    tokens_sharers: float
    """Cluster tiles that read the same bytes of A, up to 32."""
    weights_read: float
    weights_sharers: float
    """The same of B."""
    in_parts: float
    """1 where an m64 slice is multiplied in two parts, else 0."""
    unaligned: float
    """Of the rows of 128 bytes of a block, the part that begins inside a line of 128 bytes."""
    torn: float
    """The part that begins inside a sector of 32 bytes."""
    crowded: float
    """Rows of A of a block whose lines the L2 is asked for again and again: by the part of the SMs that want them at a
    time, over the blocks of K that a CTA has of a row, and by `_crowding`."""
    hanging: float
    """Of the blocks of K that a CTA has of a tile, the part that ends past K, where it has the last."""
