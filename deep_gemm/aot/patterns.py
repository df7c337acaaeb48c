"""Regular expressions of a model's config, which come from whoever made the model. `re` has no limit of time, so those
that could take long are refused."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

MOST_REPEATS = 4
"""Unbounded or varying repeats of one pattern, without those of digits: a name may be searched once for each of its
places, for each repeat."""
MOST_WAYS = 1 << 12
"""Combinations of what a pattern's choices and optional parts may be."""


class Item(NamedTuple):
    """An item of a parsed pattern: its operation, the least and the most times it comes, what it holds."""

    name: str
    least: int
    most: int
    bodies: tuple[Any, ...]

    @property
    def varies(self) -> bool:
        return self.name == "BRANCH" or self.least != self.most


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, compiled. Raises ValueError, with the end of a sentence, if it is none, or could take long."""
    try:
        found, items = re.compile(pattern), list(_items(_parser().parse(pattern)))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    if any(item.name.startswith("GROUPREF") for item in items):
        raise ValueError("it refers to a group, which can take very long to match: write the text again")
    if any(item.most > 1 and any(inner.varies for body in item.bodies for inner in _items(body)) for item in items):
        raise ValueError("it repeats a group that varies, which can take very long to match: write .* for the group")
    repeats = sum(item.varies and item.most > 1 and not _is_digits(item.bodies[0]) for item in items)
    if repeats > MOST_REPEATS:
        raise ValueError(f"it has {repeats} repeats, which can take very long to match: {MOST_REPEATS} at most")
    ways = math.prod(max(2, len(item.bodies)) for item in items if item.varies and item.most == 1)
    if ways > MOST_WAYS:
        raise ValueError(f"its choices combine in {ways} ways, which can take very long to match: {MOST_WAYS} at most")
    return found


def _parser() -> Any:
    return getattr(re, "_parser", None) or importlib.import_module("sre_parse")  # of Python 3.10


def _is_digits(body: Any) -> bool:
    return str(body) in ("[(IN, [(CATEGORY, CATEGORY_DIGIT)])]", "[(IN, [(RANGE, (48, 57))])]")


def _items(parsed: Iterable[Any]) -> Iterator[Item]:
    for operation, argument in parsed:
        name, least, most = str(operation), 1, 1
        bodies: tuple[Any, ...] = ()
        if name.endswith("REPEAT"):
            least, most, body = argument
            bodies = (body,)
        elif name == "BRANCH":
            bodies = tuple(argument[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            bodies = (argument[-1],)
        elif name == "ATOMIC_GROUP":
            bodies = (argument,)
        yield Item(name, int(least), int(most), bodies)
        for body in bodies:
            yield from _items(body)
