"""Metrics of the cache for a service: where it is, what it holds, and what this process did with it."""

from __future__ import annotations

import os
from typing import Any

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.builder import ERRORS, HITS, Builder, default_builder
from deep_gemm.settings import settings


def cache_info(builder: Builder | None = None) -> dict[str, Any]:
    """The cache and what this process did with it, as plain JSON. Touches no GPU and creates nothing.

    "root" (None without a home directory), "exists", "writable", "problem" (why it cannot be used, or None), "entries",
    "bytes", "groups" by arch, CUDA and driver. "limits": "bytes" is DG_JIT_CACHE_LIMIT; None means no limit. "packs" in
    the order in which they are searched, each with path, by (who names it), kernels, bytes and problem (None if it is
    used). "statistics" from `Builder.stats`: a kernel that is loaded already is not looked up again, so its calls are
    no hits. Raises SettingError for an invalid setting.

    `builder` defaults to the one of this process.

    >>> "root" in deep_gemm.cache_info()
    True
    """
    builder = default_builder() if builder is None else builder
    if not isinstance(builder, Builder):
        raise InvalidInputError(f"builder must be None or a Builder, but it is {builder!r}.")
    disk = builder.disk()
    info: dict[str, Any] = {"root": None, "exists": False, "writable": False, "entries": 0, "bytes": 0, "groups": []}
    info["problem"] = "there is no home directory; set DG_JIT_CACHE_DIR"
    if disk is not None:
        info = disk.info()
        if not info["writable"] and info["problem"] is None:
            info["problem"] = (
                f"user {os.geteuid()} cannot write to {disk.root}; set DG_JIT_CACHE_DIR to another directory"
            )
    info["packs"] = [found.to_json() for found in builder.packs.found()]
    stats = builder.stats
    info["limits"] = {"bytes": settings.cache_limit, "entries": None, "lock_seconds": builder.lock_limit}
    info["statistics"] = {
        "hits": {layer: stats[layer] for layer in HITS},
        "misses": stats["misses"],
        "adopted": stats["adopted"],
        "compilations": stats["compiled"],
        "compile_seconds": stats["compile_seconds"],
        "evictions": stats["evictions"],
        "errors": {name: stats[name] for name in ERRORS},
    }
    return info
