"""The driver's library and its version, asked without initialising CUDA and without importing cuda.bindings."""

from __future__ import annotations

import ctypes
import functools


@functools.lru_cache(maxsize=1)
def driver_library() -> ctypes.CDLL | None:
    """libcuda, or None where no driver is installed. Loading it initialises nothing."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def driver_version() -> int | None:
    """1000 * major + 10 * minor of the CUDA version that the driver supports (13000), or None without a driver."""
    library = driver_library()
    if library is None:
        return None
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    # The stub library that toolkits carry for linking answers with an error.
    return version.value if status == 0 and version.value > 0 else None


def driver_release() -> tuple[int, int] | None:
    """`driver_version` as (major, minor)."""
    version = driver_version()
    return None if version is None else (version // 1000, version % 1000 // 10)
