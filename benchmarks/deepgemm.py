"""DeepGEMM beside us and cuBLASLt, in one process: `deep-gemm bench --deepgemm DIRECTORY`.

DIRECTORY is where `pip install --target DIRECTORY` put DeepGEMM, which has the same import name as this package.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

from deep_gemm.errors import DeepGemmError

NAME = "deep_gemm"


@functools.cache
def load(directory: Path) -> ModuleType:
    """The package ``deep_gemm`` in ``directory``, where ``pip install --target`` put it. It is imported once, since an
    extension cannot be loaded twice.

    This package is taken out of sys.modules for the import, and put back afterwards. So later imports inside DeepGEMM
    must be relative, or of other packages. Both packages read `DG_JIT_CACHE_DIR`, and use different names there.

    Raises DeepGemmError if the directory has no such package, or one that cannot be imported or is not DeepGEMM.
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
    except Exception as error:  # whatever its extension or its headers raise
        raise DeepGemmError(f"DeepGEMM in {directory} does not import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(directory))
        _take_out()
        sys.modules.update(ours)
    if not hasattr(found, "fp8_gemm_nt") or hasattr(found, "declare_constant"):
        raise DeepGemmError(f"The package {NAME} in {directory} is not DeepGEMM.")
    return found


def _take_out() -> dict[str, ModuleType]:
    """Take every module of ``deep_gemm`` out of sys.modules."""
    names = [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]
    return {name: sys.modules.pop(name) for name in names}
