"""Kernel families, and which can compute a spec.

``families.py`` lists GEMMs, and ``other_families.py`` all others; there is no other list. A process imports what it
needs: importing all would take a third of a first call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..arch import WITHOUT_KERNELS, ArchSpec
from ..errors import UnsupportedError
from ..spec import GemmSpec, Spec
from .other_families import OTHERS

if TYPE_CHECKING:
    from .base import KernelFamily
    from .gemm import GemmFamily

KernelT = TypeVar("KernelT", bound="KernelFamily")


@functools.lru_cache(maxsize=1)
def registry() -> Mapping[str, KernelFamily]:
    """Every kernel family by name."""
    return MappingProxyType({**gemms(), **_others()})


@functools.cache
def get(name: str) -> KernelFamily:
    """The kernel family called ``name``; KeyError if there is none."""
    others = [of for of, (known, *_) in OTHERS.items() if known == name]
    return _other(others[0]) if others else gemms()[name]


def gemm_family(name: str) -> GemmFamily:
    """The GEMM family called ``name``; KeyError if there is none."""
    return gemms()[name]


@functools.lru_cache(maxsize=1)
def gemms() -> Mapping[str, GemmFamily]:
    """The GEMM families by name."""
    from .families import GEMMS  # here: casts need none of them

    return {family.name: family for family in GEMMS}


def _others() -> Mapping[str, KernelFamily]:
    return {family.name: family for family in map(_other, OTHERS)}


@functools.cache
def _other(of: type) -> KernelFamily:
    """The family that computes specs of this type."""
    _, module, name = OTHERS[of]
    found: KernelFamily = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found


def for_spec(spec: GemmSpec, arch: ArchSpec | None = None) -> list[GemmFamily]:
    """The families that can compute ``spec`` and, if ``arch`` is given, can be built for it. Raises UnsupportedError,
    with each family's reason, if there is none."""
    every = list(gemms().values())
    likely = [family for family in every if spec.grouping in family.groupings and spec.a.dtype in family.dtypes]
    # All are asked only for the reasons of each.
    return [family for family in likely if _reason(family, spec, arch) is None] or _able(every, spec, arch)


def memory_bytes(spec: GemmSpec, arch: ArchSpec) -> int:
    """Bytes of the operand ``memory``, in which parts of K meet, that kernels for ``spec`` need at most."""
    here = [family for family in gemms().values() if arch.name in family.archs and spec.grouping in family.groupings]
    return max((family.template.memory_bytes(spec) for family in here), default=0)


def for_helper(spec: Spec, arch: ArchSpec) -> KernelFamily:
    """The family that computes a spec that is no GEMM. Raises UnsupportedError if there is none."""
    of: type = type(spec)
    own = _other(of)
    # All are asked only for the reasons of each.
    return own if _reason(own, spec, arch) is None else _able(list(_others().values()), spec, arch)[0]


def _able(families: Sequence[KernelT], spec: Spec, arch: ArchSpec | None) -> list[KernelT]:
    reasons = {family: family.refuses(spec) for family in families}
    here = {family: reason for family, reason in reasons.items() if arch is None or arch.name in family.archs}
    found = [family for family, reason in here.items() if reason is None]
    if found:
        return found
    elsewhere = [family for family, reason in reasons.items() if reason is None]
    if elsewhere and arch is not None:
        targets = ", ".join(dict.fromkeys(name for family in elsewhere for name in family.archs))
        names = ", ".join(family.name for family in elsewhere)
        from .gemm import instead  # here: casts need none of it

        raise UnsupportedError(
            f"There is no kernel for {spec}. It needs another GPU than {arch.name}: {names} can be built for {targets} "
            f"only. {instead(spec)}{WITHOUT_KERNELS}"
        )
    listed = " ".join(f"{family.name}: {reason}." for family, reason in here.items())
    raise UnsupportedError(f"There is no kernel for {spec}. {listed}")


def _reason(family: KernelFamily, spec: Spec, arch: ArchSpec | None) -> str | None:
    """Why ``family`` cannot compute ``spec`` on ``arch``, as a sentence, or None if it can."""
    if arch is not None and arch.name not in family.archs:
        return f"it is built for {', '.join(family.archs)}, not for {arch.name}"
    return family.refuses(spec)
