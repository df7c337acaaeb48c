"""The debug record: what was decided for each plan, and why."""

from __future__ import annotations

import atexit
import json
import platform
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from deep_gemm.errors import InvalidInputError
from deep_gemm.log import warn_once
from deep_gemm.settings import settings

_lock = threading.Lock()
_plans: dict[Hashable, Callable[[], dict[str, Any]]] = {}
_castings: dict[Hashable, Callable[[], dict[str, Any]]] = {}
_dump_registered = False


def add_plan(key: Hashable, entry: Callable[[], dict[str, Any]]) -> None:
    """Keep ``entry``, which makes the entry of the plan ``key``, instead of an earlier one. If DG_JIT_DEBUG_DUMP names
    a file, the record is written to it at exit."""
    global _dump_registered
    with _lock:
        _plans[key] = entry
        if not _dump_registered and settings.debug_dump:
            _dump_registered = True
            atexit.register(_dump_at_exit)


def add_casting(key: Hashable, entry: Callable[[], dict[str, Any]]) -> None:
    """Keep ``entry``, which says in how many launches the product ``key`` with an FP8 D is computed."""
    with _lock:
        _castings[key] = entry


def debug_info() -> dict[str, Any]:
    """Versions, settings that differ from their defaults, build statistics, and one entry for each plan: the problem,
    the config and the next best with the model's estimates, where the binary came from, its resources, and times in
    seconds. ``castings`` has one for each product with a d of FP8: the launches, and the estimates of one and of two.
    JSON-ready.

    >>> sorted(deep_gemm.debug_info())
    ['builder', 'castings', 'driver', 'plans', 'python', 'settings', 'torch']
    """
    import torch

    from deep_gemm.jit.builder import default_builder
    from deep_gemm.jit.driver.version import driver_release

    release = driver_release()
    with _lock:
        plans, castings = list(_plans.values()), list(_castings.values())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "driver": ".".join(map(str, release)) if release else None,
        "settings": {
            described.attribute: _plain(described.value)
            for described in settings.describe()
            if described.value != described.default
        },
        "builder": default_builder().stats,
        "plans": [entry() for entry in plans],
        "castings": [entry() for entry in castings],
    }


def _plain(value: Any) -> Any:
    """A setting's value in JSON: paths become text, and several paths a list."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def dump_debug_info(path: str | Path) -> None:
    """Write `debug_info` to ``path`` as JSON, whole or not at all. Raises OSError if it cannot be written, as where a
    link or anything but a file is there, and InvalidInputError for what is no path.

    >>> deep_gemm.dump_debug_info("debug.json")
    """
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise InvalidInputError(f"path must be the path of a file, without a zero byte, but it is {path!r}.")
    from deep_gemm.jit.cache.files import write_whole  # here: few processes write one

    target = Path(path)
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise OSError(f"{target} is a link, or no regular file")
    write_whole(target, [f"{json.dumps(debug_info(), indent=1)}\n".encode()])


def _dump_at_exit() -> None:
    path = settings.debug_dump
    try:
        if path:
            dump_debug_info(path)
    except OSError as error:
        warn_once("debug-dump", f"DG_JIT_DEBUG_DUMP could not be written to {path}: {error}.")
