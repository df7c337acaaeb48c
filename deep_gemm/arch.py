"""GPU generations: what each can do, and what a kernel may ask of it."""

from __future__ import annotations

import functools
from dataclasses import replace

from .errors import InvalidInputError, UnsupportedError
from .records import record


@record(frozen=True)
class ArchSpec:
    """Limits of one architecture, as its vendor publishes them: CUDA C++ Programming Guide, "Technical Specifications
    per Compute Capability", and ``cuda::arch_traits`` of libcu++, which has the same. Sizes in bytes, per CTA or per SM
    as named. ``num_sms``: of a common GPU of it."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_per_cta: int
    shared_per_sm: int
    shared_reserved_per_cta: int

    def ctas_fit(self, shared_bytes: int, ctas: int) -> bool:
        """Whether ``ctas`` CTAs with this much dynamic shared memory each fit on one SM."""
        return shared_bytes <= self.shared_per_cta and (
            ctas * (shared_bytes + self.shared_reserved_per_cta) <= self.shared_per_sm
        )


SM90 = ArchSpec(
    name="sm_90a",
    capability=(9, 0),
    num_sms=132,
    shared_per_cta=227 * 1024,
    shared_per_sm=228 * 1024,
    shared_reserved_per_cta=1024,
)

SM80 = replace(SM90, name="sm_80", capability=(8, 0), num_sms=108, shared_per_cta=163 * 1024, shared_per_sm=164 * 1024)
SM86 = replace(SM90, name="sm_86", capability=(8, 6), num_sms=82, shared_per_cta=99 * 1024, shared_per_sm=100 * 1024)
SM89 = replace(SM86, name="sm_89", capability=(8, 9), num_sms=128)
SM100 = replace(SM90, name="sm_100a", capability=(10, 0), num_sms=148)
SM103 = replace(SM90, name="sm_103a", capability=(10, 3), num_sms=148)
SM120 = replace(SM86, name="sm_120a", capability=(12, 0), num_sms=170)

_ARCHS = {spec.name: spec for spec in (SM90, SM80, SM86, SM89, SM100, SM103, SM120)}

DEFAULT = SM90
"""What kernels are compiled for where no GPU and no argument says another."""

WITHOUT_KERNELS = (
    "Set DG_FALLBACK=torch to run a slow reference implementation there instead, or DG_FALLBACK=cublaslt,torch to ask "
    "cuBLAS first."
)
"""What to do where no kernel can be used."""


def names() -> tuple[str, ...]:
    """All architectures, `DEFAULT` first: the targets of kernels without instructions that some lack."""
    return tuple(_ARCHS)


@functools.cache
def get(name: str) -> ArchSpec:
    """The spec of compiler target ``name``, such as ``"sm_90a"``. Raises InvalidInputError for an unknown one."""
    try:
        return _ARCHS[name]
    except KeyError:
        known = ", ".join(_ARCHS)
        raise InvalidInputError(
            f"arch is {name!r}, but it must be one of {known}: the GPU's compute capability, with an a from 9.0 on."
        ) from None


def for_capability(capability: tuple[int, int], device_name: str = "this GPU") -> ArchSpec:
    """The spec for a compute capability. Raises UnsupportedError where there is none."""
    for spec in _ARCHS.values():
        if spec.capability == capability:
            return spec
    have = ", ".join(f"{major}.{minor}" for major, minor in sorted(spec.capability for spec in _ARCHS.values()))
    raise UnsupportedError(
        f"{device_name} has compute capability {capability[0]}.{capability[1]}, and deep_gemm supports {have} only. "
        f"{WITHOUT_KERNELS}"
    )


@functools.cache
def for_device(index: int) -> ArchSpec:
    """The spec of CUDA device ``index``. Raises UnsupportedError for a GPU that has none."""
    import torch

    return for_capability(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))


@functools.cache
def target(index: int) -> str:
    """The compiler's name for CUDA device ``index``, with kernels of ours or without: "sm_90a", "sm_80"."""
    import torch

    return target_of(*torch.cuda.get_device_capability(index))


def target_of(major: int, minor: int) -> str:
    """The compiler's name for a compute capability."""
    # From Hopper on, instructions such as wgmma belong to one architecture alone, and its name ends in "a".
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def has_dependent_launch(target: str) -> bool:
    """Whether kernels for a compiler target may be launched before the previous kernel has ended (programmatic
    dependent launch)."""
    return int("".join(filter(str.isdigit, target))) >= 90


@functools.cache
def device_sms(index: int) -> int:
    """How many SMs CUDA device ``index`` has."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)
