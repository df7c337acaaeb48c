"""NVRTC through ctypes.

cuda.bindings loads only the NVRTC of its own major version, which need not be the one that the driver can use; and
ctypes releases the GIL, so that several threads compile at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.errors import CompileError, CompilerNotFoundError
from deep_gemm.jit.compilers import elf
from deep_gemm.jit.compilers.base import Compiled, Compiler
from deep_gemm.jit.compilers.signals import LimitReachedError, interruptible, keep_handlers
from deep_gemm.jit.forking import ForkLock, ForkWaits
from deep_gemm.jit.resources import ptxas_seconds
from deep_gemm.log import say, warn_once
from deep_gemm.settings import settings

_SIGNATURES = {
    "nvrtcVersion": [ctypes.POINTER(ctypes.c_int)] * 2,
    "nvrtcCreateProgram": [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ],
    "nvrtcDestroyProgram": [ctypes.POINTER(ctypes.c_void_p)],
    "nvrtcCompileProgram": [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    **{
        f"nvrtcGet{what}{suffix}": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t) if suffix else ctypes.c_char_p]
        for what in ("PTX", "CUBIN", "ProgramLog")
        for suffix in ("", "Size")
    },
}

_OWN_HANDLERS = (13, 0)
"""The last version that installs signal handlers of its own."""

_CACHES = (12, 9)
"""The first version that keeps binaries in the driver's compute cache. A binary from there comes without ptxas' report,
which a build needs: after our own cache was cleared, a kernel could not be built again."""

_EXIT_LIMIT = 3.0  # seconds
_COMPILE_LIMIT = 600.0
"""Seconds: far more than a kernel takes on a busy machine."""

# NVRTC holds locks while it compiles: of children that were forked meanwhile, one in ten hung when it compiled.
_at_work = ForkWaits(longest=_COMPILE_LIMIT)
_cancels: list[ctypes.Array[ctypes.c_char]] = []
"""What asks each compilation under way to end."""


def _end() -> None:
    """At exit. While C ends the process, it frees the memory of NVRTC, which would crash in a thread that compiles."""

    def cancel() -> None:
        for cancelled in _cancels.copy():
            cancelled.value = b"1"

    if not _at_work.close(cancel, _EXIT_LIMIT):
        # Its front end does not ask whether to end. C then ends the process with the same status and frees nothing.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        else:
            _at_work.close(cancel, 10 * _EXIT_LIMIT)


class Nvrtc(Compiler):
    """The NVRTC library at `path`, of toolkit `version`. It is opened by the first compilation and not before:
    a start that finds everything on disk then never pays for it."""

    kind = "nvrtc"

    def __init__(self, path: str, version: tuple[int, int]) -> None:
        self.path = path
        self.version = version
        try:
            self.identity = f"nvrtc {version[0]}.{version[1]} build {elf.identity(path)}"
        except (OSError, ValueError) as error:
            raise CompilerNotFoundError(f"{path} cannot be used as NVRTC: {error}.") from error
        self._library: ctypes.CDLL | None = None
        self._lock = ForkLock()

    def arch_flags(self, arch: str) -> tuple[str, ...]:
        # -default-device lets a plain constexpr function be called, as --expt-relaxed-constexpr does for NVCC.
        flags = (f"--gpu-architecture={arch}", "-default-device", "--ptxas-options=-v")
        return (*flags, "--no-cache") if self.version >= _CACHES else flags

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
            options.append(f"--include-path={include_dir}")
        if settings.print_compiler_command:
            say(f"{self.path} {' '.join(options)} {source_path}")
        # NVRTC calls back 10,000 times. C's atoi, which reads a number from text, answers without the GIL.
        cancelled = ctypes.create_string_buffer(b"0", 2)
        for_main = threading.current_thread() is threading.main_thread()

        def work() -> Compiled:
            _cancels.append(cancelled)
            try:
                return _at_work.run(
                    lambda: self._compile(name, source, source_path, options, want_ptx, cancelled), for_main
                )
            finally:
                _cancels.remove(cancelled)

        try:
            return interruptible(work, lambda: setattr(cancelled, "value", b"1"), _COMPILE_LIMIT)
        except LimitReachedError as error:
            raise CompileError(
                f"{self.identity} did not finish {name} within {_COMPILE_LIMIT:g} s. A thread of this process may go "
                "on with it until the process ends. Make the source simpler, or compile with NVCC.",
                source_path=source_path,
                options=options,
            ) from error

    def _compile(
        self,
        name: str,
        source: str,
        source_path: str,
        options: list[str],
        want_ptx: bool,
        cancelled: ctypes.Array[ctypes.c_char],
    ) -> Compiled:
        library = self._open()
        start = time.perf_counter()
        program = ctypes.c_void_p()
        text = source.encode("utf-8", "surrogatepass")  # as the key does
        # With line information, a quotation mark in the name ends it too early in PTX.
        shown = os.path.basename(source_path) if '"' in source_path else source_path
        status = library.nvrtcCreateProgram(ctypes.byref(program), text, os.fsencode(shown), 0, None, None)
        self._check(status, "nvrtcCreateProgram", source_path, options)
        try:
            if hasattr(library, "nvrtcSetFlowCallback"):  # since 12.8
                library.nvrtcSetFlowCallback(program, ctypes.CDLL(None).atoi, cancelled)
            array = (ctypes.c_char_p * len(options))(*[os.fsencode(option) for option in options])
            status = library.nvrtcCompileProgram(program, len(options), array)
            log = self._get(program, "ProgramLog", source_path, options).decode("utf-8", "replace")
            if status:
                raise CompileError(
                    f"{self.identity} could not compile {name} ({_error_name(library, status)}).",
                    log=log,
                    source_path=source_path,
                    options=options,
                )
            cubin = self._checked(self._get(program, "CUBIN", source_path, options), log, source_path, options)
            ptx = self._get(program, "PTX", source_path, options).decode("utf-8", "replace") if want_ptx else None
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))
        seconds = {"compile": time.perf_counter() - start}
        ptxas = ptxas_seconds(log)
        if ptxas is not None:
            seconds["ptxas"] = ptxas
        resources = self._resources(log, name, source_path, options)
        return Compiled(cubin, ptx and ptx.rstrip("\0"), log, resources, seconds, tuple(options))

    def _open(self) -> ctypes.CDLL:
        with self._lock.lock:
            if self._library is None:
                try:
                    _load_builtins(self.path, self.version)
                    library = ctypes.CDLL(self.path)
                    for function, arguments in _SIGNATURES.items():
                        getattr(library, function).argtypes = arguments
                except (OSError, AttributeError) as error:
                    raise CompilerNotFoundError(
                        f"NVRTC at {self.path} cannot be loaded ({error}). Install another, for example with "
                        "`pip install nvidia-cuda-nvrtc-cu12`."
                    ) from error
                if self.version <= _OWN_HANDLERS:
                    self._keep_handlers(library)
                self._library = library
                atexit.register(_end)
            return self._library

    def _keep_handlers(self, library: ctypes.CDLL) -> None:
        try:
            keep_handlers(library)
        except (OSError, ValueError) as error:
            why = f"a signal while {self.identity} compiles may hang or crash this process"
            warn_once(f"handlers:{self.path}", f"{why}: its signal handlers cannot be kept out ({error}).")

    def _get(self, program: ctypes.c_void_p, what: str, source_path: str, options: Sequence[str]) -> bytes:
        library = self._open()
        size = ctypes.c_size_t()
        status = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        self._check(status, f"nvrtcGet{what}Size", source_path, options)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}", source_path, options)
        return buffer.raw.rstrip(b"\0") if what == "ProgramLog" else buffer.raw

    def _check(self, status: int, call: str, source_path: str, options: Sequence[str]) -> None:
        if status:
            raise CompileError(
                f"{call} of {self.identity} failed with {_error_name(self._open(), status)}.",
                source_path=source_path,
                options=options,
            )


def _load_builtins(path: str, version: tuple[int, int]) -> None:
    """NVRTC opens its library of builtins by name alone while it compiles. The wheel of 13.0 finds it only if it is
    loaded already."""
    builtins = f"libnvrtc-builtins.so.{version[0]}.{version[1]}"
    with contextlib.suppress(OSError):
        ctypes.CDLL(os.path.join(os.path.dirname(os.path.realpath(path)), builtins))


def library_version(path: str) -> tuple[int, int]:
    """(major, minor) by asking the library itself. Raises CompilerNotFoundError if it cannot be loaded."""
    try:
        library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        status = library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError) as error:
        raise CompilerNotFoundError(f"NVRTC at {path} cannot be loaded: {error}.") from error
    if status:
        raise CompilerNotFoundError(f"NVRTC at {path} does not tell its version (status {status}).")
    return major.value, minor.value


def _error_name(library: ctypes.CDLL, status: int) -> str:
    get = library.nvrtcGetErrorString
    get.restype = ctypes.c_char_p
    get.argtypes = [ctypes.c_int]
    text = get(status)
    return text.decode() if text else f"status {status}"
