"""Which compilers there are, which one is used, and why."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from deep_gemm.errors import CompilerNotFoundError
from deep_gemm.jit.cache.files import absolute
from deep_gemm.jit.compilers.base import MIN_VERSION, Compiler
from deep_gemm.jit.compilers.nvcc import Nvcc
from deep_gemm.jit.compilers.nvrtc import Nvrtc, library_version
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.jit.forking import ForkLock
from deep_gemm.log import log, warn_once
from deep_gemm.records import record
from deep_gemm.settings import settings

_LIBRARY = re.compile(r"libnvrtc\.so\.[\d.]+$")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)")
_INSTALL = (
    "Install NVRTC with `pip install nvidia-cuda-nvrtc-cu12` (for CUDA 13, `nvidia-cuda-nvrtc`), or a CUDA toolkit of "
    "at least 12.3."
)


@record(frozen=True)
class FoundCompiler:
    """One compiler: `kind` "nvcc" or "nvrtc", `version` as text ("13.0.88", "12.9", "unknown"), whether it can be used
    here, whether it is the one in use, and why (not)."""

    kind: str
    path: str
    version: str
    usable: bool
    chosen: bool
    why: str


@record(frozen=True)
class _Candidate:
    found: FoundCompiler
    compiler: Compiler | None = None
    # Larger is better, among usable ones of a kind; candidates of equal rank keep the order of the search.
    rank: tuple[int, ...] = ()


_chosen: dict[tuple[object, ...], Compiler] = {}
_nvccs: dict[tuple[str, int, int], Nvcc] = {}
# What `problem` said of each compiler that was tried, by identity.
_tried: dict[tuple[str, str], str | None] = {}
_lock = ForkLock()
_trial = ForkLock()  # taken inside the other or alone


def choose() -> Compiler:
    """The compiler to use under the current settings. Raises CompilerNotFoundError, naming what was looked at.

    NVCC where a usable one is found, NVRTC otherwise or with DG_JIT_USE_NVRTC. An NVCC that a setting names is used or
    is an error.
    """
    key = (settings.use_nvrtc, settings.nvcc, settings.cuda_home)
    compiler = _chosen.get(key)
    if compiler is None:
        with _lock.lock:
            candidates = _search(stop_early=True)
        for candidate in candidates:
            if candidate.found.chosen and candidate.compiler is not None:
                compiler = candidate.compiler
                if candidate.found.kind == "nvrtc" and candidate.rank[:1] == (0,):
                    warn_once(f"compiler:{compiler.path}", f"{compiler.identity}: {candidate.found.why}")
        if compiler is None:
            raise CompilerNotFoundError(_nothing(candidates))
        log.debug("compiler: %s at %s", compiler.identity, compiler.path)
        _chosen[key] = compiler
    return compiler


def find_all(tried: bool = False) -> list[FoundCompiler]:
    """Every compiler on this machine, NVCC first. Never raises. With `tried`, each one compiles a one-line kernel
    first, which takes a second or two; one that cannot is not usable."""
    with _lock.lock:
        candidates = _search(stop_early=False)
    if tried:
        for candidate in candidates:
            if candidate.compiler is not None:
                _try(candidate.compiler)
        with _lock.lock:
            candidates = _search(stop_early=False)
    return [candidate.found for candidate in candidates]


def is_broken(compiler: Compiler) -> bool:
    """Whether `compiler` is broken: it cannot compile a one-line kernel either. `choose` then no longer gives it."""
    problem = _try(compiler)
    if problem is None:
        return False
    _chosen.clear()
    with contextlib.suppress(CompilerNotFoundError):
        other = choose()
        warn_once(
            f"compiler:{compiler.path}",
            f"{compiler.identity} at {compiler.path} cannot compile a one-line kernel ({problem}): {other.identity} at "
            f"{other.path} is used instead.",
        )
    return True


def _try(compiler: Compiler) -> str | None:
    with _trial.lock:
        key = (compiler.path, compiler.identity)
        if key not in _tried:
            _tried[key] = compiler.problem()
        return _tried[key]


def _known_problem(compiler: Compiler) -> str | None:
    return _tried.get((compiler.path, compiler.identity))


def forget() -> None:
    """Search again at the next `choose`; for tests and for callers that installed or repaired a compiler meanwhile."""
    _chosen.clear()
    _tried.clear()


def _nothing(candidates: list[_Candidate]) -> str:
    if settings.nvcc is not None and not settings.use_nvrtc:
        why = candidates[0].found.why if candidates else "it was not found"
        return f"DG_JIT_NVCC_COMPILER names {settings.nvcc}, which cannot be used: {why}. Correct it or unset it."
    seen = "; ".join(f"{c.found.path}: {c.found.why}" for c in candidates) or "none was found"
    what = "NVRTC" if settings.use_nvrtc else "CUDA compiler"
    return f"There is no usable {what} ({seen}). {_INSTALL}"


def _search(stop_early: bool) -> list[_Candidate]:
    """All candidates, at most one of them marked as chosen. `stop_early` leaves NVRTC out if an NVCC is chosen."""
    nvccs = [] if stop_early and settings.use_nvrtc else [_judge_nvcc(path) for path in _nvcc_paths()]
    pick = None if settings.use_nvrtc else _best(nvccs)
    required = settings.nvcc is not None and not settings.use_nvrtc
    if stop_early and (pick is not None or required):
        return _mark(nvccs, pick)
    nvrtcs = [_judge_nvrtc(path, loaded) for path, loaded in _nvrtc_paths()]
    if pick is None and not required:
        pick = _best(nvrtcs)
    return _mark([*nvccs, *nvrtcs], pick)


def _best(candidates: list[_Candidate]) -> _Candidate | None:
    return max((c for c in candidates if c.found.usable), key=lambda c: c.rank, default=None)


def _mark(candidates: list[_Candidate], pick: _Candidate | None) -> list[_Candidate]:
    def told(c: _Candidate) -> FoundCompiler:
        known = not c.found.usable or c.rank[:1] == (0,) or (settings.use_nvrtc and c.found.kind == "nvcc")
        if c is pick or pick is None or known:
            return replace(c.found, chosen=c is pick)
        return replace(c.found, why=f"usable, but {pick.found.path} comes first")

    return [replace(c, found=told(c)) for c in candidates]


def _judge_nvcc(path: str) -> _Candidate:
    try:
        compiler = _open_nvcc(path)
    except (CompilerNotFoundError, OSError) as error:
        return _Candidate(FoundCompiler("nvcc", path, "unknown", False, False, str(error).rstrip(".")))
    version = compiler.identity.split()[1]
    driver = driver_release()
    why = ""
    if compiler.version < MIN_VERSION:
        why = f"it is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}, the first version that serves sm_90a well"
    elif driver is not None and compiler.version[0] > driver[0]:
        why = f"the driver supports CUDA {driver[0]}.{driver[1]} and cannot load what CUDA {version} compiles"
    # Without g++ it is tried at once: nvcc's own configuration may name another host compiler.
    elif problem := _try(compiler) if shutil.which("gcc") is None else _known_problem(compiler):
        needs = "; it needs a host C++ compiler such as g++" if shutil.which("gcc") is None else ""
        why = f"it cannot compile a one-line kernel ({problem}){needs}"
    if why:
        return _Candidate(FoundCompiler("nvcc", path, version, False, False, why))
    named = settings.nvcc is not None
    why = "DG_JIT_NVCC_COMPILER names it" if named else "NVCC is the default where it is found"
    if settings.use_nvrtc:
        why = "usable, but DG_JIT_USE_NVRTC is set"
    return _Candidate(FoundCompiler("nvcc", path, version, True, False, why), compiler, (1,))


def _open_nvcc(path: str) -> Nvcc:
    status = Path(path).stat()
    key = (path, status.st_size, status.st_mtime_ns)
    if key not in _nvccs:
        _nvccs[key] = Nvcc(path)
    return _nvccs[key]


def _judge_nvrtc(path: str, loaded: bool) -> _Candidate:
    try:
        version = _nvrtc_version(path)
        compiler = Nvrtc(path, version)
    except CompilerNotFoundError as error:
        return _Candidate(FoundCompiler("nvrtc", path, "unknown", False, False, str(error).rstrip(".")))
    text = f"{version[0]}.{version[1]}"
    if version < MIN_VERSION:
        why = f"it is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}, the first version that serves sm_90a well"
        return _Candidate(FoundCompiler("nvrtc", path, text, False, False, why))
    if problem := _known_problem(compiler):
        return _Candidate(
            FoundCompiler("nvrtc", path, text, False, False, f"it cannot compile a one-line kernel ({problem})")
        )
    driver = driver_release()
    fits = driver is None or version[0] <= driver[0]
    if not fits and driver is not None:
        why = f"the driver supports CUDA {driver[0]}.{driver[1]} and may refuse cubins of CUDA {text}"
    elif loaded:
        why = "this process has loaded it already"
    elif driver is None:
        why = "there is no driver, so the newest will do"
    else:
        why = f"the driver supports CUDA {driver[0]}.{driver[1]}, so the newest up to CUDA {driver[0]} will do"
    return _Candidate(
        FoundCompiler("nvrtc", path, text, True, False, why), compiler, (int(fits), int(loaded), *version)
    )


def _nvrtc_version(path: str) -> tuple[int, int]:
    # The library of builtins beside it has the version in its name, which saves loading 100 MB to ask for it.
    major = re.search(r"\.so\.(\d+)", Path(path).name)
    names = _listed(os.path.dirname(os.path.realpath(path)))
    versions = {m.groups() for name in names if (m := _BUILTINS.match(name))}
    matching = [(int(a), int(b)) for a, b in versions if major is None or a == major.group(1)]
    return matching[0] if len(matching) == 1 else library_version(path)


def _nvcc_paths() -> list[str]:
    if settings.nvcc is not None:
        return [str(absolute(settings.nvcc))]
    on_path = shutil.which("nvcc")
    paths = [str(absolute(Path(on_path)))] if on_path else []
    paths += [str(path) for home in _toolkits() if (path := home / "bin" / "nvcc").is_file()]
    return _distinct(paths)


def _nvrtc_paths() -> list[tuple[str, bool]]:
    """(path, already loaded) of every NVRTC library, each file once."""
    loaded = _loaded()
    folders = []
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [f"{root}/{name}/lib" for name in sorted(_listed(root), reverse=True)]
    for home in (*_toolkits(), sys.prefix):  # the last for conda
        folders += [f"{home}/lib64", f"{home}/lib"]
    usual = _listed("/usr/lib")
    folders += [f"/usr/lib/{name}" for name in sorted(usual) if name.endswith("-linux-gnu")]
    folders += ["/usr/lib64", "/usr/lib"]
    paths = list(loaded)
    for folder in folders:
        names = [name for name in (usual if folder == "/usr/lib" else _listed(folder)) if _LIBRARY.match(name)]
        paths += [f"{folder}/{name}" for name in sorted(names, key=lambda name: (len(name), name))]
    real_loaded = {os.path.realpath(path) for path in loaded}
    return [(path, os.path.realpath(path) in real_loaded) for path in _distinct(paths)]


def _listed(folder: str) -> list[str]:
    """The names in a directory, or none if it does not exist. A process reads ten directories with thousands of
    names."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _toolkits() -> list[Path]:
    homes = [settings.cuda_home] if settings.cuda_home is not None else []
    return [*homes, Path("/usr/local/cuda")]


def _loaded() -> list[str]:
    """NVRTC libraries that this process has mapped, torch's for one."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    if b"libnvrtc" not in maps:
        return []
    lines = maps.decode(errors="replace").splitlines()
    paths = (line.split(maxsplit=5)[5] for line in lines if "libnvrtc" in line)
    return [path for path in dict.fromkeys(paths) if _LIBRARY.match(os.path.basename(path))]


def _distinct(paths: list[str]) -> list[str]:
    """Each file once: a path that leads to the same file as an earlier one is left out."""
    kept: dict[str, str] = {}
    for path in paths:
        kept.setdefault(os.path.realpath(path), path)
    return list(kept.values())
