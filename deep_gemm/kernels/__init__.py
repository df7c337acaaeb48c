"""Kernel families, and which can compute a spec.

``families.py`` lists GEMMs, and ``other_families.py`` all others; there is no other list. A process imports the list
that it needs: importing both would take a third of a first call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..spec import GemmSpec, Spec

if TYPE_CHECKING:
    from .base import Kernel
    from .gemm import GemmFamily

KernelT = TypeVar("KernelT", bound="Kernel")


@functools.lru_cache(maxsize=1)
def registry() -> Mapping[str, Kernel]:
    """Every kernel family by name."""
    return MappingProxyType({**_gemms(), **_others()})


@functools.cache
def get(name: str) -> Kernel:
    """The kernel family called ``name``; KeyError if there is none."""
    # What was imported already first: a process that casts needs no GEMM, and the reverse.
    for families in sorted((_gemms, _others), key=lambda each: -each.cache_info().currsize):
        if name in (known := families()):
            return known[name]
    raise KeyError(name)


def gemm_family(name: str) -> GemmFamily:
    """The GEMM family called ``name``; KeyError if there is none."""
    return _gemms()[name]


@functools.lru_cache(maxsize=1)
def _gemms() -> Mapping[str, GemmFamily]:
    from .families import GEMMS  # here: a call of a warmed process needs none of them until it launches

    return {family.name: family for family in GEMMS}


@functools.lru_cache(maxsize=1)
def _others() -> Mapping[str, Kernel]:
    from .other_families import OTHERS

    return {family.name: family for family in OTHERS}


def for_spec(spec: GemmSpec, arch: ArchSpec | None = None) -> list[GemmFamily]:
    """The families that can compute ``spec`` and, if ``arch`` is given, can be built for it. Raises UnsupportedError,
    with each family's reason, if there is none."""
    return _able(list(_gemms().values()), spec, arch)


def for_helper(spec: Spec, arch: ArchSpec) -> Kernel:
    """The family that computes a spec that is no GEMM. Raises UnsupportedError if there is none."""
    return _able(list(_others().values()), spec, arch)[0]


def _able(families: Sequence[KernelT], spec: Spec, arch: ArchSpec | None) -> list[KernelT]:
    def refuses(family: Kernel) -> str | None:
        if arch is not None and arch.name not in family.archs:
            return f"it is built for {', '.join(family.archs)}, not for {arch.name}"
        return family.refuses(spec)

    reasons = {family: refuses(family) for family in families}
    found = [family for family, reason in reasons.items() if reason is None]
    if not found:
        listed = " ".join(f"{family.name}: {reason}." for family, reason in reasons.items())
        raise UnsupportedError(f"There is no kernel for {spec}. {listed}")
    return found
