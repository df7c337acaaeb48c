"""Choosing a config for a problem: an analytic model ranks every legal one. Pure functions; no GPU needed."""

from .casts import Casting, all_launches, casting
from .heuristic import Choice, candidates, legal, order, rank, representative, representatives, select
from .model import Estimate

__all__ = [
    "Casting",
    "Choice",
    "Estimate",
    "all_launches",
    "candidates",
    "casting",
    "legal",
    "order",
    "rank",
    "representative",
    "representatives",
    "select",
]
