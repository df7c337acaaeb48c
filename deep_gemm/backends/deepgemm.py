"""DeepGEMM in one process with us, although its package has the same name.

It is the package ``deep_gemm`` of another directory: of one on ``sys.path`` that is not ours, or of the one that `use`
is told, such as ``pip install --target DIRECTORY`` makes. It compiles a kernel for a shape in seconds, when it is first
called.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import DeepGemmError
from .operations import HALF_GEMMS, FP8Gemm, WeightGradient
from .registry import Call, kernel

NAME = "deep_gemm"
_told: list[Any] = []
"""The library that `use` was given, if it was."""


def use(library: Any) -> str:
    """Make the module of DeepGEMM the one that is compared. Returns its version."""
    _told[:] = [library]
    return str(getattr(library, "__version__", "of no known version"))


def why_absent() -> str:
    """See `Backend.why_absent`."""
    if _told or _installed() is not None:
        return ""
    return f"no second package {NAME} is on sys.path, nor was a directory named that pip install --target put it into"


def _installed() -> Path | None:
    """A directory of ``sys.path`` with a package of our name that is not ours, but looks like DeepGEMM's."""
    ours = Path(__file__).resolve().parents[1]
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".", NAME)
        if (package / "include" / NAME).is_dir() and package.resolve() != ours:
            return Path(entry or ".")
    return None


def library() -> Any:
    """DeepGEMM's module. Raises DeepGemmError if there is none."""
    if not _told:
        directory = _installed()
        if directory is None:
            raise DeepGemmError(f"There is no DeepGEMM here: {why_absent()}.")
        use(load(directory))
    return _told[0]


def prepare(op: str, *operands: Any) -> Call:
    """Its function of the operation's name; AttributeError if it has none."""
    return functools.partial(getattr(library(), op), *operands)


for _op in (FP8Gemm.name, *HALF_GEMMS):
    kernel("deepgemm", _op, prepares=True)(functools.partial(prepare, _op))


@kernel("deepgemm", WeightGradient.name, prepares=True)
def weight_gradient(a: Any, b: Any, d: Any, c: Any = None) -> Call:
    """Its `fp8_gemm_nt`, which wants a c: d itself, zeroed once, if there is none."""
    c = d.zero_() if c is None else c
    return functools.partial(library().fp8_gemm_nt, a, b, d, c=c, recipe=WeightGradient.recipe)


@functools.cache
def load(directory: Path) -> ModuleType:
    """The package ``deep_gemm`` in ``directory``, such as one that ``pip install --target`` made; once, since an
    extension cannot be loaded twice.

    Ours steps aside for the import and is in place again afterwards; what DeepGEMM imports later must be its own by
    relative names, or somebody else's. Both read `DG_JIT_CACHE_DIR`, and keep entries of different names there.

    Raises DeepGemmError if the directory has no such package, or what it has does not import or is not DeepGEMM.
    """
    directory = directory.resolve()
    if not (directory / NAME / "__init__.py").exists():
        raise DeepGemmError(
            f"There is no package {NAME} in {directory}. Name the directory that DeepGEMM was installed into, "
            "as by: pip install --target DIRECTORY ..."
        )
    ours = _take_out()
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(NAME)
    except Exception as error:  # whatever its extension or its headers say
        raise DeepGemmError(f"DeepGEMM in {directory} does not import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(directory))
        _take_out()
        sys.modules.update(ours)
    if not hasattr(found, "fp8_gemm_nt") or hasattr(found, "declare_constant"):
        raise DeepGemmError(f"The package {NAME} in {directory} is not DeepGEMM.")
    return found


def _take_out() -> dict[str, ModuleType]:
    """Takes whatever is imported as ``deep_gemm`` out of the table of modules."""
    names = [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]
    return {name: sys.modules.pop(name) for name in names}
