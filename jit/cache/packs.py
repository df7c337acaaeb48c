"""The read-only layer before the disk: packs named by a setting, and packs announced by installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.files import absolute, resolved
from deep_gemm.jit.cache.pack import Kernel, Pack
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.jit.forking import ForkLock
from deep_gemm.log import warn_once
from deep_gemm.settings import settings

GROUP = "deep_gemm.packs"

# The packs that are named, and whether everybody on this machine is trusted.
Setting = tuple[tuple[Path, ...], bool]


@dataclass(frozen=True)
class Found:
    """A pack that is named `by` a setting's variable or "package X". If it is not used, `pack` is None and `problem` is
    the reason."""

    path: Path
    by: str
    pack: Pack | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """path, by, kernels, bytes (of cubins), and problem or None."""
        kernels, size = (len(self.pack.kernels), self.pack.cubin_bytes) if self.pack is not None else (0, 0)
        return {"path": str(self.path), "by": self.by, "kernels": kernels, "bytes": size, "problem": self.problem}


@dataclass(frozen=True)
class _Index:
    found: tuple[Found, ...]
    # In the order of the packs: the first kernel that can be loaded is used.
    kernels: dict[str, list[tuple[Found, Kernel]]]
    rendered: dict[str, list[tuple[Found, Kernel]]]


class Packs:
    """The packs of this process, or just those in `paths` (files, or directories of *.dgpack).

    They are opened at the first look-up, and again when the setting changes. Those of installed packages are opened
    only if the others lack a kernel, since asking every distribution takes longer than reading a pack. A pack that
    cannot be used raises nothing and causes one warning. All methods are safe from several threads.
    """

    def __init__(self, paths: Sequence[Path] | None = None) -> None:
        self._paths = tuple(paths) if paths is not None else None
        self._indices: dict[tuple[object, ...], _Index] = {}
        self._lock = ForkLock()

    @property
    def setting(self) -> Setting:
        """The current setting, which decides which packs are used."""
        paths = self._paths if self._paths is not None else settings.precompiled
        return (paths, settings.trust_cache_dir)

    def found(self) -> tuple[Found, ...]:
        """Every pack that is named, whether it is used or not, in the order in which they are searched."""
        found: dict[str, Found] = {}
        for index in self._asked(self.setting):
            for one in index.found:
                found.setdefault(resolved(one.path), one)
        return tuple(found.values())

    def get(self, source_key: str, name: str, arch: str, setting: Setting | None = None) -> tuple[Kernel, bytes] | None:
        """The first kernel of this key that the driver here can load, with its verified cubin, or None. `setting` is
        the current one, if the caller has it already."""
        asked = self._asked(setting or self.setting)
        for found, kernel in (item for index in asked for item in index.kernels.get(source_key, ())):
            if found.pack is None or (kernel.name, kernel.arch) != (name, arch):
                continue
            release = driver_release()
            if release is not None and kernel.toolkit[0] > release[0]:
                message = (
                    f"The pack {found.path} holds kernels of CUDA {kernel.cuda}, which the driver here, of CUDA "
                    f"{release[0]}.{release[1]}, cannot load; they are not used."
                )
                warn_once(f"pack-driver:{found.path}", message)
                continue
            try:
                return kernel, found.pack.cubin(source_key)
            except (OSError, ValueError) as error:
                _warn(found, kernel, error)
        return None

    def source(self, render_key: str) -> str | None:
        """The verified source of the first kernel with this render key, or None."""
        asked = self._asked(self.setting)
        for found, kernel in (item for index in asked for item in index.rendered.get(render_key, ())):
            try:
                if found.pack is not None:
                    return found.pack.source(kernel.source_key).decode()
            except (OSError, ValueError) as error:
                _warn(found, kernel, error)
        return None

    def _asked(self, setting: Setting) -> Iterator[_Index]:
        """The index of the named packs and then, if the caller goes on, of the announced ones."""
        paths, trust = setting
        by = "its caller" if self._paths is not None else "DG_JIT_PRECOMPILED"
        yield self._index(setting, lambda: ((path, by) for path in paths))
        if self._paths is None:
            yield self._index(("announced", trust), _announced)

    def _index(self, key: tuple[object, ...], named: Callable[[], Iterator[tuple[Path, str]]]) -> _Index:
        index = self._indices.get(key)
        if index is None:
            with self._lock.lock:
                index = self._indices.get(key)
                if index is None:
                    index = self._indices[key] = _look(named())
        return index


def _warn(found: Found, kernel: Kernel, error: Exception) -> None:
    message = f"The kernel {kernel.name} in the pack {found.path} is not used: {error}."
    warn_once(f"pack-kernel:{found.path}:{kernel.source_key}", message)


def _look(named: Iterator[tuple[Path, str]]) -> _Index:
    found: dict[str, Found] = {}
    for path, by in named:
        for one in _open_all(absolute(path), by):
            found.setdefault(resolved(one.path), one)
    kernels: dict[str, list[tuple[Found, Kernel]]] = {}
    rendered: dict[str, list[tuple[Found, Kernel]]] = {}
    for one in found.values():
        if one.problem is not None:
            warn_once(f"pack:{one.path}", f"The pack {one.path} (named by {one.by}) is not used: {one.problem}.")
        for source_key, kernel in one.pack.kernels.items() if one.pack is not None else ():
            kernels.setdefault(source_key, []).append((one, kernel))
            if kernel.render_key:
                rendered.setdefault(kernel.render_key, []).append((one, kernel))
    return _Index(tuple(found.values()), kernels, rendered)


def _open_all(path: Path, by: str) -> Iterator[Found]:
    try:
        files = sorted(path.glob(f"*{packs.SUFFIX}")) if path.is_dir() else [path]
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise ValueError("this directory cannot be read")
        if not files:
            raise ValueError(f"this directory holds no *{packs.SUFFIX}")
    except (OSError, ValueError) as error:
        yield Found(path, by, problem=str(error))
        return
    for file in files:
        try:
            yield Found(file, by, packs.read(file, settings.trust_cache_dir))
        except (OSError, ValueError) as error:
            yield Found(file, by, problem=str(error).rstrip("."))


def _announced() -> Iterator[tuple[Path, str]]:
    """The directories of the packages that installed distributions announce, in the order of their names."""
    try:
        # Parsing all entry points costs more than reading their files, and usually none is ours.
        if not any(GROUP in (one.read_text("entry_points.txt") or "") for one in importlib.metadata.distributions()):
            return
        points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    except Exception as error:  # whatever is wrong with another distribution's metadata
        warn_once(
            "pack-announced", f"Packs of installed packages are not used: their metadata cannot be read ({error!r})."
        )
        return
    for point in points:
        try:
            # Finding a package runs none of its code, unless it lies inside another.
            spec = importlib.util.find_spec(point.module)
            if spec is None or not spec.submodule_search_locations:
                raise ValueError("there is no such package")
        except Exception as error:  # whatever importing the package around it raises
            message = f'The packs of "{point.value}", announced as {point.name}, are not used: {error!r}.'
            warn_once(f"pack-announced:{point.name}", message)
            continue
        for folder in spec.submodule_search_locations:
            yield Path(folder), f"package {point.module}"
