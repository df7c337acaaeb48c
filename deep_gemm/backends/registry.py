"""The registry of backends, kernels and operations. A backend's modules are imported when a kernel is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from ..errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Call = Callable[[], Any]
Function = TypeVar("Function", bound=Callable[..., Any])

Dims = tuple[int, ...]
Rate = Literal["fp8", "half", "float32"]
"""The units whose peak rate bounds the arithmetic: tensor cores with 8 or 16 bits, or the float32 units."""

GROUP = "deep_gemm.backends"
"""The entry point group in which other packages name modules whose decorators register backends."""


class Backend:
    """One way to run operations. A subclass is registered by the decorator `backend`, its kernels by `kernel`.

    >>> isinstance(deep_gemm.backends.get_backend("torch"), deep_gemm.backends.Backend)
    True
    """

    name: ClassVar[str] = ""
    requires: ClassVar[str] = ""
    """The module that the backend needs, such as "triton"; empty if it needs none."""
    install: ClassVar[str] = ""
    """How to install it, such as "pip install triton"."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules with its kernels. They are imported when a kernel is needed."""

    def why_absent(self) -> str:
        """Why it cannot be used in this Python, as a clause; "" if it can. It must not import large modules."""
        if self.requires and not _importable(self.requires):
            return f"the module {self.requires} is not installed" + (f" ({self.install})" if self.install else "")
        return ""

    def why_not(self, device: torch.device) -> str:
        """Why it cannot run on ``device``, as a clause; "" if it can. By default backends run on GPUs only."""
        return "" if device.type == "cuda" else "it needs a GPU"

    def slowness(self, device: torch.device) -> float:
        """Its rough time relative to torch's reference. Only backends that emulate a GPU return more than 1."""
        return 1.0

    def load(self) -> None:
        for module in self.modules:
            importlib.import_module(module)


class Operation(ABC):
    """One operation. Kernels take its operands by position and write one of them in place.

    ``dims`` are the names of the sizes of a shape, in the order of "64x512x256" on a command line.

    >>> deep_gemm.backends.get_operation("m_grouped_bf16_gemm_nt_masked").dims
    ('groups', 'mean rows', 'N', 'K')
    """

    name: str
    dims: tuple[str, ...]
    examples: tuple[Dims, ...]
    """The default shapes."""
    host_examples: tuple[Dims, ...]
    """The default shapes without a GPU."""
    rate: Rate = "float32"
    output_at = -1
    """The index of the operand that is written."""

    def output(self, operands: tuple[Any, ...]) -> Tensor:
        """The operand that is written."""
        found: Tensor = operands[self.output_at]
        return found

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        """What is compared with the exact result: the output, or the part of it that a kernel must write."""
        return self.output(operands)

    def put(self, operands: tuple[Any, ...], result: Tensor) -> None:
        """Store what a kernel returned instead of writing the output."""
        self.output(operands).copy_(result)

    def refuses(self, dims: Dims) -> str:
        """Why the operation does not support this shape, as a clause; "" if it does."""
        return ""

    @abstractmethod
    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Random operands with normal data. Zeros would make kernels faster than real data does."""

    @abstractmethod
    def exact(self, *operands: Any) -> Tensor:
        """The result in float64."""

    @abstractmethod
    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        """The largest allowed error of each element; float64."""

    @abstractmethod
    def flops(self, dims: Dims) -> int:
        """Floating-point operations; a multiply-add counts as two."""

    @abstractmethod
    def bytes_moved(self, dims: Dims) -> int:
        """Bytes of each operand and of the output, the least that must be moved."""

    @abstractmethod
    def elements(self, dims: Dims) -> int:
        """Elements of the output."""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: None in the table of modules, which prevents the import
        return False


@dataclass(frozen=True)
class Kernel:
    """A backend's implementation of an operation. ``name`` is the backend's, followed by ":" and a variant if it has
    several.

    >>> deep_gemm.backends.get_kernel("torch", "bf16_gemm_nt").easier
    False
    """

    name: str
    op: str
    function: Callable[..., Any]
    prepares: bool = False
    """Whether ``function`` does work that a model does once, such as converting scales, and returns a call without
    arguments."""
    easier: bool = False
    """Whether it solves an easier problem. It is timed, but its result is not compared with the operation's."""

    @property
    def backend(self) -> str:
        return self.name.partition(":")[0]

    def prepare(self, *operands: Any) -> Call:
        """A call without arguments, to be timed. It writes the output, or returns the result."""
        if self.prepares:
            prepared: Call = self.function(*operands)
            return prepared
        return functools.partial(self.function, *operands)

    def __call__(self, *operands: Any) -> None:
        result = self.prepare(*operands)()
        if result is not None:
            get_operation(self.op).put(operands, result)


_backends: dict[str, Backend] = {}
_kernels: dict[tuple[str, str], Kernel] = {}
_operations: dict[str, Operation] = {}
_broken: dict[str, str] = {}
"""Entry points that did not load, and why."""

BackendClass = TypeVar("BackendClass", bound=type[Backend])
OperationOrClass = TypeVar("OperationOrClass", bound=Operation | type[Operation])


def backend(cls: BackendClass) -> BackendClass:
    """Register a subclass of `Backend`. A later one of the same name replaces it."""
    if not isinstance(cls.name, str) or not cls.name.strip() or set(":,") & set(cls.name):
        raise InvalidInputError(f"{cls.__name__}.name must be a name without ':' and ',', but it is {cls.name!r}.")
    _backends[cls.name] = cls()
    return cls


def kernel(name: str, op: str, *, prepares: bool = False, easier: bool = False) -> Callable[[Function], Function]:
    """Register a function as the implementation of ``op`` by a backend, "triton", or a variant of it, "triton:split".

    An unknown backend is created. The function takes the operation's operands and writes the output, or returns the
    result. With ``prepares`` it returns a call that does this, see `Kernel.prepares`.
    """

    parts = name.split(":") if isinstance(name, str) else []
    if not 1 <= len(parts) <= 2 or not all(part.strip() for part in parts) or "," in name:
        raise InvalidInputError(f"name must be that of a backend, or like 'triton:split', but it is {name!r}.")
    if not isinstance(op, str) or not op.strip():
        raise InvalidInputError(f"op must be the name of an operation, but it is {op!r}.")

    def register(function: Function) -> Function:
        if not callable(function):
            raise InvalidInputError(f"{name} must be a function of {op}'s operands, but it is {function!r}.")
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
    """Import the built-in backends and operations, and the entry points of other packages."""
    for module in (
        "builtin",
        "operations",
        *(f"{kind}_operations" for kind in ("grouped", "batched", "fp4", "attention", "row")),
    ):
        importlib.import_module(f"{__package__}.{module}")
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # another package's error becomes a line in a table
            _broken[entry.name] = f"{entry.value} does not load: {type(error).__name__}: {error}"


def _all() -> dict[str, Backend]:
    """The backends by name: the built-in ones, then registered ones, then those that only kernels name."""
    _find()
    for found in list(_kernels.values()):
        if found.backend not in _backends:
            backend(type("Anywhere", (Backend,), {"name": found.backend, "why_not": lambda self, device: ""}))
    return _backends


def names() -> list[str]:
    """All backends that are known, installed or not.

    >>> {"cuda", "cublaslt", "triton", "torch"} <= set(deep_gemm.backends.names())
    True
    """
    known = _all()
    return [*known, *(name for name in _broken if name not in known)]


def absent() -> dict[str, str]:
    """Backends that cannot be used in this Python, and why.

    >>> "torch" in deep_gemm.backends.absent()
    False
    """
    reasons = {name: found.why_absent() for name, found in _all().items()}
    return {name: why for name, why in reasons.items() if why} | _broken


def get_backend(name: str) -> Backend:
    """A backend by its name. Raises InvalidInputError for an unknown one, and UnsupportedError if it is absent.

    >>> deep_gemm.backends.get_backend("torch").name
    'torch'
    """
    known = _all()
    if name not in known and name not in _broken:
        raise InvalidInputError(f"backend must be one of {', '.join(names())}, but it is {name!r}.")
    if why := _broken.get(name) or known[name].why_absent():
        raise UnsupportedError(f"The backend {name} cannot be used here: {why}.")
    return known[name]


def get_kernel(name: str, op: str) -> Kernel:
    """A backend's implementation of an operation, such as ``get_kernel("triton", "fp8_gemm_nt")``.

    Its arguments are those of our function of that name. Raises InvalidInputError for an unknown backend or operation,
    and UnsupportedError if the backend is absent or has no such kernel; the message lists the backends that have one.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.backends.get_kernel("torch", "bf16_gemm_nt").function(a, b, d)
    >>> d[0, 0].item()
    64.0
    """
    get_operation(op)
    _load(get_backend(name.partition(":")[0]))
    found = _kernels.get((name, op))
    if found is None:
        raise UnsupportedError(f"The backend {name} has no {op}. These have: {', '.join(of(op)) or 'none'}.")
    return found


def of(op: str) -> list[str]:
    """The available backends that have an operation, with variants such as "cublaslt:tensorwise". No GPU is needed.

    >>> "torch" in deep_gemm.backends.of("fp8_gemm_nt")
    True
    """
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
    except Exception as error:  # other libraries may raise anything when they are imported
        raise UnsupportedError(
            f"The backend {found.name} cannot be used here: {type(error).__name__}: {error}"
        ) from error


def operation_names() -> list[str]:
    """All operations that backends can have.

    >>> "fp8_gemm_nt" in deep_gemm.backends.operation_names()
    True
    """
    _find()
    return list(_operations)


def get_operation(op: str) -> Operation:
    """An operation by its name. Raises InvalidInputError for an unknown one.

    >>> deep_gemm.backends.get_operation("bf16_gemm_nt").dims
    ('M', 'N', 'K')
    """
    _find()
    if op not in _operations:
        raise InvalidInputError(f"op must be one of {', '.join(_operations)}, but it is {op!r}.")
    return _operations[op]
