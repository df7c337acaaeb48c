"""The package's logger, warnings that are logged once, and the output of `DG_*` print settings."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading

log = logging.getLogger("deep_gemm")

_said: set[str] = set()
_lock = threading.Lock()


def warn_once(key: str, message: str) -> None:
    """Log `message` as a warning unless a message with the same `key` was logged in this process before."""
    with _lock:
        if key in _said:
            return
        _said.add(key)
    log.warning(message)


def say(message: str) -> None:
    """Print the output of a setting such as DG_JIT_PRINT_COMPILER_COMMAND: on stderr, whatever the logging level. A
    process may have closed that."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"deep_gemm: {message}", file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """A number and what it counts: "1 kernel", "2 kernels"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(us: float) -> str:
    """Microseconds as a person reads them: "8.2 us", "140 ms", "2.1 s"."""
    if us < 1e3:
        return f"{us:.1f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def rate(value: float) -> str:
    """A rate, to three digits: "0.0252", "98.1", "1,370"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def reset_warnings() -> None:
    """Forget which warnings were logged, so that a test can see one again."""
    with _lock:
        _said.clear()


def _after_fork() -> None:
    # A thread of the parent may have held the lock during the fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
