"""Weight promises: weights that are promised to be constant are fetched while the predecessor kernel still runs.

A promise belongs to a storage, so it covers all views. It is looked up by the storage's Python object, which torch
keeps while the storage lives, and never by an address, which the allocator reuses. A weakref callback drops the promise
before the memory is freed. Callbacks run in any thread at any moment, even inside a garbage collection: so nothing here
takes a lock, and each step is one operation on a dictionary.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deep_gemm.errors import InvalidInputError
from deep_gemm.listeners import Listeners
from deep_gemm.log import warn_once
from deep_gemm.tensors import check_tensor, is_fake


class _Promise(weakref.ref):
    """A declared storage: its key in the table below, and the address of its memory when it was declared."""

    __slots__ = ("address", "key")

    address: int
    key: int

    def __new__(cls, storage: torch.UntypedStorage) -> _Promise:
        self = super().__new__(cls, storage, _freed)
        self.key, self.address = id(storage), storage.data_ptr()
        return self


_promises: dict[int, _Promise] = {}
changed = Listeners()
"""Is called after every declaration, retraction and freed storage. A listener must not take a lock (see the top of this
file)."""


def _freed(promise: _Promise) -> None:
    if _promises.get(promise.key) is promise:
        del _promises[promise.key]
        changed()


def declare_constant(*tensors: Tensor) -> None:
    """Promise that nothing that may still run when a GEMM is launched writes to these tensors.

    If ``b`` of a call was declared (of an FP8 call, both ``b[0]`` and ``b[1]``) and programmatic dependent launch is on
    (`set_pdl`), the kernel reads it before its predecessor has finished. It still waits for the predecessor before it
    reads ``a``, its scales and ``c`` and before it writes ``d``: those may come from the kernel just before.

    The promise: no kernel or copy that can still run writes ``b``. That includes the kernel launched just before in the
    same stream. It includes earlier ones if kernels of other libraries in between let their successors start
    (`griddepcontrol.launch_dependents`) before they have waited themselves. Without a promise nothing is assumed.

    Declare weights and their scales once: after loading them and a synchronisation, or long before they are used. To
    write to them later, synchronise before the next GEMM is launched, or `retract_constant` first. A CUDA graph keeps
    the promises of its capture: synchronise between writing to weights and replaying it.

    The promise covers the whole storage: views, slices, transposes and other Python objects of the same memory. It ends
    when the storage is freed, and does not pass to a new tensor at the same address. Retract before a storage is
    resized (`UntypedStorage.resize_`), which frees memory without freeing the storage.

    Args:
        tensors: weights and scales, any number of them, of any shape, dtype and device. On the CPU it has no effect.
            Declaring twice is the same as once.

    Raises:
        InvalidInputError: an argument is not a tensor with memory of its own. Nothing is declared then.

    >>> w = torch.ones(32, 64).bfloat16()
    >>> deep_gemm.declare_constant(w)
    """
    storages = [_storage(x, index, "declare_constant") for index, x in enumerate(tensors)]
    if not _callbacks_work():
        warn_once(
            "constant",
            f"torch {torch.__version__} does not always tell that a storage was freed, so declare_constant has no "
            f"effect. Use torch 2.10 or newer.",
        )
        return
    new = [storage for storage in storages if not _holds(storage)]
    for storage in new:
        _promises[id(storage)] = _Promise(storage)
    if new:
        changed()


def retract_constant(*tensors: Tensor) -> None:
    """Take back the promises for the storages of these tensors: later calls read them only after their predecessor has
    finished. CUDA graphs that were captured before do not change. Tensors that were not declared are ignored.

    Raises:
        InvalidInputError: an argument is not a tensor with memory of its own. Nothing is retracted then.

    >>> w = torch.ones(32, 64).bfloat16()
    >>> deep_gemm.declare_constant(w)
    >>> deep_gemm.retract_constant(w)
    """
    storages = [_storage(x, index, "retract_constant") for index, x in enumerate(tensors)]
    if not _promises:
        return
    found = [_promises.pop(id(storage), None) for storage in storages]
    if any(promise is not None for promise in found):
        changed()


def is_constant(x: Tensor) -> bool:
    """Whether the storage of ``x`` was declared constant, and still has the memory that it had then."""
    return bool(_promises) and _holds(x.untyped_storage())


def _holds(storage: torch.UntypedStorage) -> bool:
    promise = _promises.get(id(storage))
    return promise is not None and promise() is storage and promise.address == storage.data_ptr()


def _storage(x: Any, index: int, function: str) -> torch.UntypedStorage:
    name = f"tensors[{index}] of {function}"
    if isinstance(x, (tuple, list)):
        raise InvalidInputError(f"{name} must be a tensor, not {type(x).__name__}. Unpack a pair: {function}(*b).")
    check_tensor(name, x)
    if is_fake([x]):
        raise InvalidInputError(f"{name} is a fake tensor, which has a shape and no data.")
    return x.untyped_storage()


@functools.cache
def _callbacks_work() -> bool:
    """Whether a weak reference to a storage calls back even if C++ owns its Python object and torch's own weak
    reference to it exists (torch.multiprocessing keeps one). Before torch 2.10 it did not, although the memory was
    freed."""
    told: list[object] = []
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    watch = weakref.ref(storage, told.append)
    other = StorageWeakRef(storage)
    del storage, tensor
    ended = bool(told)
    del other, watch
    return ended
