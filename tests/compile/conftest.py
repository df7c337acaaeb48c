"""Fixtures that several tests of compilers and processes share."""

from processes import start

__all__ = ["start"]
