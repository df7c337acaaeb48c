"""Loads DeepGEMM into the same process, although its package has the same name as ours: from a directory on
``sys.path`` that is not ours, or one that was filled by ``pip install --target DIRECTORY``. It compiles at the first
call."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import ops
from ..errors import DeepGemmError, UnsupportedError
from .attention_operations import MqaLogitsOperation, PagedMqaLogitsOperation, PrenormOperation
from .batched_operations import EINSUMS, FP8_EINSUM
from .grouped_operations import K_GROUPED, M_GROUPED
from .operations import B16_GEMMS, RECIPES
from .registry import Call, kernel

NAME = "deep_gemm"
_loaded: list[Any] = []
"""The library that was passed to `use`, if any."""


def use(library: Any) -> str:
    """Compare with this module of DeepGEMM. Returns its version."""
    _loaded[:] = [library]
    return str(getattr(library, "__version__", "of no known version"))


def why_absent() -> str:
    if _loaded or _installed() is not None:
        return ""
    return f"no other package {NAME} is on sys.path; compare --deepgemm DIRECTORY takes one from pip install --target"


def _installed() -> Path | None:
    """A directory of ``sys.path`` with a package of our name that is not ours and looks like DeepGEMM's."""
    ours = Path(__file__).resolve().parents[1]
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".", NAME)
        if (package / "include" / NAME).is_dir() and package.resolve() != ours:
            return Path(entry or ".")
    return None


def library() -> Any:
    """DeepGEMM's module. Raises DeepGemmError if there is none."""
    if not _loaded:
        directory = _installed()
        if directory is None:
            raise DeepGemmError(f"There is no DeepGEMM here: {why_absent()}.")
        use(load(directory))
    return _loaded[0]


def prepare(op: str, *operands: Any) -> Call:
    """A call of its function with the operation's name, or an older one. Raises AttributeError if there is none."""
    older = OLDER.get(op, op)
    return functools.partial(getattr(library(), op if hasattr(library(), op) else older), *operands)


def adding(op: str, a: Any, b: Any, d: Any, *sizes: Any) -> Call:
    """A call that adds to ``d`` in place, which is zeroed once: its functions need a c."""
    return functools.partial(getattr(library(), op), a, b, d.zero_(), *sizes, d)


OLDER = {f"m_grouped_{kind}_gemm_nt_masked": f"{kind}_m_grouped_gemm_nt_masked" for kind in ("fp8", "bf16")}
for _op in (ops.DEFAULT, *B16_GEMMS, *(grouped.name for grouped in M_GROUPED)):
    kernel("deepgemm", _op, prepares=True)(functools.partial(prepare, _op))
for _k_grouped in K_GROUPED:
    kernel("deepgemm", _k_grouped.name, prepares=True)(functools.partial(adding, _k_grouped.name))


for _einsum in EINSUMS:
    kernel("deepgemm", _einsum.name, prepares=True)(functools.partial(prepare, "einsum", _einsum.form))
kernel("deepgemm", FP8_EINSUM.name, prepares=True)(functools.partial(prepare, FP8_EINSUM.name, FP8_EINSUM.form))


@kernel("deepgemm", ops.WGRAD, prepares=True)
def weight_gradient(a: Any, b: Any, d: Any, c: Any = None) -> Call:
    """A call of its `fp8_gemm_nt`, which needs a c. If there is none, c is d, which is zeroed once."""
    c = d.zero_() if c is None else c
    return functools.partial(library().fp8_gemm_nt, a, b, d, c=c, recipe=RECIPES[ops.WGRAD])


@kernel("deepgemm", MqaLogitsOperation.name, prepares=True)
def logits(*operands: Any) -> Call:
    """A call of its `fp8_mqa_logits`, which cleans the result in a second kernel."""
    if not hasattr(library(), MqaLogitsOperation.name):
        raise UnsupportedError(
            f"this version has no {MqaLogitsOperation.name}, and what it has instead cleans no columns"
        )
    return functools.partial(library().fp8_mqa_logits, *operands[:-1], clean_logits=True)


@kernel("deepgemm", PagedMqaLogitsOperation.name, prepares=True)
def paged_logits(q: Any, *operands: Any) -> Call:
    """A call of its `fp8_paged_mqa_logits`, or of the newer name."""
    rest = (*operands[:-1], operands[-1].shape[1])
    if hasattr(library(), PagedMqaLogitsOperation.name):
        return functools.partial(library().fp8_paged_mqa_logits, q, *rest, clean_logits=False)
    return functools.partial(library().fp8_fp4_paged_mqa_logits, (q, None), *rest)


@kernel("deepgemm", PrenormOperation.name, prepares=True)
def prenorm(*operands: Any) -> Call:
    """A call that writes both results."""
    return prepare(PrenormOperation.name, *PrenormOperation.arguments(*operands))


@functools.cache
def load(directory: Path) -> ModuleType:
    """The package ``deep_gemm`` in ``directory``. It is loaded once, since an extension cannot be loaded twice. Our
    package is removed from the table of modules during the import, and restored afterwards.

    Raises DeepGemmError if the directory has no such package, or the package does not import or is not DeepGEMM.
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
    except Exception as error:  # its extension may raise anything
        raise DeepGemmError(f"DeepGEMM in {directory} does not import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(directory))
        _take_out()
        sys.modules.update(ours)
    if not hasattr(found, "fp8_gemm_nt") or hasattr(found, "declare_constant"):
        raise DeepGemmError(f"The package {NAME} in {directory} is not DeepGEMM.")
    return found


def _take_out() -> dict[str, ModuleType]:
    """Remove all modules of ``deep_gemm`` from the table of modules, and return them."""
    names = [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]
    return {name: sys.modules.pop(name) for name in names}
