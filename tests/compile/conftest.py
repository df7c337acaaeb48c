"""Fixtures that several tests of processes share."""

from processes import start

__all__ = ["start"]
