"""What a compiler is: an identity, flags, and one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit.resources import Resources, parse_ptxas
from deep_gemm.records import record
from deep_gemm.settings import settings

_TRIAL = 'extern "C" __global__ void trial(int* out) { *out = 1; }\n'

# The first toolkit that compiles wgmma for sm_90a well.
MIN_VERSION = (12, 3)

FIRST_VERSIONS: Mapping[str, tuple[int, int]] = {"sm_100a": (12, 8), "sm_120a": (12, 8), "sm_103a": (12, 9)}
"""The first toolkits that know newer targets."""

_TRIAL_TARGET = "sm_80"  # all toolkits from MIN_VERSION on know it


@record(frozen=True)
class Compiled:
    """A cubin and what the compiler said. `seconds` has "compile" (all of it) and "ptxas" where that is known.

    `options` are the options as given, paths included: for the record, not for the key.
    """

    cubin: bytes
    ptx: str | None
    log: str
    resources: Resources
    seconds: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def common_flags() -> tuple[str, ...]:
    """The options that every compiler gets under the current settings: they decide what a kernel means and how it can
    be debugged."""
    flags = ["-std=c++17"]
    if settings.lineinfo:
        flags.append("-lineinfo")
    if settings.debug:
        # Device code then bounds its barrier waits and traps where it would hang.
        flags.append("-DDG_DEBUG=1")
    return tuple(flags)


class Compiler(ABC):
    """One installed compiler.

    `identity` tells its exact build and holds no path; `version` is (major, minor) of its toolkit; `path` is for
    messages only. `compile` is called from several threads at once.
    """

    kind: str
    path: str
    identity: str
    version: tuple[int, int]

    @property
    def cuda_version(self) -> tuple[int, int]:
        return self.version

    def flags(self, arch: str) -> tuple[str, ...]:
        """The options that decide the binary under the current settings, without paths: they are part of the key.
        Raises CompilerNotFoundError if this compiler is too old for the target ``arch``."""
        first = FIRST_VERSIONS.get(arch, self.version)
        if self.version < first:
            here, needed = (".".join(map(str, version)) for version in (self.version, first))
            raise CompilerNotFoundError(
                f"{self.path} is of CUDA {here}, which cannot compile for {arch}: CUDA {needed} or newer can. Install "
                "a newer one: `pip install -U nvidia-cuda-nvrtc-cu12`, or set CUDA_HOME to a newer toolkit."
            )
        return (*self.arch_flags(arch), *common_flags())

    @abstractmethod
    def arch_flags(self, arch: str) -> tuple[str, ...]:
        """The flags of this compiler alone, target included."""

    @abstractmethod
    def compile(
        self,
        name: str,
        source: str,
        source_path: str,
        flags: Sequence[str],
        include_dir: Path | None,
        want_ptx: bool = False,
    ) -> Compiled:
        """Compile the kernel `name`. Raises CompileError with the log, the source's path and the options.

        `source_path` is the file's name in messages and line information; a file compiler reads it.
        """

    def problem(self) -> str | None:
        """Why this compiler cannot compile a one-line kernel (a broken host compiler, for example), or None if it
        can."""
        try:
            self.compile("trial", _TRIAL, "trial.cu", self.flags(_TRIAL_TARGET), None)
        except CompileError as error:
            lines = [line.strip() for line in error.log.splitlines() if line.strip()]
            telling = [line for line in lines if "error" in line or "fatal" in line or "not found" in line]
            return (telling or lines or [error.summary])[0].rstrip(".")
        return None

    def _checked(self, cubin: bytes, log: str, source_path: str, options: Sequence[str]) -> bytes:
        if not cubin.startswith(b"\x7fELF"):
            raise CompileError(
                f"{self.identity} reported no error, but its output is no cubin: it has {len(cubin)} bytes and begins "
                f"with {cubin[:4]!r}.",
                log=log,
                source_path=source_path,
                options=options,
            )
        return cubin

    def _resources(self, log: str, name: str, source_path: str, options: Sequence[str]) -> Resources:
        resources = parse_ptxas(log, name)
        if resources is None:
            raise CompileError(
                f'{self.identity} compiled the source but reported no entry function {name!r}: is it extern "C" '
                "__global__ under that name?",
                log=log,
                source_path=source_path,
                options=options,
            )
        return resources
