"""NVCC as a child process."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit.bursts import in_bursts
from deep_gemm.jit.cache.files import sweep
from deep_gemm.jit.compilers.base import Compiled, Compiler
from deep_gemm.jit.resources import ptxas_seconds
from deep_gemm.log import say
from deep_gemm.settings import child_environment, settings

_RELEASE = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")
_BUILD = re.compile(r"^Build (\S+)", re.MULTILINE)
# Both add options behind our back: the key could not know of them.
_HIDDEN_FLAGS = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
_TIMEOUT = 60.0
_FOLDER = "deep_gemm-nvcc-"


class Nvcc(Compiler):
    """The nvcc at `path`. Asks it for its version; raises CompilerNotFoundError if that is no nvcc that runs."""

    kind = "nvcc"

    def __init__(self, path: str) -> None:
        self.path = path
        self._swept = False
        try:
            result = _run([path, "--version"], timeout=_TIMEOUT)
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
        self._sweep()
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
                return self._compile(name, source_path, options, Path(folder), want_ptx, start)
        except OSError as error:
            raise CompileError(
                f"{self.path} could not be run for {name}: {error}. It needs a directory for temporary files; NVRTC "
                "(DG_JIT_USE_NVRTC=1) needs none.",
                source_path=source_path,
                options=options,
            ) from error

    def _sweep(self) -> None:
        """What processes left that were killed while nvcc ran, which goes on without them."""
        if not self._swept:
            self._swept = True
            with contextlib.suppress(OSError):  # no temporary directory: compiling will say so
                sweep(Path(tempfile.gettempdir()), prefix=_FOLDER)

    def _compile(
        self, name: str, source_path: str, options: list[str], folder: Path, want_ptx: bool, start: float
    ) -> Compiled:
        output = folder / "kernel.cubin"
        keep = ["--keep", f"--keep-dir={folder}"] if want_ptx else []
        command = [self.path, *options, *keep, "-o", str(output), source_path]
        if settings.print_compiler_command:
            say(shlex.join(command))
        # In its own folder, so that no header of the current directory is found and nothing is left there.
        result = _run(command, cwd=folder)
        log = result.stdout + result.stderr
        if result.returncode or not output.is_file():
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
            ptx = kept[0].read_text(errors="replace") if kept else None
        resources = self._resources(log, name, source_path, options)
        cubin = in_bursts(output.read_bytes(), name)
        return Compiled(cubin, ptx, log, resources, seconds, tuple(options))

    def host_compiler_problem(self) -> str | None:
        """What keeps nvcc from preprocessing, which it leaves to a host C++ compiler; None if nothing does."""
        try:
            with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
                probe = Path(folder) / "probe.cu"
                probe.write_text("\n")
                result = _run([self.path, "-E", "-o", str(Path(folder) / "probe.ii"), str(probe)], timeout=_TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        return None if result.returncode == 0 else (result.stderr.strip() or f"exit status {result.returncode}")


def _run(command: list[str], timeout: float | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        cwd=cwd,
        env=child_environment(*_HIDDEN_FLAGS),
        stdin=subprocess.DEVNULL,
        check=False,
    )
