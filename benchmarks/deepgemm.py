"""DeepGEMM beside us and cuBLASLt, in one process: `deep-gemm bench --deepgemm DIRECTORY`.

DIRECTORY is what `pip install --target DIRECTORY` made of DeepGEMM, which is imported under the name of this package.
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
