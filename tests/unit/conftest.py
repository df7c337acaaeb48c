"""Fixtures that several unit tests share."""

from driver_fakes import driver, function

__all__ = ["driver", "function"]
