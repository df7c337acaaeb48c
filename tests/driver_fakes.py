"""A fake driver: the types of cuda.bindings, and calls that are noted and answered here."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from deep_gemm.jit.driver import api, launch, module, tensor_map
from deep_gemm.jit.driver.module import Function

OK = bindings.CUresult.CUDA_SUCCESS
HANDLES = (bindings.CUcontext, bindings.CUdevice, bindings.CUmodule, bindings.CUfunction)
HANDLE = 0x7000_0000_0088
"""Of a kernel: an address that 32 bits cannot hold."""


def arity(name: str) -> int:
    """How many arguments a function of the bindings takes: what the driver writes, it returns."""
    signature = (inspect.getdoc(getattr(bindings, name)) or "").splitlines()[0]
    arguments = signature.partition("(")[2].rpartition(")")[0]
    return len([part for part in arguments.split(",") if part.strip()])


class FakeDriver:
    """cuda.bindings.driver with its types and enumerations. `answers` take a call's arguments, with handles as ints,
    and return its status and what it writes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuGetErrorString": lambda result: (OK, b"the driver's text"),
            "cuCtxGetCurrent": lambda: (OK, bindings.CUcontext(self.current)),
            "cuCtxSetCurrent": self._set_current,
            "cuDevicePrimaryCtxRetain": lambda device: (OK, bindings.CUcontext(1000 + device)),
            "cuDeviceGet": lambda ordinal: (OK, bindings.CUdevice(ordinal)),
            "cuModuleLoadData": lambda image: (OK, bindings.CUmodule(77)),
            "cuModuleGetFunction": lambda module, name: (OK, bindings.CUfunction(HANDLE)),
            "cuFuncGetAttribute": lambda attribute, function: (OK, 100 + int(attribute)),
            "cuDeviceGetAttribute": lambda attribute, device: (OK, 232448),
            "cuThreadExchangeStreamCaptureMode": self._exchange_mode,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda *_: (OK, 2),
        }
        self.current = 0
        self.capture_mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def _exchange_mode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return (OK, before)

    def _set_current(self, context: int) -> tuple[Any, ...]:
        self.current = context
        return (OK,)

    def fail(self, function: str, name: str) -> None:
        self.answers[function] = lambda *_: (getattr(bindings.CUresult, name), None)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and name[2:3].isupper()):
            return getattr(bindings, name)
        count = arity(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            assert len(arguments) == count, f"{name} takes {count} arguments"
            plain = tuple(int(x) if isinstance(x, HANDLES) else x for x in arguments)
            self.calls.append((name, plain))
            return self.answers.get(name, lambda *_: (OK,))(*plain)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(api, "cuda", lambda: fake)
    monkeypatch.setattr(api, "library_function", lambda name: lambda *arguments: 0)  # encodes zeros
    monkeypatch.setattr(api, "_initialised_in", None)
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()
    yield fake
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()


@pytest.fixture
def function() -> Function:
    return Function("k", bindings.CUfunction(HANDLE), 0, 168, 0, 1024, 200_000, bindings.CUmodule(77))
