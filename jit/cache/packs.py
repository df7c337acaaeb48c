"""The read-only layer before the disk: packs that a setting names, that this package ships, and that installed packages
announce."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deep_gemm import errors
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.files import absolute, resolved
from deep_gemm.jit.cache.pack import Pack
from deep_gemm.jit.cache.packable import PackedKernel
from deep_gemm.jit.cache.solid import SolidPack
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.jit.forking import ForkLock
from deep_gemm.log import warn_once
from deep_gemm.records import record
from deep_gemm.settings import settings

GROUP = "deep_gemm.packs"
SHIPPED = "shipped"
"""What names the packs that this package ships, if it ships some (see `deep_gemm.aot.shipped`)."""

# The packs that are named, whether everybody on this machine is trusted, and whether shipped packs are used.
Setting = tuple[tuple[Path, ...], bool, bool]


@record(frozen=True)
class PackFile:
    """A pack that is named `by` a setting's variable or "package X", or `SHIPPED`. If it is not used, `pack` is None
    and `problem` is the reason."""

    path: Path
    by: str
    pack: Pack | SolidPack | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """path, by, kernels, bytes (of cubins), and problem or None."""
        kernels, size = (self.pack.count, self.pack.cubin_bytes) if self.pack is not None else (0, 0)
        return {"path": str(self.path), "by": self.by, "kernels": kernels, "bytes": size, "problem": self.problem}


def named_by(by: str) -> str:
    """`PackFile.by` for messages."""
    return "shipped with deep_gemm" if by == SHIPPED else f"named by {by}"


class Packs:
    """The packs of this process, or just those in `paths` (files, or directories of *.dgpack).

    They are opened at the first look-up, and again when the setting changes: those that a setting names, then those
    that this package ships. Those of installed packages are opened only if the others lack a kernel, since asking every
    distribution takes longer than reading a pack. A pack that cannot be used raises nothing and causes one warning. All
    methods are safe from several threads.
    """

    def __init__(self, paths: Sequence[Path] | None = None) -> None:
        self._paths = tuple(paths) if paths is not None else None
        self._opened: dict[tuple[object, ...], tuple[PackFile, ...]] = {}
        self._lock = ForkLock()

    @property
    def setting(self) -> Setting:
        """The current setting, which decides which packs are used."""
        if self._paths is not None:
            return self._paths, settings.trust_cache_dir, False
        return settings.precompiled, settings.trust_cache_dir, settings.shipped

    def found(self) -> tuple[PackFile, ...]:
        """Every pack that is named, whether it is used or not, in the order in which they are searched."""
        found: dict[str, PackFile] = {}
        for one in self._asked(self.setting):
            found.setdefault(resolved(one.path), one)
        return tuple(found.values())

    def get(
        self, source_key: str, name: str, arch: str, setting: Setting | None = None
    ) -> tuple[PackedKernel, bytes] | None:
        """The first kernel of this key that the driver here can load, with its verified cubin, or None. `setting` is
        the current one, if the caller has it already."""
        looked_up = self._get(source_key, name, arch, setting or self.setting)
        return looked_up and looked_up[1:]

    def holder(self, source_key: str, name: str, arch: str) -> PackFile | None:
        """The pack that `get` takes this kernel from, or None."""
        looked_up = self._get(source_key, name, arch, self.setting)
        return looked_up and looked_up[0]

    def _get(
        self, source_key: str, name: str, arch: str, setting: Setting
    ) -> tuple[PackFile, PackedKernel, bytes] | None:
        for found in self._asked(setting):
            kernel = None
            try:
                kernel = found.pack.find(source_key) if found.pack is not None else None
                if kernel is None or (kernel.name, kernel.arch) != (name, arch) or not _is_loadable(found, kernel):
                    continue
                assert found.pack is not None
                return found, kernel, found.pack.cubin(source_key)
            except (OSError, ValueError) as error:
                _warn(found, kernel, error)
        return None

    def source(self, render_key: str) -> str | None:
        """The verified source of the first kernel with this render key, or None."""
        for found in self._asked(self.setting):
            kernel = None
            try:
                kernel = found.pack.rendered(render_key) if found.pack is not None else None
                if kernel is not None and found.pack is not None:
                    return found.pack.source(kernel.source_key).decode()
            except (OSError, ValueError) as error:
                _warn(found, kernel, error)
        return None

    def _asked(self, setting: Setting) -> Iterator[PackFile]:
        """The named packs, then the shipped ones, and then, if the caller goes on, the announced ones."""
        paths, trust, shipped = setting
        by = "its caller" if self._paths is not None else "DG_JIT_PRECOMPILED"
        yield from self._open((paths, trust), lambda: ((path, by) for path in paths))
        if shipped:
            yield from self._open((SHIPPED,), _shipped)
        if self._paths is None:
            yield from self._open(("announced", trust), _announced)

    def _open(self, key: tuple[object, ...], named: Callable[[], Iterable[tuple[Path, str]]]) -> tuple[PackFile, ...]:
        opened = self._opened.get(key)
        if opened is None:
            with self._lock.lock:
                opened = self._opened.get(key)
                if opened is None:
                    opened = self._opened[key] = _look(named())
        return opened


def _is_loadable(found: PackFile, kernel: PackedKernel) -> bool:
    """Whether the driver here can load a kernel. If not, one warning says so."""
    release = driver_release()
    if release is None or kernel.toolkit[0] <= release[0]:
        return True
    message = (
        f"The pack {found.path} holds kernels of CUDA {kernel.cuda}, which the driver here, of CUDA "
        f"{release[0]}.{release[1]}, cannot load; they are not used."
    )
    warn_once(f"pack-driver:{found.path}", message)
    return False


def _warn(found: PackFile, kernel: PackedKernel | None, error: Exception) -> None:
    which = f"The kernel {kernel.name}" if kernel is not None else "A kernel"
    message = f"{which} in the pack {found.path} is not used: {error}."
    warn_once(f"pack-kernel:{found.path}:{kernel.source_key if kernel is not None else error}", message)


def _look(named: Iterable[tuple[Path, str]]) -> tuple[PackFile, ...]:
    found: dict[str, PackFile] = {}
    for path, by in named:
        for one in _open_all(absolute(path), by):
            found.setdefault(resolved(one.path), one)
    for one in found.values():
        if one.problem is not None:
            warn_once(f"pack:{one.path}", f"The pack {one.path} ({named_by(one.by)}) is not used: {one.problem}.")
    return tuple(found.values())


def _open_all(path: Path, by: str) -> Iterator[PackFile]:
    try:
        files = sorted(path.glob(f"*{packs.SUFFIX}")) if path.is_dir() else [path]
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise ValueError("this directory cannot be read")
        if not files:
            raise ValueError(f"this directory holds no *{packs.SUFFIX}")
    except (OSError, ValueError) as error:
        yield PackFile(path, by, problem=str(error))
        return
    for file in files:
        try:
            # Whoever can write to a shipped pack can write to the code that lies beside it and reads it.
            yield PackFile(file, by, packs.read(file, settings.trust_cache_dir or by == SHIPPED))
        except (OSError, ValueError) as error:
            yield PackFile(file, by, problem=str(error).rstrip("."))


def _shipped() -> Iterable[tuple[Path, str]]:
    folder = shipped_folder()
    return [(folder, SHIPPED)] if any(folder.glob(f"*{packs.SUFFIX}")) else []


def shipped_folder() -> Path:
    """Where the packs lie that this package ships; it need not exist."""
    return Path(errors.__file__).with_name(SHIPPED)


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
