"""Puts this library in the place of the DeepGEMMs that other programs bring with them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import deep_gemm as ours
from deep_gemm.errors import UnsupportedError
from deep_gemm.log import warn_once

__all__ = ["enable"]

NAME = "deep_gemm"
COPIES = ("vllm.third_party.deep_gemm", "tensorrt_llm.deep_gemm")
"""Packages inside other programs that are a DeepGEMM of their own."""
HUB = "transformers.integrations.hub_kernels"
"""The module of Transformers that keeps the kernels which it loaded from the Hugging Face hub."""
HUB_NAME = "deep-gemm"


def enable() -> tuple[str, ...]:
    """Make this library the DeepGEMM of other programs in this process. Returns the names that lead here now.

    The import of vLLM's copy, ``vllm.third_party.deep_gemm``, and of TensorRT-LLM's, ``tensorrt_llm.deep_gemm``, then
    gives this package, and so do their submodules. Transformers gets it as the kernel ``deep-gemm`` of the hub. What
    imports ``deep_gemm`` has it anyway. Calls repeat nothing, and the first one logs a warning that names them all.

    Call it before the programs are imported, and in each process: those that were started with "spawn" begin anew.
    Afterwards a copy can only be replaced as long as no module has taken a function from it.

    Raises UnsupportedError, which names the module and what it took; then nothing is changed.

    >>> deep_gemm.compat.enable()
    ('vllm.third_party.deep_gemm', 'tensorrt_llm.deep_gemm', 'transformers: deep-gemm')
    """
    names = *COPIES, f"transformers: {HUB_NAME}"
    if sys.modules.get(NAME) is not ours:
        raise UnsupportedError(
            f"{NAME} is now the package in {_place(sys.modules.get(NAME))}, and this is the one in {_place(ours)}. "
            "Remove the other one from sys.path, and start the process again: what was taken from it stays."
        )
    loaded = [copy for copy in COPIES if sys.modules.get(copy) not in (None, ours)]
    if taken := [*(text for copy in loaded for text in _taken_functions(copy)), *_taken_by_transformers()]:
        raise UnsupportedError(
            f"It is too late to replace another DeepGEMM: {'; '.join(taken)}. What was taken stays. Call "
            "deep_gemm.compat.enable() before these modules are imported, first of all in the process."
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for copy in loaded:
        _replace(copy)
    if HUB in sys.modules:
        _give(sys.modules[HUB])
    warn_once("compat", f"{NAME} in {_place(ours)} is in the place of other DeepGEMMs: {', '.join(names)}.")
    return names


def _place(module: ModuleType | None) -> str:
    """The directory of a package."""
    return next(iter(getattr(module, "__path__", ())), "no directory")


class _Finder(MetaPathFinder, Loader):
    """Finds our modules under the names of the copies, and gives Transformers its kernel once it can hold one."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname == HUB:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader)
            return spec
        own = _own(fullname)
        if own is None or importlib.util.find_spec(own) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what is in the table now. Our module's own name and spec stay as they are.
        sys.modules[module.__name__] = importlib.import_module(_own(module.__name__) or NAME)


_finder = _Finder()


def _own(name: str) -> str | None:
    """Our module for one of a copy."""
    for copy in COPIES:
        if name == copy or name.startswith(f"{copy}."):
            return NAME + name.removeprefix(copy)
    return None


def _run_after(loader: Any) -> None:
    """Call `_give` with the module that the loader loads."""
    load = loader.exec_module

    def load_and_give(module: ModuleType) -> None:
        load(module)
        _give(module)

    loader.exec_module = load_and_give


def _give(hub: ModuleType) -> None:
    """Make this package the kernel that Transformers has loaded from the hub."""
    loaded = getattr(hub, "_KERNEL_MODULE_MAPPING", None)
    if not isinstance(loaded, dict):
        warn_once("compat transformers", f"{hub.__name__} keeps no table of kernels: Transformers loads its own ones.")
        return
    loaded[HUB_NAME] = ours


def _taken_by_transformers() -> Iterator[str]:
    name = "transformers.integrations.deepgemm"
    found = getattr(sys.modules.get(name), "_DEEPGEMM", None)
    if found is not None and getattr(found, "fp8_fp4_matmul", None) is not ours.fp8_fp4_gemm_nt:
        yield f"{name} has taken fp8_fp4_gemm_nt from the kernel of the hub"


def _taken_functions(copy: str) -> Iterator[str]:
    """Modules that hold functions or classes of a copy."""
    modules = [module for name, module in _others(copy, inside=True)]
    held = {id(value) for module in modules for value in vars(module).values() if _is_of(value, copy)}
    for name, module in _others(copy):
        names = [own for own, value in list(vars(module).items()) if id(value) in held]
        if names:
            yield f"{name} has taken {', '.join(names)} from {copy}"


def _is_of(value: Any, copy: str) -> bool:
    module = getattr(value, "__module__", None)
    return callable(value) and isinstance(module, str) and f"{module}.".startswith(f"{copy}.")


def _others(copy: str, inside: bool = False) -> list[tuple[str, ModuleType]]:
    """The loaded modules outside of a copy, or those inside."""
    found = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    return [each for each in found if f"{each[0]}.".startswith(f"{copy}.") == inside]


def _replace(copy: str) -> None:
    """Put this package in the place of a copy that is loaded, also where modules refer to it as a module."""
    gone = {name: sys.modules.pop(name) for name, _ in _others(copy, inside=True)}
    replaced = {
        id(module): importlib.import_module(name) for name, module in gone.items() if _finder.find_spec(name, None)
    }
    for _, module in _others(copy):
        for own, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, own, replaced[id(value)])
