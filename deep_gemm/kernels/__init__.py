"""Kernel families, and which can compute a spec. ``families.py`` lists them; there is no other list."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..spec import GemmSpec, Spec
from .base import Kernel
from .families import FAMILIES, GEMMS
from .gemm import GemmFamily


@functools.lru_cache(maxsize=1)
def registry() -> Mapping[str, Kernel]:
    """Every kernel family by name."""
    return MappingProxyType({family.name: family for family in FAMILIES})


def get(name: str) -> Kernel:
    """The kernel family called ``name``; KeyError if there is none."""
    return registry()[name]


def gemm(name: str) -> GemmFamily:
    """The GEMM family called ``name``; KeyError if there is none."""
    return _gemms()[name]


@functools.lru_cache(maxsize=1)
def _gemms() -> Mapping[str, GemmFamily]:
    return {family.name: family for family in GEMMS}


def for_spec(spec: GemmSpec, arch: ArchSpec | None = None) -> list[GemmFamily]:
    """The families that can compute ``spec`` and, if ``arch`` is given, can be built for it. Raises UnsupportedError,
    with each family's reason, if there is none."""
    reasons = {family: _refusal(family, spec, arch) for family in GEMMS}
    found = [family for family, reason in reasons.items() if reason is None]
    return found or _raise(spec, reasons)


def for_helper(spec: Spec, arch: ArchSpec) -> Kernel:
    """The family that computes a spec that is no GEMM. Raises UnsupportedError if there is none."""
    reasons = {family: _refusal(family, spec, arch) for family in FAMILIES if family not in GEMMS}
    return next((family for family, reason in reasons.items() if reason is None), None) or _raise(spec, reasons)


def _refusal(family: Kernel, spec: Spec, arch: ArchSpec | None) -> str | None:
    if arch is not None and arch.name not in family.archs:
        return f"it is built for {', '.join(family.archs)}, not for {arch.name}"
    return family.refuses(spec)


def _raise(spec: Spec, reasons: Mapping[Kernel, str | None]) -> Sequence[GemmFamily]:
    listed = " ".join(f"{family.name}: {reason}." for family, reason in reasons.items())
    raise UnsupportedError(f"There is no kernel for {spec}. {listed}")
