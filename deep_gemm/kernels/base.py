"""What a kernel module gives to everything else: its configs, its template's fields, its cases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from ..arch import ArchSpec
from ..params import GemmConfig, KernelParams

ConfigT = TypeVar("ConfigT", bound=GemmConfig)


class Kernel(ABC, Generic[ConfigT]):
    """One kernel family: a template and the Python that knows what may be put into it.

    Discovery, the golden renders, the compile tests, the GPU accuracy tests and precompilation follow from an instance
    named ``KERNEL`` in a module of this package.
    """

    name: str
    """The family's name, and the template's: ``templates/kernels/<name>.cu.jinja``."""

    archs: tuple[str, ...]
    """Compiler targets that it can be built for."""

    config_class: type[ConfigT]
    """What configs of this family are: it tells the family."""

    mma_instruction: str = ""
    """The tensor-core instruction that its SASS must hold; empty for a kernel without one."""

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.cu.jinja"

    @abstractmethod
    def configs(self, arch: ArchSpec) -> Iterator[ConfigT]:
        """Every config that is legal on ``arch``, each once."""

    @abstractmethod
    def illegal(self, config: ConfigT, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, as a sentence, or None if it can."""

    def store(self, config: ConfigT, d_tma: bool) -> str:
        """How ``config`` stores its output: "tma" where D's rows allow that, else "direct"."""
        return "tma" if d_tma else "direct"

    @abstractmethod
    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """The template's variables, all of them and no others."""

    @abstractmethod
    def shared_bytes(self, params: KernelParams) -> int:
        """Dynamic shared memory of one CTA."""

    @abstractmethod
    def entry(self, params: KernelParams) -> str:
        """The extern "C" name of the kernel: readable in a profiler, and a safe file name."""

    @abstractmethod
    def cases(self) -> list[KernelParams]:
        """The instances that tests compile and run: every template branch at least once."""
