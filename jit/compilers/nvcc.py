"""NVCC as a child process."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit.cache.files import read
from deep_gemm.jit.compilers.base import Compiled, Compiler
from deep_gemm.jit.process import is_plain, private_directory, run
from deep_gemm.jit.resources import ptxas_seconds
from deep_gemm.log import say
from deep_gemm.settings import settings

_RELEASE = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")
_BUILD = re.compile(r"^Build (\S+)", re.MULTILINE)
_VERSION_LIMIT = 60.0
_COMPILE_LIMIT = 600.0
"""Seconds: far more than a kernel takes on a busy machine."""
_LARGEST = 1 << 28


class Nvcc(Compiler):
    """The nvcc at `path`. Asks it for its version; raises CompilerNotFoundError if that is no nvcc that runs."""

    kind = "nvcc"

    def __init__(self, path: str) -> None:
        self.path = path
        if set(os.path.realpath(path)) & set('$`"\\\n'):
            raise CompilerNotFoundError(f"{path!r} would be taken for a command by the shell that nvcc uses.")
        try:
            result = run([path, "--version"], _VERSION_LIMIT)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerNotFoundError(f"{path} cannot be run: {error}.") from error
        release = _RELEASE.search(result.stdout)
        if result.returncode or release is None:
            said = (result.stdout + result.stderr).strip() or "nothing"
            raise CompilerNotFoundError(f"`{path} --version` does not look like nvcc: it said {said[-400:]!r}.")
        build = _BUILD.search(result.stdout)
        self.version = (int(release.group(1)), int(release.group(2)))
        self.identity = f"nvcc {release.group(3)} build {build.group(1) if build else 'unknown'}"

    def arch_flags(self, arch: str) -> tuple[str, ...]:
        virtual = arch.replace("sm_", "compute_")
        return ("-cubin", f"-gencode=arch={virtual},code={arch}", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v")

    def compile(
        self,
        name: str,
        source: str,
        source_path: str,
        flags: Sequence[str],
        include_dir: Path | None,
        want_ptx: bool = False,
    ) -> Compiled:
        options = [*flags]
        if include_dir is not None:
            options.append(f"-I{include_dir}")
        start = time.perf_counter()
        try:
            with private_directory() as folder:
                text = source.encode("utf-8", "surrogatepass")  # as the key does
                (folder / "kernel.cu").write_bytes(_line(source_path) + text)
                return self._compile(name, source_path, options, include_dir, folder, want_ptx, start)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(
                f"{self.path} could not be run for {name}: {error}. It needs a directory for temporary files and has "
                f"{_COMPILE_LIMIT:.0f} s; NVRTC (DG_JIT_USE_NVRTC=1) needs no directory.",
                source_path=source_path,
                options=options,
            ) from error

    def _compile(
        self,
        name: str,
        source_path: str,
        options: list[str],
        include_dir: Path | None,
        folder: Path,
        want_ptx: bool,
        start: float,
    ) -> Compiled:
        output = folder / "kernel.cubin"
        given = list(options)
        if include_dir is not None and not is_plain(str(include_dir)):
            (folder / "include").symlink_to(include_dir.absolute())
            given[-1] = "-Iinclude"
        keep = ["--keep", "--keep-dir=."] if want_ptx else []
        command = [self.path, *given, *keep, "-o", output.name, "kernel.cu"]
        if settings.print_compiler_command:
            say(f"{shlex.join(command)}  # kernel.cu is {source_path}")
        # In its own folder, so that no header of the current directory is found and nothing is left there.
        result = run(command, _COMPILE_LIMIT, folder)
        log = result.stdout + result.stderr
        if result.returncode:
            raise CompileError(
                f"{self.identity} could not compile {name} (exit status {result.returncode}).",
                log=log,
                source_path=source_path,
                options=options,
            )
        seconds = {"compile": time.perf_counter() - start}
        ptxas = ptxas_seconds(log)
        if ptxas is not None:
            seconds["ptxas"] = ptxas
        ptx = None
        if want_ptx:
            kept = sorted(folder.glob("*.ptx"))
            ptx = kept[0].read_text("utf-8", "replace") if kept else None
        resources = self._resources(log, name, source_path, options)
        try:
            made = read(output, _LARGEST).data
        except (OSError, ValueError) as error:
            made = b""
            log += f"{output.name}: {error}\n"
        cubin = self._checked(made, log, source_path, options)
        return Compiled(cubin, ptx, log, resources, seconds, tuple(options))


def _line(source_path: str) -> bytes:
    """The directive that names the stored source in messages and line information; none for a name that cannot be
    written in PTX."""
    plain = source_path.isprintable() and not set(source_path) & set('"\\')
    return f'#line 1 "{source_path}"\n'.encode() if plain else b""
