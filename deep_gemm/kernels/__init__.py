"""Kernel families. Each module here that has a ``KERNEL`` is a family; there is no other list."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..params import KernelConfig
from ..spec import Spec
from .base import Kernel


@functools.lru_cache(maxsize=1)
def registry() -> dict[str, Kernel[Any]]:
    """Every kernel family by name."""
    found: dict[str, Kernel[Any]] = {}
    for module in pkgutil.iter_modules(__path__):
        kernel = getattr(importlib.import_module(f"{__name__}.{module.name}"), "KERNEL", None)
        if kernel is not None:
            found[kernel.name] = kernel
    return found


def get(name: str) -> Kernel[Any]:
    """The kernel family called ``name``; KeyError if there is none."""
    return registry()[name]


def of(config: KernelConfig) -> Kernel[Any]:
    """The kernel family that ``config`` is a config of; LookupError if there is none."""
    for kernel in registry().values():
        if type(config) is kernel.config_class:
            return kernel
    raise LookupError(f"no kernel takes a {type(config).__name__}")


def for_spec(spec: Spec, arch: ArchSpec | None = None) -> list[Kernel[Any]]:
    """The families that can compute ``spec`` and, if ``arch`` is given, can be built for it. Raises UnsupportedError,
    with each family's reason, if there is none."""

    def refuses(kernel: Kernel[Any]) -> str | None:
        reason = kernel.refuses(spec)
        if reason is None and arch is not None and arch.name not in kernel.archs:
            return f"it is built for {', '.join(kernel.archs)}, not for {arch.name}"
        return reason

    reasons = {kernel: refuses(kernel) for kernel in registry().values()}
    found = [kernel for kernel, reason in reasons.items() if reason is None]
    if not found:
        listed = " ".join(f"{kernel.name}: {reason}." for kernel, reason in reasons.items())
        raise UnsupportedError(f"There is no kernel for {spec}. {listed}")
    return found
