"""Which backends there are, and which of them can run an operation.

A backend's modules are imported when one of its kernels is asked for, never before. Kernels and operations put
themselves into the tables below by their decorators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from .operations import Operation

Call = Callable[[], Any]
Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "deep_gemm.backends"
"""The entry point group in which other packages name modules whose decorators register backends."""


class Backend:
    """One way to run operations. A subclass is registered by the decorator `backend`, its kernels by `kernel`."""

    name: ClassVar[str] = ""
    requires: ClassVar[str] = ""
    """The module that must be importable, such as "triton"; empty if there is none."""
    install: ClassVar[str] = ""
    """What to do if it is not: "pip install triton"."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that hold its kernels. They are imported when one is asked for."""

    def why_absent(self) -> str:
        """Why it cannot be used in this Python, as a clause; "" if it can. Must import nothing large."""
        if self.requires and not _importable(self.requires):
            return f"the module {self.requires} is not installed" + (f" ({self.install})" if self.install else "")
        return ""

    def why_not(self, device: torch.device) -> str:
        """Why it cannot run on ``device``, as a clause; "" if it can. Backends run on GPUs if nothing else is said."""
        return "" if device.type == "cuda" else "it needs a GPU"

    def slowness(self, device: torch.device) -> float:
        """How many times as long as a multiplication by torch's reference its products take on ``device``, roughly:
        above 1 only for what emulates a GPU."""
        return 1.0

    def load(self) -> None:
        """Import the modules that hold its kernels."""
        for module in self.modules:
            importlib.import_module(module)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: somebody put None in its place, so that nobody imports it
        return False


@dataclass(frozen=True)
class Kernel:
    """A backend's implementation of an operation. A call takes the operation's operands and writes the output.

    ``name`` is the backend's, with ":" and a variant where it has several.
    """

    name: str
    op: str
    function: Callable[..., Any]
    prepares: bool = False
    """``function`` returns a call without arguments, having done what a model does once, such as laying out scales."""
    easier: bool = False
    """It solves an easier problem: it is timed, but its result is not the operation's."""

    @property
    def backend(self) -> str:
        """The name of its backend."""
        return self.name.partition(":")[0]

    def prepare(self, *operands: Any) -> Call:
        """A call without arguments, which is what is timed. It writes the output, or returns the result."""
        if self.prepares:
            prepared: Call = self.function(*operands)
            return prepared
        return functools.partial(self.function, *operands)

    def __call__(self, *operands: Any) -> None:
        """Compute the operation on its operands."""
        result = self.prepare(*operands)()
        if result is not None:
            get_operation(self.op).output(operands).copy_(result)


_backends: dict[str, Backend] = {}
_kernels: dict[tuple[str, str], Kernel] = {}
_operations: dict[str, Operation] = {}
_broken: dict[str, str] = {}
"""Entry points that did not load, and why."""

BackendClass = TypeVar("BackendClass", bound=type[Backend])
OperationOrClass = TypeVar("OperationOrClass", bound="Operation | type[Operation]")


def backend(cls: BackendClass) -> BackendClass:
    """Register a subclass of `Backend`. A later one of the same name replaces it."""
    if not cls.name or ":" in cls.name:
        raise InvalidInputError(f"{cls.__name__}.name must be a name without ':', but it is {cls.name!r}.")
    _backends[cls.name] = cls()
    return cls


def kernel(name: str, op: str, *, prepares: bool = False, easier: bool = False) -> Callable[[Function], Function]:
    """Register a function as the implementation of ``op`` by a backend, "triton", or a variant of it, "triton:split".

    A backend that nobody has registered comes to be. The function takes the operation's operands and writes the output,
    or returns the result. With ``prepares`` it returns a call that does so, see `Kernel.prepares`.
    """

    def register(function: Function) -> Function:
        _kernels[name, op] = Kernel(name, op, function, prepares, easier)
        return function

    return register


def operation(what: OperationOrClass) -> OperationOrClass:
    """Register a subclass of `Operation`, or an instance of one."""
    made = what() if isinstance(what, type) else what
    _operations[made.name] = made
    return what


@functools.cache
def _find() -> None:
    """Import the built-in backends' names and operations, and what other packages have."""
    for module in ("builtin", "operations"):
        importlib.import_module(f"{__package__}.{module}")
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # another package's mistake is a line in a table, not the end of ours
            _broken[entry.name] = f"{entry.value} does not load: {type(error).__name__}: {error}"


def _all() -> dict[str, Backend]:
    """The backends by name: the built-in ones, then others, and those that kernels are of without having been told."""
    _find()
    for found in list(_kernels.values()):
        if found.backend not in _backends:
            backend(type("Anywhere", (Backend,), {"name": found.backend, "why_not": lambda self, device: ""}))
    return _backends


def names() -> list[str]:
    """All backends that are known, installed or not."""
    known = _all()
    return [*known, *(name for name in _broken if name not in known)]


def absent() -> dict[str, str]:
    """Backends that cannot be used in this Python, and why."""
    reasons = {name: found.why_absent() for name, found in _all().items()}
    return {name: why for name, why in reasons.items() if why} | _broken


def get_backend(name: str) -> Backend:
    """A backend by its name. Raises InvalidInputError for an unknown one, and UnsupportedError if it is absent."""
    known = _all()
    if name not in known and name not in _broken:
        raise InvalidInputError(f"backend must be one of {', '.join(names())}, but it is {name!r}.")
    if why := _broken.get(name) or known[name].why_absent():
        raise UnsupportedError(f"The backend {name} cannot be used here: {why}.")
    return known[name]


def get_kernel(name: str, op: str) -> Kernel:
    """A backend's implementation of an operation, such as ``get_kernel("triton", "fp8_gemm_nt")``.

    It is called as our function of that name is. Raises InvalidInputError for an unknown backend or operation, and
    UnsupportedError if the backend is absent or has no such kernel; the message says which others have one.
    """
    get_operation(op)
    _load(get_backend(name.partition(":")[0]))
    found = _kernels.get((name, op))
    if found is None:
        raise UnsupportedError(f"The backend {name} has no {op}. These have: {', '.join(of(op)) or 'none'}.")
    return found


def of(op: str) -> list[str]:
    """The backends that are here and have an operation, variants as "cublaslt:tensorwise". A GPU need not be here."""
    get_operation(op)
    gone = absent()
    for name, found in list(_all().items()):
        if name not in gone:
            with contextlib.suppress(UnsupportedError):  # `get_kernel` says why
                _load(found)
    order = [name for name in _all() if name not in gone]
    has = [kernel for kernel in _kernels.values() if kernel.op == op and kernel.backend in order]
    return [kernel.name for kernel in sorted(has, key=lambda kernel: order.index(kernel.backend))]


def _load(found: Backend) -> None:
    try:
        found.load()
    except Exception as error:  # whatever a library of others raises as it is imported
        raise UnsupportedError(
            f"The backend {found.name} cannot be used here: {type(error).__name__}: {error}"
        ) from error


def operation_names() -> list[str]:
    """The operations that can be compared."""
    _find()
    return list(_operations)


def get_operation(op: str) -> Operation:
    """An operation by its name. Raises InvalidInputError for an unknown one."""
    _find()
    if op not in _operations:
        raise InvalidInputError(f"op must be one of {', '.join(_operations)}, but it is {op!r}.")
    return _operations[op]
