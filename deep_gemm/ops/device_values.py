"""The contract of what only the device knows: labels, counts, ends, sizes, ranges, lengths and schedules in the memory
of operands. Each function returns faults (`KernelOperation.faults`), by torch operations on the tensors' device that do
not synchronise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..runtime.operation import Fault
from ..spec import SCALE_BLOCK

LEAST_TILE = 64
"""Rows of the lowest tile for rows with labels."""

LEAST_RUNS = 32
"""Runs of labels that any call may have; see `deep_gemm.kernels.groups.segments`."""


def labels(layout: Tensor, groups: int, alignment: int) -> list[Fault]:
    """Of the index form: the group of each row. A tile multiplies all its rows by the matrix of the largest label among
    them, and the table of a CTA has two runs of tiles for each group."""
    given = layout.long()
    unknown = (given < -1) | (given >= groups)
    given = given.masked_fill(unknown, -1)
    owner = _largest(given, alignment)
    of_tiles = _largest(given, LEAST_TILE)
    place = torch.arange(len(of_tiles), device=layout.device)
    used, own = of_tiles >= 0, of_tiles.clamp(min=0)
    begins = used & (of_tiles != _shifted(of_tiles, -1))  # a run
    before = _shifted(place.masked_fill(~used, -1).cummax(0).values, -1)  # the last tile that is no padding
    first = place.new_full((groups,), len(place)).scatter_reduce(0, own, place.masked_fill(~used, len(place)), "amin")
    again = begins & (of_tiles != of_tiles[before.clamp(min=0)]) & (place > first[own])
    most = max(LEAST_RUNS, 2 * groups)

    def mixed(row: int) -> str:
        block = row // alignment
        return (
            f"grouped_layout has the groups {int(layout[row])} and {int(owner[block])} in rows {block * alignment} to "
            f"{min((block + 1) * alignment, len(layout)) - 1}. Begin each group at a multiple of {alignment} rows "
            "(get_mk_alignment_for_contiguous_layout), and label the rows between groups -1: a kernel multiplies a "
            "tile's rows by one group's matrix."
        )

    return [
        Fault(
            unknown,
            lambda row: (
                f"grouped_layout has the group {int(layout[row])} in row {row}, but b has {groups} groups. Labels are "
                f"from 0 to {groups - 1}, or -1 for padding."
            ),
        ),
        Fault((given >= 0) & (given != owner.repeat_interleave(alignment)[: len(given)]), mixed),
        Fault(
            again,
            lambda tile: (
                f"grouped_layout has the group {int(of_tiles[tile])} again from row {tile * LEAST_TILE} on, after rows "
                "of other groups. Rows of a group must follow each other: sort them by group."
            ),
        ),
        Fault(
            begins.sum() > most,
            lambda: (
                f"grouped_layout has {int(begins.sum())} runs of labels between {LEAST_TILE} rows or more of padding, "
                f"but {most} are the most with {groups} groups. Put padding after a group's rows, not into them."
            ),
        ),
    ]


def counts(name: str, given: Tensor, most: int, what: str) -> list[Fault]:
    """Numbers from 0 to ``most``."""
    return [
        Fault(
            (given < 0) | (given > most),
            lambda *at: f"{name}{list(at)} is {int(given[at])}, but it must be from 0 to {most}, the number of {what}.",
        )
    ]


def ends(layout: Tensor, rows: int, alignment: int) -> list[Fault]:
    """Of the psum form: the end row of each group."""
    given = layout.long()
    before = _shifted(given, 0)
    starts = (before + alignment - 1) // alignment * alignment
    is_empty = (given == before) | (given == starts)
    return [
        *counts("grouped_layout", given.masked_fill(given == starts, 0), rows, "rows of a"),
        Fault(
            ~is_empty & (given < starts),
            lambda group: (
                f"grouped_layout[{group}] is {int(layout[group])}, but group {group} begins at row "
                f"{int(starts[group])}: where the group before ends, rounded up to a multiple of {alignment} "
                "(get_mk_alignment_for_contiguous_layout). The end of an empty group is its own start."
            ),
        ),
    ]


def sizes(layout: Tensor, k: int, multiple: int, columns: Mapping[str, int]) -> list[Fault]:
    """K of each group, one group after the other. ``columns``: how many scales have, by operand; a group's begin with a
    new block."""
    given = layout.long()
    blocks = ((given + SCALE_BLOCK - 1) // SCALE_BLOCK).sum()
    return [
        Fault(
            (given < 0).any() | (given.sum() > k),
            lambda: (
                f"sizes in grouped_layout must be 0 or more, and add up to at most {k}, the K of a, but the least is "
                f"{int(given.min())}, and they add up to {int(given.sum())}."
            ),
        ),
        Fault(
            given % multiple != 0,
            lambda group: (
                f"grouped_layout[{group}] is {int(layout[group])}, but K of each group must be a multiple of {multiple}"
                ", because rows of FP8 are read in such pieces."
            ),
        ),
        *(
            Fault(
                blocks > width,
                lambda name=name, width=width: (
                    f"the scales of {name} have {width} columns, but groups of the sizes in grouped_layout have "
                    f"{int(blocks)} blocks of {SCALE_BLOCK}: the scales of a group begin with a new block."
                ),
            )
            for name, width in columns.items()
        ),
    ]


def padded_sizes(layout: Tensor, k: int) -> list[Fault]:
    """K of each group, where groups begin at multiples of 128."""
    given = layout.long()
    aligned = (given + SCALE_BLOCK - 1) // SCALE_BLOCK * SCALE_BLOCK
    last = aligned.cumsum(0) - aligned + given
    return [
        *counts("grouped_layout", given, k, "columns of a"),
        Fault(
            last > k,
            lambda group: (
                f"grouped_layout says that groups end at {int(last[group])} of K, but K of a is {k}. Groups begin at "
                f"multiples of {SCALE_BLOCK}."
            ),
        ),
    ]


def pages(lengths: Tensor, table: Tensor, count: int, page_keys: int, columns: int) -> list[Fault]:
    """The pages of each request's keys, and its tokens' order. Lengths below 0 count as 0, and those past the result or
    the table are cut, by the kernel too."""
    each, width = lengths.long().view(len(table), -1).clamp(0, columns), table.shape[1]
    whole, last = each.amax(1), each[:, -1:]
    needed = torch.arange(width, device=table.device) * page_keys < whole[:, None]
    return [
        Fault(
            each > last,
            lambda request, token: (
                f"context_lens[{request}, {token}] is {int(each[request, token])}, more than that of the request's last"
                f" token, {int(last[request])}. The last token attends the most keys."
            ),
        ),
        Fault(
            needed & ((table < 0) | (table >= count)),
            lambda request, page: (
                f"block_table[{request}, {page}] is {int(table[request, page])}, but it must be from 0 to {count - 1}, "
                f"a block of kv_cache: context_lens says that the request has {int(whole[request])} keys, and a block "
                f"has {page_keys}."
            ),
        ),
    ]


def schedule(given: Tensor, last: Tensor, split_keys: int) -> list[Fault]:
    """Where each CTA begins, (request, split in it), and the end; ``last`` are the keys of each request."""
    splits = (last.long().clamp(min=0) + split_keys - 1) // split_keys
    before = torch.cat([splits.new_zeros(1), splits.cumsum(0)])
    request, split = given.long().unbind(1)
    known = (request >= 0) & (request <= len(last)) & (split >= 0)
    own = request.clamp(0, len(last))
    at = before[own] + torch.minimum(split, torch.cat([splits, splits.new_zeros(1)])[own])
    row = torch.arange(len(at), device=given.device)
    wrong = ~known | (at < _shifted(at, 0)) | ((row == 0) & (at != 0)) | ((row == len(at) - 1) & (at != before[-1]))
    return [
        Fault(
            wrong,
            lambda row: (
                f"schedule_meta is not that of context_lens: in row {row} it has ({int(request[row])}, "
                f"{int(split[row])}), and splits would be left out or computed twice. Make it by "
                "get_paged_mqa_logits_metadata from the context_lens of this call."
            ),
        )
    ]


def _largest(given: Tensor, height: int) -> Tensor:
    """The largest of each ``height`` labels."""
    return torch.nn.functional.pad(given, (0, -len(given) % height), value=-1).view(-1, height).amax(1)


def _shifted(x: Tensor, first: int) -> Tensor:
    """The element before each one; ``first`` before the first."""
    return torch.cat([x.new_full((1,), first), x[:-1]])
