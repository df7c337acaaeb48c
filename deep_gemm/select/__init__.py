"""Choosing a config for a problem: an analytic model ranks every legal one. Pure functions; no GPU needed."""

from .heuristic import Choice, candidates, legal, order, rank, representative, representatives, select
from .model import Estimate

__all__ = ["Choice", "Estimate", "candidates", "legal", "order", "rank", "representative", "representatives", "select"]
