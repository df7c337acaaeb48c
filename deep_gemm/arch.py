"""GPU generations: what each can do, and what a kernel may ask of it."""

from __future__ import annotations

import functools

from .errors import InvalidInputError, UnsupportedError
from .records import record


@record(frozen=True)
class ArchSpec:
    """Limits of one architecture, as its vendor publishes them. Sizes in bytes, per CTA or per SM as named."""

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

_ARCHS = {spec.name: spec for spec in (SM90,)}

DEFAULT = SM90
"""What kernels are compiled for where no GPU and no argument says another."""


def names() -> tuple[str, ...]:
    """The architectures that have kernels."""
    return tuple(_ARCHS)


def capabilities() -> tuple[tuple[int, int], ...]:
    """Their compute capabilities."""
    return tuple(spec.capability for spec in _ARCHS.values())


def get(name: str) -> ArchSpec:
    """The spec of compiler target ``name``, such as ``"sm_90a"``. Raises InvalidInputError for an unknown one."""
    try:
        return _ARCHS[name]
    except KeyError:
        known = ", ".join(_ARCHS)
        raise InvalidInputError(
            f"arch is {name!r}, but there are kernels for {known} only; pass one of these."
        ) from None


def for_capability(capability: tuple[int, int], device_name: str = "this GPU") -> ArchSpec:
    """The spec for a compute capability. Raises UnsupportedError where there is none."""
    for spec in _ARCHS.values():
        if spec.capability == capability:
            return spec
    have = ", ".join(f"{s.capability[0]}.{s.capability[1]}" for s in _ARCHS.values())
    raise UnsupportedError(
        f"{device_name} has compute capability {capability[0]}.{capability[1]}, and deep_gemm has kernels for {have} "
        f"only. Set DG_FALLBACK=torch to run a slow reference implementation there instead, or "
        "DG_FALLBACK=cublaslt,torch to ask cuBLAS first."
    )


@functools.cache
def for_device(index: int) -> ArchSpec:
    """The spec of CUDA device ``index``. Raises UnsupportedError for a GPU without kernels."""
    import torch

    return for_capability(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))


@functools.cache
def has_kernels(index: int) -> bool:
    """Whether there are kernels for CUDA device ``index``."""
    try:
        for_device(index)
    except UnsupportedError:
        return False
    return True


@functools.cache
def target(index: int) -> str:
    """The compiler's name for CUDA device ``index``, with kernels of ours or without: "sm_90a", "sm_80"."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    # From Hopper on, instructions such as wgmma belong to one architecture alone, and its name ends in "a".
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def device_sms(index: int) -> int:
    """How many SMs CUDA device ``index`` has."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)
