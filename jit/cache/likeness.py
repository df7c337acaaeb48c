"""Which kernels resemble each other: after which of the others each one is best compressed."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

_PIECE = 8
"""Half an instruction: its operands, or its hints for the scheduler."""


def parents(items: Sequence[bytes], longest: int) -> list[int | None]:
    """For each item the index of the one that it is best compressed after, or None if it begins a chain.

    Items are compared by their sets of pieces, since compressing all pairs would take hours: an item costs its pieces
    that are not in its chain. A few items are chosen that others come after, those that save most first.
    """
    cut = [{item[at : at + _PIECE] for at in range(0, len(item), _PIECE)} for item in items]
    numbers = {piece: number for number, piece in enumerate(sorted(set().union(*cut)))}
    sets = [_bits([numbers[piece] for piece in pieces], len(numbers)) for pieces in cut]
    found: list[int | None] = [None] * len(items)

    def arrange(members: Collection[int], parent: int | None, known: int, longest: int) -> None:
        """Members come after `parent`, whose chain has the pieces `known`, or after each other."""
        new = {member: sets[member] & ~known for member in members}
        below = defaultdict(list)
        for member, head in _nearest(new).items():
            found[member] = parent if head is None else head
            if head is not None:
                below[head].append(member)
        if longest > 2:
            for head, others in below.items():
                arrange(others, head, known | sets[head], longest - 1)

    arrange(range(len(items)), None, 0, longest)
    return found


def _nearest(sets: Mapping[int, int]) -> dict[int, int | None]:
    """For each item the head that it comes after; None for heads, and for what has nothing in common with any."""
    cost = {item: pieces.bit_count() for item, pieces in sets.items()}
    nearest: dict[int, int | None] = dict.fromkeys(sets)
    left = dict(cost)
    after: dict[int, dict[int, int]] = {}  # what each item costs after a head

    def gain(head: int) -> int:
        if head not in after:
            others = ~sets[head]
            after[head] = {item: (pieces & others).bit_count() for item, pieces in sets.items() if item != head}
        return sum(left[item] - new for item, new in after[head].items() if new < left[item]) - cost[head] + left[head]

    # A gain only shrinks when others are chosen, so that a head whose gain is still the largest is the best.
    queue = [(-gain(head), head) for head in sets]
    heapq.heapify(queue)
    while queue:
        head = heapq.heappop(queue)[1]
        now = gain(head)
        if queue and now < -queue[0][0]:
            heapq.heappush(queue, (-now, head))
        elif now <= 0:
            break
        else:
            for item, new in after[head].items():
                if new < left[item]:
                    left[item], nearest[item] = new, head
            # Nothing takes a head away from what comes after it.
            left[head], nearest[head] = 0, None
    return nearest


def _bits(numbers: Sequence[int], size: int) -> int:
    found = bytearray(size // 8 + 1)
    for number in numbers:
        found[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(found, "little")
