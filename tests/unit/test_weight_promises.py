"""Weight promises: what they cover, when they end, and that the end of a storage at any moment breaks nothing."""

import ctypes
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import deep_gemm
from deep_gemm import InvalidInputError, log
from deep_gemm.runtime import weight_promises
from deep_gemm.settings import child_environment

CALLBACKS_WORK = weight_promises._callbacks_work()


@pytest.fixture(autouse=True)
def no_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_promises, "_promises", {})
    # An old torch reports nearly all ends: enough for all tests but one.
    monkeypatch.setattr(weight_promises, "_callbacks_work", lambda: True)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """One item for each call of the listeners."""
    told: list[None] = []
    monkeypatch.setattr(weight_promises.changed, "all", (*weight_promises.changed.all, lambda: told.append(None)))
    return told


class Memory:
    """64 bytes at one address, for one storage after another."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_uint8 * 64)()

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.buffer, dtype=torch.uint8)


def test_all_views_of_a_storage_are_constant() -> None:
    w = torch.zeros(8, 16)
    assert not weight_promises.is_constant(w)
    deep_gemm.declare_constant(w[2:3])
    views = [w, w[1:], w.t(), w.view(torch.uint8), w.detach(), torch.nn.Parameter(w), w.reshape(-1), w[0, 0]]
    views += [torch.empty(0).set_(w.untyped_storage(), 4, (3, 2), (2, 1))]
    with torch.inference_mode():
        views.append(w[:4])
    assert all(weight_promises.is_constant(view) for view in views)
    assert not weight_promises.is_constant(w.clone())
    assert not weight_promises.is_constant(torch.zeros(8, 16))


def test_a_view_that_outlives_the_tensor_keeps_the_promise(changes: list[None]) -> None:
    w = torch.zeros(8, 16)
    deep_gemm.declare_constant(w)
    last = w[1:3].t()
    del w
    gc.collect()
    assert weight_promises.is_constant(last)
    assert len(changes) == 1
    del last
    assert weight_promises._promises == {}
    assert len(changes) == 2


def test_any_of_several_tensors_of_one_storage_declares_and_retracts(changes: list[None]) -> None:
    whole = torch.zeros(64)
    first, second = whole[:32], whole[32:]
    deep_gemm.declare_constant(first, second)
    deep_gemm.declare_constant(first)
    deep_gemm.declare_constant(whole)
    assert weight_promises.is_constant(second)
    assert len(changes) == 1, "declaring again changes nothing"
    deep_gemm.retract_constant(second)
    assert not weight_promises.is_constant(first)
    deep_gemm.retract_constant(first)
    deep_gemm.retract_constant(torch.zeros(3))
    assert len(changes) == 2, "retracting what was not declared changes nothing"
    deep_gemm.declare_constant(first)
    assert weight_promises.is_constant(whole)


def test_nothing_at_all() -> None:
    deep_gemm.declare_constant()
    deep_gemm.retract_constant()
    deep_gemm.declare_constant(torch.empty(0))


def test_an_address_that_is_used_again_is_not_constant() -> None:
    memory = Memory()
    w = memory.tensor()
    address = w.data_ptr()
    deep_gemm.declare_constant(w)
    assert weight_promises.is_constant(w)
    other = memory.tensor()
    assert other.data_ptr() == address
    assert not weight_promises.is_constant(other), "the promise belongs to the storage"
    del w
    assert not weight_promises.is_constant(memory.tensor())


def test_an_address_is_not_enough_even_if_nobody_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the callback the record stays, under a key that Python may reuse for another storage."""
    monkeypatch.setattr(weight_promises, "_freed", lambda promise: None)
    memory = Memory()
    w = memory.tensor()
    deep_gemm.declare_constant(w)
    del w
    (promise,) = weight_promises._promises.values()
    w = memory.tensor()
    weight_promises._promises[id(w.untyped_storage())] = promise
    assert not weight_promises.is_constant(w)


@pytest.mark.parametrize("owned_by_torch", [False, True])
@pytest.mark.parametrize("watched_by_another", [False, True])
def test_the_promise_ends_before_the_memory_is_given_back(
    owned_by_torch: bool, watched_by_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is no moment at which another tensor has the address while the promise still stands."""
    if not CALLBACKS_WORK and owned_by_torch and watched_by_another:
        pytest.skip("this torch does not tell, and promises have no effect")
    memory = Memory()
    alive = weakref.ref(memory.buffer)
    seen: list[bool] = []
    monkeypatch.setattr(weight_promises.changed, "all", (lambda: seen.append(alive() is not None),))
    w = memory.tensor()
    deep_gemm.declare_constant(w)
    storage = w.untyped_storage()
    other = StorageWeakRef(storage) if watched_by_another else None
    del memory
    if owned_by_torch:
        del storage, w
    else:
        del w, storage
    assert seen == [True, True]
    assert alive() is None
    assert weight_promises._promises == {}
    del other


def test_a_parameter_whose_data_is_exchanged() -> None:
    p = torch.nn.Parameter(torch.zeros(16))
    deep_gemm.declare_constant(p)
    p.data = torch.ones(16)
    assert not weight_promises.is_constant(p)
    assert weight_promises._promises == {}


def test_a_storage_that_is_resized_is_not_constant_and_may_be_declared_again() -> None:
    w = torch.zeros(1000)
    deep_gemm.declare_constant(w)
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(64 << 20)  # too large for the place that was freed
    assert not weight_promises.is_constant(w)
    deep_gemm.declare_constant(w)
    assert weight_promises.is_constant(w)


def test_the_garbage_collector_ends_promises_in_any_thread() -> None:
    class Module:
        pass

    module: Any = Module()
    module.itself = module
    module.weight = torch.zeros(16)
    deep_gemm.declare_constant(module.weight)
    del module
    assert len(weight_promises._promises) == 1
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert weight_promises._promises == {}


def test_autograd_keeps_the_promise_as_long_as_it_keeps_the_tensor() -> None:
    x = torch.ones(10, requires_grad=True)

    def product() -> torch.Tensor:
        w = torch.ones(10)
        deep_gemm.declare_constant(w)
        return (x * w).sum()

    y = product()
    assert len(weight_promises._promises) == 1
    y.backward()
    assert weight_promises._promises == {}


def test_threads_that_declare_and_free() -> None:
    def work() -> None:
        for _ in range(300):
            w = torch.zeros(8)
            deep_gemm.declare_constant(w)
            assert weight_promises.is_constant(w)
            deep_gemm.retract_constant(torch.zeros(8))
            del w

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weight_promises._promises == {}


@pytest.mark.parametrize("function", [deep_gemm.declare_constant, deep_gemm.retract_constant])
def test_what_is_no_tensor_with_memory(function: Any) -> None:
    good = torch.zeros(4)
    deep_gemm.retract_constant(good)
    name = function.__name__
    wanted = rf"tensors\[1\] of {name} must be a torch.Tensor, but it is of type float"
    with pytest.raises(InvalidInputError, match=wanted):
        function(good, 1.0)
    with pytest.raises(InvalidInputError, match=rf"tensors\[0\].*not tuple. Unpack a pair: {name}\(\*b\)"):
        function((good, good))
    sparse, freed = torch.eye(4).to_sparse(), torch.zeros(4)
    freed.untyped_storage().resize_(0)
    for empty, words in (
        (torch.empty(4, device="meta"), "is a meta tensor"),
        (sparse, "has the layout torch.sparse_coo"),
        (freed, "has no memory: it needs 16 bytes"),
    ):
        with pytest.raises(InvalidInputError, match=rf"tensors\[1\] of {name} {words}"):
            function(good, empty)
    assert not weight_promises.is_constant(good), "nothing is declared where one is wrong"


def test_a_torch_that_does_not_tell_of_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_promises, "_callbacks_work", lambda: False)
    log.reset_warnings()
    w = torch.zeros(4)
    with caplog.at_level(logging.WARNING, "deep_gemm"):
        deep_gemm.declare_constant(w)
        deep_gemm.declare_constant(w)
    assert not weight_promises.is_constant(w)
    assert [record.message for record in caplog.records if "declare_constant has no effect" in record.message] != []
    assert len(caplog.records) == 1


def test_torch_2_10_and_newer_tell() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 10):
        assert CALLBACKS_WORK


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_promises_after_a_fork_and_at_exit() -> None:
    """A child has its own copy of the promises, and a process with promises ends without a message."""
    code = """
import os, torch, deep_gemm
from deep_gemm.runtime import weight_promises
weight_promises._callbacks_work = lambda: True
w, v = torch.zeros(16), torch.zeros(16)
deep_gemm.declare_constant(w, v)
pid = os.fork()
if pid == 0:
    good = weight_promises.is_constant(w)
    del v
    good = good and len(weight_promises._promises) == 1
    deep_gemm.retract_constant(w)
    good = good and not weight_promises.is_constant(w)
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert weight_promises.is_constant(w) and weight_promises.is_constant(v)
"""
    env = child_environment("HOME")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr
