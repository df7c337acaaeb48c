"""How stream K deals out work: groups of CTAs, and the workspace through which they give each other their sums."""

from __future__ import annotations

from dataclasses import dataclass

from ..params import SCALE_BLOCK, FP8Config, ceil_div

FLAG_BYTES = 4096
"""Of a workspace's flags, one for each CTA; there is a slot of float32 sums for each as well."""

_MAX_MEMBERS = 12
_IDLE_SHARE = 0.02
"""How many of the SMs may be left out so that the others make whole groups."""


@dataclass(frozen=True)
class Stream:
    """CTAs work in ``groups`` of ``members``, which do the same blocks of K of tiles below each other. A group has
    ``rows`` x ``columns`` tiles to do with the others, of ``blocks`` blocks of K (see ``StreamScheduler``)."""

    members: int
    groups: int
    rows: int
    columns: int
    blocks: int

    @property
    def ctas(self) -> int:
        """Of the launch."""
        return self.members * self.groups

    @property
    def whole(self) -> int:
        """Tiles that are done whole, one wave after the other. The others are dealt out in blocks of K: those of the
        last wave, which is not full, and of the one before, if there is one, so that a tile has one donor at most."""
        tiles = self.rows * self.columns
        waves, rest = divmod(tiles, self.groups)
        return (waves if rest == 0 else max(0, waves - 1)) * self.groups

    @property
    def dealt(self) -> int:
        """Blocks of K of the tiles that are dealt out."""
        return (self.rows * self.columns - self.whole) * self.blocks

    @property
    def most_blocks(self) -> int:
        """Blocks of K that the busiest group does."""
        return self.whole // self.groups * self.blocks + ceil_div(self.dealt, self.groups)

    @property
    def donors(self) -> int:
        """Other groups' sums that the owner of a dealt-out tile adds to its own, at most."""
        share = self.dealt // self.groups
        return ceil_div(self.blocks, share) if share else 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """For the kernel: members, groups, whole, and two numbers that deal out blocks."""
        return (self.members, self.groups, self.whole, *divmod(self.dealt, self.groups))


def stream(config: FP8Config, m: int, n: int, k: int, num_sms: int) -> Stream:
    """How ``config`` deals out a GEMM. As many CTAs as possible, up to 12, load the same rows of B at a time: without
    that, CTAs of a wave that are at different blocks of K find less in L2."""
    tiles_m, tiles_n, blocks = ceil_div(m, config.block_m), ceil_div(n, config.block_n), ceil_div(k, SCALE_BLOCK)
    members = next(
        size
        for size in range(min(_MAX_MEMBERS, num_sms), 0, -1)
        if tiles_m % size == 0 and num_sms % size <= num_sms * _IDLE_SHARE
    )
    rows = tiles_m // members
    return Stream(members, max(1, min(num_sms // members, rows * tiles_n * blocks)), rows, tiles_n, blocks)


def slot_bytes(config: FP8Config, ctas: int) -> int:
    """Of the slots of a launch of ``ctas`` CTAs."""
    return ctas * config.block_m * config.block_n * 4
